r"""
Text from a prompt on the command line, sampled under a compressed cache.

    python -m experiments.generate \
        --prompt=$'The code for pin is 4817.\nRepeat each word with its code: pin.'
    python -m experiments.generate --prompt="..." --model=Qwen/Qwen2.5-0.5B-Instruct --budget=64

The prompt goes through the checkpoint's chat template if it has one, unless --raw_text=True, behind
a message of the system if --system=TEXT says one. A model that a run of train.py saved
(--model=out/model, out/best) keeps what that run kept, with its --template and --raw_text, unless
said otherwise; the first line tells. Greedy unless --temperature is above 0; --group samples share
one compressed prompt cache. The last line says how many of the prompt's keys were kept and how many
bytes the cache holds; --evict=none generates from the dense cache, to compare.

Left out on purpose: conversations, streaming.
"""
import os
from statistics import fmean

import torch

from data.tasks import prompt_encoder
from data.tokenizer import Tokenizer
from kvcache import EVICT, POOL, SPREAD, Eviction
from model import Transformer, find_checkpoint
from rollout import generate
from support.configurator import Arguments, check, check_ranges
from support.jsonfile import parse_object, read_json, shown
from support.run import choose_device, is_of_a_run
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONS = {  # default, help
    "model": (os.path.join(ROOT, "data", "tiny"), "a folder or a hub name"),
    "system": ("", "what a system message says before the prompt"),
    "template": ("", 'arguments for the chat template: {"enable_thinking": false}'),
    "raw_text": (False, "prompt without chat template"),
    "control_tokens": (False, "with raw_text: text that spells a control token is one"),
    "device": ("auto", "auto: cuda if there is one; cpu (float32), cuda:N (bfloat16)"),
    "group": (1, "samples"), "max_new_tokens": (64, "longest response"),
    "temperature": (0.0, "0: greedy"), "seed": (0, "of the sampling"),
    "evict": ("snapkv", "eviction method"),
    "budget": (256, "prompt keys kept per layer and KV head"),
    "spread": ("uniform", "of the budget over layers and KV heads"),
    "window": (32, "last tokens, whose attention votes"),
    "sinks": (4, "first tokens, which are always kept"),
    "pool": (7, "width over which votes are pooled, odd"),
    "pool_by": ("max", "of neighbouring votes"),
    "response_budget": (0, "response keys kept; 0: all"),
    "period": (128, "steps between evictions of these"),}
CHOICES = dict(evict=list(EVICT), spread=list(SPREAD), pool_by=list(POOL))
RANGES = dict(group=(1, 10**6), max_new_tokens=(1, 10**9), temperature=(0, 100),
              seed=(0, 2**40))
OF_A_RUN = ("evict", "budget", "spread", "window", "sinks", "pool", "pool_by",
            "response_budget", "period", "template", "raw_text", "control_tokens",
            "shots")


def arguments(argv=None):
    """-> namespace; in it of_the_run: what a run's settings were taken for, as text; shots: how
    many examples its prompts began with."""
    a = Arguments(prog="generate", description="generate under a compressed KV cache")
    a.add_argument("--prompt", required=True, help="what the user says")
    for key, (default, text) in OPTIONS.items():
        kind = os.path.expanduser if key == "model" else type(default)
        a.add_argument(f"--{key}", default=default, type=kind, choices=CHOICES.get(key),
                       help=text)
    a.set_defaults(shots=0)  # a run's alone
    asked = a.parse_args(argv)
    found = settings_of_run(asked.model, defaults=vars(asked))
    a.set_defaults(**found)
    asked = a.parse_args(argv)
    asked.of_the_run = " ".join(f"--{key}={value}" for key, value in found.items()
        if value is not False and value != "" and key != "shots"
        and getattr(asked, key) == value)
    return asked


def settings_of_run(model, defaults):
    """{setting: value} of the run of train.py in whose folder a model's folder is; {} if there is
    none. Raises ValueError for a value that no run has."""
    path = os.path.join(os.path.dirname(os.path.abspath(model)), "config.json")
    if not os.path.isdir(model) or not is_of_a_run(path):
        return {}
    return {key: check(key, value, path, defaults, choices=CHOICES)
            for key, value in read_json(path).items() if key in OF_A_RUN}


def asked(a, tok):
    """-> the prompt, or messages where there is one of the system. Raises ValueError."""
    if not a.system:
        return a.prompt
    if a.raw_text or not tok.has_chat:
        why = "raw_text=True uses no" if a.raw_text else "this checkpoint has no"
        raise ValueError(f"system {shown(a.system)}: {why} chat template, leave it out")
    return [dict(role="system", content=a.system), dict(role="user", content=a.prompt)]


def run(a):
    """-> lines to print. Raises ValueError and OSError."""
    check_ranges(a, RANGES)
    eviction = Eviction(
        method=a.evict, budget=a.budget, spread=a.spread, window=a.window,
        sinks=a.sinks, pool=a.pool, pool_by=a.pool_by, period=a.period,
        response_budget=a.response_budget or None)
    a.dtype = "float32"
    choose_device(a)
    if a.device.startswith("cuda"):
        a.dtype = "bfloat16"
    folder = find_checkpoint(a.model)
    tok = Tokenizer(folder)
    dtype = getattr(torch, a.dtype)
    net = Transformer.from_pretrained(folder, device=a.device, dtype=dtype)
    net.use_tokens(len(tok), tok.absent)
    template = parse_object(a.template or "{}", "template")
    encode = prompt_encoder(tok, template, raw=a.raw_text, control=a.control_tokens)
    ids = encode(asked(a, tok))
    if len(ids) + a.max_new_tokens > net.config.max_pos:
        raise ValueError(f"a prompt of {len(ids)} tokens and "
                         f"max_new_tokens={a.max_new_tokens} exceed the model's "
                         f"context of {net.config.max_pos}")
    r = generate(net, [ids], a.group, a.max_new_tokens, temperature=a.temperature,
                 eviction=eviction, stop_ids=tok.stop_ids, seed=a.seed)
    texts = [tok.decode(tokens[:n])
             for tokens, n in zip(r.tokens[0].tolist(), r.lengths[0].tolist())]
    kept = fmean(len(head) for layer in r.kept[0] for head in layer)
    if a.of_the_run:
        texts.insert(0, f"[as in the run that saved it: {a.of_the_run}]")
    if a.shots:
        texts.insert(0, f"[{a.shots} answered examples stood before each prompt of the "
                     f"run that saved it (--shots={a.shots}), none stand here]")
    return [*texts, f"[{len(ids)} prompt tokens, {kept:.5g} kept per layer and KV head "
            f"({a.evict}); KV bytes {r.kv['kept']:,}, dense {r.kv['dense']:,}]"]


def main(argv=None):
    with one_line_errors(ValueError, OSError):
        tell("\n".join(run(arguments(argv))))


if __name__ == "__main__":
    main()
