r"""
Text from a prompt on the command line, sampled under a compressed cache.

    python -m experiments.generate \
        --prompt=$'The code for pin is 4817.\nRepeat each word with its code: pin.'
    python -m experiments.generate --prompt="..." --model=Qwen/Qwen2.5-0.5B-Instruct --budget=64

The prompt goes through the checkpoint's chat template if it has one, unless --raw_text=True, behind
a message of the system if --system=TEXT says one. A model that a run of train.py saved
(--model=out/model, out/best) keeps what that run kept, with its --template and --raw_text, unless
said otherwise; the first line tells. On a card it is loaded in float16 if it was saved so, else in
bfloat16, on a CPU in float32. Greedy unless --temperature is above 0; --group samples share
one compressed prompt cache. The last line says how many of the prompt's keys were kept and how many
bytes the cache holds; --evict=none generates from the dense cache, to compare.

Left out on purpose: conversations, streaming.
"""
import os
from statistics import fmean
from types import SimpleNamespace

import torch

from data.tasks import prompt_encoder
from data.tokenizer import Tokenizer
from kvcache import EVICT, POOL, SPREAD, Eviction
from model import Transformer, find_checkpoint
from rollout import generate
from run.settings import own_thing
from support.configurator import Arguments, check, check_ranges
from support.jsonfile import parse_object, read_json, shown
from support.own import is_own
from support.run import choose_device, is_of_a_run
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONS = {  # default, help
    "model": (os.path.join(ROOT, "data", "tiny"), "a folder or a hub name"),
    "system": ("", "what a system message says before the prompt"),
    "template": ("", 'arguments for the chat template: {"enable_thinking": false}'),
    "raw_text": (False, "take the prompt as it is, without the chat template"),
    "control_tokens": (False, "with raw_text: text such as <|im_end|> is that token"),
    "device": ("auto", "auto: cuda if there is one; cpu, cuda:N"),
    "group": (1, "how many responses"),
    "max_new_tokens": (64, "longest response in tokens"),
    "temperature": (0.0, "of the sampler; 0: greedy"),
    "seed": (0, "of the sampling"),
    "evict": ("snapkv", f"{', '.join(EVICT)}, or module:name"),
    "budget": (256, "prompt keys kept per layer and KV head"),
    "spread": ("uniform", "how the budget is shared among layers and KV heads"),
    "window": (32, "last prompt tokens, whose attention votes"),
    "sinks": (4, "first prompt tokens, which are always kept"),
    "pool": (7, "width over which votes are pooled, odd"),
    "pool_by": ("max", "the largest of neighbouring votes, or their mean"),
    "response_budget": (0, "response keys kept; 0: all"),
    "period": (128, "steps between evictions of response keys")}
CHOICES = dict(spread=list(SPREAD), pool_by=list(POOL))
RANGES = dict(group=(1, 10**6), max_new_tokens=(1, 10**9), temperature=(0, 100),
              seed=(0, 2**40))
OF_A_RUN = ("evict", "budget", "spread", "window", "sinks", "pool", "pool_by",
            "response_budget", "period", "template", "raw_text", "control_tokens",
            "shots")


def arguments(argv=None):
    """-> namespace; in it of_the_run: what a run's settings were taken for, as text; shots: how
    many examples its prompts began with."""
    parser = Arguments("generate", "generate under a compressed KV cache")
    parser.add_argument("--prompt", required=True, help="what the user says")
    for key, (default, text) in OPTIONS.items():
        kind = os.path.expanduser if key == "model" else type(default)
        parser.add_argument(f"--{key}", default=default, type=kind, help=text,
                            choices=CHOICES.get(key))
    parser.set_defaults(shots=0)  # a run's alone
    asked = parser.parse_args(argv)
    # argparse leaves what stands in a namespace already, unless the command line says it
    said = vars(parser.parse_args(argv, SimpleNamespace(**dict.fromkeys(OPTIONS))))
    given = [key for key in OPTIONS if said[key] is not None]
    bring_in(said["evict"])
    found = settings_of_run(asked.model, defaults=vars(asked), given=given)
    vars(asked).update(found)
    bring_in(asked.evict, bool(asked.response_budget))
    asked.of_the_run = " ".join(
        f"--{key}={value}" for key, value in found.items()
        if value is not False and value != "" and key != "shots")
    return asked


def settings_of_run(model, defaults, given):
    """{setting: value} of the run of train.py in whose folder a model's folder is, but for those
    given on the command line; {} if there is none. Raises ValueError for a value that no run
    has."""
    path = os.path.join(os.path.dirname(os.path.abspath(model)), "config.json")
    if not os.path.isdir(model) or not is_of_a_run(path):
        return {}
    found = {key: value for key, value in read_json(path).items()
             if key in OF_A_RUN and key not in given}
    bring_in(found.get("evict"))
    choices = dict(CHOICES, evict=list(EVICT))
    return {key: check(key, value, path, defaults, choices=choices)
            for key, value in found.items()}


def bring_in(evict, elsewhere=False):
    """Enter an eviction method that is named module:name into EVICT, as train.py does. elsewhere:
    whether response keys are evicted too. Raises ValueError for what cannot be one."""
    if isinstance(evict, str) and is_own(evict):
        EVICT[evict] = own_thing(evict, "evict", elsewhere)


def dtype_of(device, folder):
    """-> the dtype to load a checkpoint's folder in: float32 on a CPU; on a card float16 if it was
    saved so, else bfloat16."""
    if not device.startswith("cuda"):
        return torch.float32
    config = read_json(os.path.join(folder, "config.json"))
    saved = config.get("dtype") or config.get("torch_dtype")  # transformers 5 renamed it
    return torch.float16 if saved == "float16" else torch.bfloat16


def asked(args, tok):
    """-> the prompt, or messages where there is one of the system. Raises ValueError."""
    if not args.system:
        return args.prompt
    if args.raw_text or not tok.has_chat:
        why = "raw_text=True uses no" if args.raw_text else "this checkpoint has no"
        raise ValueError(f"system {shown(args.system)}: {why} chat template, leave it "
                         "out")
    return [dict(role="system", content=args.system),
            dict(role="user", content=args.prompt)]


def run(args):
    """-> lines to print. Raises ValueError and OSError."""
    check_ranges(args, RANGES)
    eviction = Eviction(
        method=args.evict, budget=args.budget, spread=args.spread, window=args.window,
        sinks=args.sinks, pool=args.pool, pool_by=args.pool_by, period=args.period,
        response_budget=args.response_budget or None)
    choose_device(args)
    folder = find_checkpoint(args.model)
    tok = Tokenizer(folder)
    dtype = dtype_of(args.device, folder)
    net = Transformer.from_pretrained(folder, device=args.device, dtype=dtype)
    net.use_tokens(len(tok), tok.absent)
    template = parse_object(args.template or "{}", "template")
    encode = prompt_encoder(tok, template, raw=args.raw_text,
                            control=args.control_tokens)
    ids = encode(asked(args, tok))
    if len(ids) + args.max_new_tokens > net.config.max_pos:
        raise ValueError(f"a prompt of {len(ids)} tokens and "
                         f"max_new_tokens={args.max_new_tokens} exceed the model's "
                         f"context of {net.config.max_pos}")
    rollout = generate(net, [ids], args.group, args.max_new_tokens, eviction=eviction,
                       temperature=args.temperature, stop_ids=tok.stop_ids,
                       seed=args.seed)
    responses = zip(rollout.tokens[0].tolist(), rollout.lengths[0].tolist())
    texts = [tok.decode(tokens[:length]) for tokens, length in responses]
    kept = fmean(len(head) for layer in rollout.kept[0] for head in layer)
    if args.of_the_run:
        texts.insert(0, f"[as in the run that saved it: {args.of_the_run}]")
    if args.shots:
        texts.insert(0, f"[the run that saved it had {args.shots} solved examples in "
                     f"front of each prompt (--shots={args.shots}), here are none]")
    return [*texts, f"[{len(ids)} prompt tokens, {kept:.5g} kept per layer and KV head "
            f"({args.evict}); KV bytes {rollout.kv['kept']:,}, dense "
            f"{rollout.kv['dense']:,}]"]


def main(argv=None):
    with one_line_errors(ValueError, OSError):
        tell("\n".join(run(arguments(argv))))


if __name__ == "__main__":
    main()
