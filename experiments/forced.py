"""
What a model still lacks: probabilities of the right answer's parts, with all before them given.

    python -m experiments.forced out/model out-naive/model --n=256    # on the embedded task kv4

The idea. A wrong answer says little, since one wrong token spoils the rest. So each held-out
problem of kv4 is scored with its right answer in the place of a response ("the gold prefix is
forced"), from the compressed cache, by replaying what the sampler kept of the prompt, and from the
full one. An answer is " coin 4768 lamp 1203 ..." and the stop token, so its tokens are of four
kinds:

    order   the names after the first (the first is predicted before any key is dropped)
    form    the space behind a name
    codes   both tokens of a code
    end     the stop token

A code is found by its keys. So codes are sorted by how many of the cache's heads (layers x KV
heads) kept both of its tokens.
"""
import json
from dataclasses import replace
from statistics import fmean

import torch

import train
from data.tokenizer import Tokenizer
from grpo import replay
from model import Transformer
from rollout import generate
from run.learn import micro_batches
from run.settings import eviction_of_evaluation
from run.start import problems_of
from support.configurator import Arguments
from support.run import choose_device, write_text
from support.screen import one_line_errors, tell

BINS = ((0, 0), (1, 2), (3, 5), (6, 8))  # heads that kept a code


def gold(net, tok, problems, config, n):
    """-> the problems; a Rollout whose responses are the right answers, evicted as the settings c
    say"""
    batch, prompts = problems.get("eval", range(n))
    rollout = generate(net, prompts, 1, config.max_new_tokens, temperature=0.0,
                       eviction=eviction_of_evaluation(config), stop_ids=tok.stop_ids)
    answers = [[*tok.encode(" " + each.answer), tok.stop_ids[0]] for each in batch]
    lengths = {len(ids) for ids in answers}
    if lengths != {config.max_new_tokens} or config.response_budget:
        raise ValueError(f"task {config.task}: answers of {config.max_new_tokens} "
                         "tokens are needed, and responses whose keys are not evicted")
    tokens = torch.tensor(answers, device=net.device)[:, None]            # (n, 1, R)
    full = torch.full_like(rollout.lengths, config.max_new_tokens)
    zeros = torch.zeros_like(tokens, dtype=rollout.logp_roll.dtype)       # (n, 1, R)
    return batch, replace(rollout, tokens=tokens, lengths=full, logp_roll=zeros)


def heads_with_code(kept, prompt, tok, key):
    """In how many heads both tokens of a key's code were kept. kept: of this prompt."""
    name, = tok.encode(f" {key}")
    is_ = tok.encode(" is")[0]
    at, = [row for row, pair in enumerate(zip(prompt, prompt[1:]))
           if pair == (name, is_)]
    heads = [set(positions.tolist()) for layer in kept for positions in layer]
    # name, " is", " ", code, code
    return sum({at + 3, at + 4} <= head for head in heads)


def measure(folder, config, n):
    """-> {cache: {kind: mean probability}}, {cache: {bin: (number of codes, mean probability)}}"""
    tok = Tokenizer(folder)
    net = Transformer.from_pretrained(folder, device=config.device)
    net.use_tokens(len(tok), tok.absent)
    batch, rollout = gold(net, tok, problems_of(config, tok, "auto", n), config, n=n)
    outs = []
    for part in micro_batches(rollout, 2, config.micro_rows):
        with torch.no_grad():
            outs.append(replay(net, rollout.select(part)))
    kinds, carried = {}, {}
    heads = [heads_with_code(kept, prompt, tok, key)
             for kept, prompt, each in zip(rollout.kept, rollout.prompts, batch)
             for key in each.answer.split()[::2]]
    for cache, policy in (("compressed", "shadow"), ("dense", "dense")):
        chances = torch.cat([out[policy] for out in outs])[:, 0].exp()          # (n, R)
        pairs = chances[:, :-1].view(n, -1, 4)                                 # (n, codes, 4)
        code = pairs[..., 2] * pairs[..., 3]                              # (n, codes)
        kinds[cache] = dict(order=pairs[:, 1:, 0].mean().item(),
                            form=pairs[..., 1].mean().item(),
                            codes=code.mean().item(), end=chances[:, -1].mean().item(),
                            answer=chances.prod(1).mean().item())
        carried[cache] = {}
        for low, high in BINS:
            found = [chance for kept_by, chance in zip(heads, code.flatten().tolist())
                     if low <= kept_by <= high]
            mean = fmean(found) if found else None
            carried[cache][f"{low}-{high}"] = len(found), mean
    return kinds, carried


def main():
    args = Arguments("forced", __doc__.strip().partition("\n")[0])
    args.add_argument("folders", nargs="+", help="folders of models")
    args.add_argument("--n", type=int, default=256, help="held-out problems")
    args.add_argument("--device", default="auto")
    args.add_argument("--out", default="", help="a .json file for the numbers")
    args = args.parse_args()
    with one_line_errors(ValueError, OSError):
        config = train.settings([f"--device={args.device}"])
        choose_device(config)
        found = {}
        for folder in args.folders:
            kinds, carried = found[folder] = measure(folder, config, args.n)
            tell(folder)
            for cache in kinds:
                text = "  ".join(f"{kind} {x:.3f}" for kind, x in kinds[cache].items())
                by = "  ".join(f"{heads}: {x:.3f} of {count}" for heads, (count, x)
                               in carried[cache].items() if count)
                tell(f"  {cache:10}  {text} | codes by heads that kept them: {by}")
        if args.out:
            write_text(args.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
