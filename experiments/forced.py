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


def gold(net, tok, problems, c, n):
    """-> the problems; a Rollout whose responses are the right answers, evicted as the settings c
    say"""
    batch, prompts = problems.get("eval", range(n))
    r = generate(net, prompts, 1, c.max_new_tokens, temperature=0.0,
                 eviction=eviction_of_evaluation(c), stop_ids=tok.stop_ids)
    answers = [[*tok.encode(" " + p.answer), tok.stop_ids[0]] for p in batch]
    if {len(a) for a in answers} != {c.max_new_tokens} or c.response_budget:
        raise ValueError(f"task {c.task}: answers of {c.max_new_tokens} tokens are "
                         "needed, and responses whose keys are not evicted")
    tokens = torch.tensor(answers, device=net.device)[:, None]            # (n, 1, R)
    full = torch.full_like(r.lengths, c.max_new_tokens)
    return batch, replace(r, tokens=tokens, lengths=full,
                          logp_roll=torch.zeros_like(tokens, dtype=r.logp_roll.dtype))


def heads_with_code(kept, prompt, tok, key):
    """In how many heads both tokens of a key's code were kept. kept: of this prompt."""
    name, = tok.encode(f" {key}")
    is_ = tok.encode(" is")[0]
    at, = [i for i, pair in enumerate(zip(prompt, prompt[1:])) if pair == (name, is_)]
    heads = [set(positions.tolist()) for layer in kept for positions in layer]
    # name, " is", " ", code, code
    return sum({at + 3, at + 4} <= head for head in heads)


def measure(folder, c, n):
    """-> {cache: {kind: mean probability}}, {cache: {bin: (number of codes, mean probability)}}"""
    tok = Tokenizer(folder)
    net = Transformer.from_pretrained(folder, device=c.device)
    net.use_tokens(len(tok), tok.absent)
    batch, r = gold(net, tok, problems_of(c, tok, "auto", n), c=c, n=n)
    outs = []
    for part in micro_batches(r, 2, c.micro_rows):
        with torch.no_grad():
            outs.append(replay(net, r.select(part)))
    kinds, carried = {}, {}
    heads = [[heads_with_code(kept, prompt, tok, key) for key in p.answer.split()[::2]]
             for kept, prompt, p in zip(r.kept, r.prompts, batch)]
    for cache, policy in (("compressed", "shadow"), ("dense", "dense")):
        p = torch.cat([out[policy] for out in outs])[:, 0].exp()          # (n, R)
        pairs = p[:, :-1].view(n, -1, 4)                                 # (n, codes, 4)
        code = pairs[..., 2] * pairs[..., 3]                              # (n, codes)
        kinds[cache] = dict(order=pairs[:, 1:, 0].mean().item(),
                            form=pairs[..., 1].mean().item(),
                            codes=code.mean().item(), end=p[:, -1].mean().item(),
                            answer=p.prod(1).mean().item())
        flat = [(h, x) for hs, xs in zip(heads, code.tolist()) for h, x in zip(hs, xs)]
        found = {}
        for low, high in BINS:
            xs = [x for h, x in flat if low <= h <= high]
            found[f"{low}-{high}"] = (len(xs), fmean(xs) if xs else None)
        carried[cache] = found
    return kinds, carried


def main():
    a = Arguments("forced", __doc__)
    a.add_argument("folders", nargs="+", help="folders of models")
    a.add_argument("--n", type=int, default=256, help="held-out problems")
    a.add_argument("--device", default="auto")
    a.add_argument("--out", default="", help="a .json file for the numbers")
    a = a.parse_args()
    with one_line_errors(ValueError, OSError):
        c = train.settings([f"--device={a.device}"])
        choose_device(c)
        found = {}
        for folder in a.folders:
            kinds, carried = found[folder] = measure(folder, c, a.n)
            tell(folder)
            for cache in kinds:
                text = "  ".join(f"{kind} {x:.3f}" for kind, x in kinds[cache].items())
                by = "  ".join(f"{heads}: {x:.3f} of {k}" for heads, (k, x)
                               in carried[cache].items() if k)
                tell(f"  {cache:10}  {text} | codes by heads that kept them: {by}")
        if a.out:
            write_text(a.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
