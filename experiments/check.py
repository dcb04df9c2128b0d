"""
Exercises of docs/exercises.md: is an answer right?

    python -m experiments.check 3 mine.py     # "right", or "wrong: ", a sentence, and exit code 1

The idea. A check calls the functions of mine.py on random inputs and compares what they return with
the project's own code, with a plain sum over all cases, or with what a run on the embedded
checkpoint does. Inputs are drawn from two seeds, one of them made from the text of mine.py: a
number copied from an error message is wrong the next time.

Left out: any protection. mine.py may import the project and may read this file.
"""
import functools
import itertools
import math
import operator
import os
import random
import re
import sys
import time
import traceback
import types
import zlib
from contextlib import contextmanager, suppress

import torch

from data.answers import in_form
from data.tasks import problem, prompt_encoder, reward
from data.tokenizer import Tokenizer
from fast.head import kl_rows
from grpo import NORMS, pack, replay, token_scale
from kvcache import EVICT, Eviction, attention, logits, pooled
from model import Transformer
from rollout import Rollout, generate
from shadow_attn import visible
from support.configurator import help_if_asked
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Wrong(Exception):
    """An answer is wrong; the message says which case and what was expected."""


# what checks have in common

def generator(seed):
    return torch.Generator().manual_seed(seed)


def shown(value):
    """A value in a message: short, on one line."""
    if torch.is_tensor(value):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value).replace("\n", " ")
    if isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"


def number(value, call):
    """x as a float; Wrong if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last: several numbers
        raise Wrong(f"{call} must be a number, got {shown(value)}") from None


def finite_tensor(tensor, shape, call):
    """x as fp64, if it is a tensor of this shape and of finite numbers; else it is wrong."""
    got = tuple(tensor.shape) if torch.is_tensor(tensor) else type(tensor).__name__
    if got != tuple(shape):
        raise Wrong(f"{call} must be a tensor of shape {tuple(shape)}, got {got}")
    if not tensor.isfinite().all():
        raise Wrong(f"{call} holds NaN or inf")
    return tensor.double()


def same(got, want, call, rtol=1e-5):
    """Wrong, naming the first place that differs, unless got is want, both (...)."""
    got = finite_tensor(got, want.shape, call)
    want = want.double()
    off = (got - want).abs() > rtol * want.abs().max()
    if off.any():
        at = tuple(off.nonzero()[0].tolist())
        place = f" at {at}" if at else ""
        raise Wrong(f"{call}{place}: expected {shown(want[at])}, got {shown(got[at])}")


@functools.cache
def embedded():
    """-> the embedded checkpoint, its tokenizer, and what makes ids of a prompt"""
    folder = os.path.join(ROOT, "data", "tiny")
    tok = Tokenizer(folder)
    return Transformer.from_pretrained(folder), tok, prompt_encoder(tok)


@contextmanager
def as_method(score, name="mine"):
    """A scorer is an eviction method for a while."""
    EVICT[name] = score
    try:
        yield name
    finally:
        del EVICT[name]


def held_out(n, tokens):
    """n kv problems of so many tokens."""
    encode = embedded()[2]
    return [problem("kv", "eval", seed=0, index=index, tokens=tokens, encode=encode)
            for index in range(n)]


def replayed(score):
    """The rollout of a scorer that evicts prompt and response keys; its gap must be rounding."""
    net, _, encode = embedded()
    ids = [encode(task.text) for task in held_out(2, 80)]
    with as_method(score) as name:
        eviction = Eviction(name, budget=24, window=8, sinks=2, response_budget=9,
                            period=4)
        rollout = generate(net, ids, group=2, max_new_tokens=18, eviction=eviction)
    with torch.no_grad():
        logp = replay(net, rollout, ("shadow",))["shadow"]
    gap = (logp - rollout.logp_roll).abs().max()
    if gap > 1e-4:
        raise Wrong("with this scorer sampler and learner differ by up to "
                    f"{gap:.2g}, not by rounding")
    return rollout


def answered(score, n=32):
    """How many of n held-out kv problems the checkpoint answers with 48 of 184 keys kept."""
    net, tok, encode = embedded()
    tasks = held_out(n, 192)
    ids = [encode(task.text) for task in tasks]
    with as_method(score) as name:
        eviction = Eviction(name, budget=48, window=16, sinks=2)
        rollout = generate(net, ids, group=1, max_new_tokens=5, temperature=0,
                           eviction=eviction, stop_ids=tok.stop_ids)
    lengths = (rollout.lengths - rollout.stopped.long())[:, 0].tolist()
    said = zip(tasks, rollout.tokens[:, 0].tolist(), lengths)
    return sum(reward(task, tok.decode(tokens[:n])) for task, tokens, n in said)


def random_log(seed, B=2, G=3, R=6, L=2, nkv=2):
    """A rollout of no model whose log evicts prompt and response keys at random: prompts of 6 to
    10 tokens, KV heads that keep 2 to 5 of them, responses of 1 to R tokens."""
    rng = generator(seed)

    def whole(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=rng)

    sizes = whole(6, 10, B).tolist()
    kept = [[[torch.randperm(P, generator=rng)[:int(whole(2, 5))].sort().values
              for _ in range(nkv)] for _ in range(L)] for P in sizes]
    born = torch.arange(R)
    until = born + 1 + (torch.rand(L, nkv, B, G, R, generator=rng) * (R - born)).int()
    lengths = whole(2, R, B, G)
    lengths[0, 0], lengths[0, 1] = R, 1
    return Rollout(
        prompts=[whole(0, 40, P).tolist() for P in sizes], tokens=whole(0, 40, B, G, R),
        lengths=lengths, logp_roll=torch.zeros(B, G, R), temperature=1.0, kept=kept,
        until=until.int(), stopped=torch.ones(B, G, dtype=torch.bool))


def copies(seed):
    """Of each shadow copy, layer and KV head of a random log: the log, the indices, the copy's rows
    (P + n - 1,) in the packed row, and all that the packed row sees (N, N)."""
    log = random_log(seed)
    packed = pack(log, ("shadow",))
    rows = packed.rows["shadow"]
    B, G = log.lengths.shape
    for layer, until in enumerate(packed.until):
        seen = visible(until)                                   # (nkv, N, N)
        for head, b, g in itertools.product(range(len(until)), range(B), range(G)):
            last = int(rows[b, g, 0])  # the prompt's last row
            prompt = torch.arange(last + 1 - len(log.prompts[b]), last + 1)
            own = rows[b, g, 1:int(log.lengths[b, g])]  # of token t: it predicts t + 1
            yield log, (layer, head, b, g), torch.cat((prompt, own)), seen[head]


# 1. an eviction method

def key_norm(seeds, keynorm):
    eviction = Eviction("snapkv", budget=6, window=3, sinks=1)
    for seed in seeds:
        rng = generator(seed)
        n, nkv, nh, hs = 12, 2, 4, 8
        norm = torch.stack([torch.randperm(n, generator=rng) + 1.0 for _ in range(nkv)])
        k = torch.randn(n, nkv, hs, generator=rng)
        k = torch.nn.functional.normalize(k, dim=-1) * norm.t()[..., None]
        q = torch.randn(eviction.window, nh, hs, generator=rng)        # (W, nh, hs)
        score = finite_tensor(keynorm(q, k, eviction), (nkv, n), "keynorm(q, k, e)")
        for head in range(nkv):
            got = score[head].argsort(descending=True).tolist()
            want = norm[head].argsort().tolist()
            if got != want:
                norms = shown(norm[head].int())
                raise Wrong(f"KV head {head}, keys of the norms {norms}: these should "
                            f"be kept in the order {want}, your scores say {got}")
    kept = zip(replayed(keynorm).kept, replayed(EVICT["snapkv"]).kept)
    if all(torch.equal(mine, theirs) for mine, theirs in kept):
        raise Wrong("in a rollout it keeps what snapkv keeps")


# 2. the first response token

def first_token(seeds, sees):
    for seed in seeds:
        for log, (layer, head, b, g), rows, seen in copies(seed):
            P, kept = len(log.prompts[b]), log.kept[b][layer][head]
            for t in range(int(log.lengths[b, g])):
                want = seen[rows[P - 1 + t], rows[:P]].nonzero()[:, 0].tolist()
                call = f"sees(t={t}, kept={kept.tolist()}, P={P})"
                got = sees(t, kept.clone(), P)
                try:
                    got = sorted(map(operator.index, got))
                except TypeError:
                    said = f"{call} must hold positions, got {shown(got)}"
                    raise Wrong(said) from None
                if got != want:
                    raise Wrong(f"{call}: expected {want}, got {shown(got)}")


# 3. the variance of the sequence weight

def by_enumeration(p, q, L):
    """Variance of the weight of L tokens, from all V^L responses."""
    mean, square = 0.0, 0.0
    for response in itertools.product(range(len(p)), repeat=L):
        likely = math.prod(q[list(response)].tolist())
        weight = math.prod((p / q)[list(response)].tolist())
        mean += likely * weight
        square += likely * weight ** 2
    return square - mean ** 2


def distributions(rng, V, distance):
    """q (V,), and a p (V,) whose ratios to it are about 1 +- distance; fp64"""
    q = torch.rand(V, generator=rng, dtype=torch.float64) + 0.2
    q = q / q.sum()
    p = q * (1 + distance * (2 * torch.rand(V, generator=rng, dtype=torch.float64) - 1))
    return p / p.sum(), q


def sequence_weight(seeds, variance):
    def compare(what, want, p, q, L):
        try:
            got = number(variance(p.clone(), q.clone(), L), "variance(p, q, L)")
        except OverflowError:
            got = "an OverflowError"
        close = isinstance(got, float) and math.isclose(got, want, rel_tol=1e-3)
        if got != want and not close:
            raise Wrong(f"{what}: expected {shown(want)}, got {shown(got)}")

    for seed in seeds:
        rng = generator(seed)
        for V, L in ((2, 1), (3, 2), (4, 3), (2, 6)):
            p, q = distributions(rng, V, 0.8)
            call = f"variance(p={shown(p)}, q={shown(q)}, L={L})"
            compare(f"{call}, against the sum over all {V ** L} responses",
                    by_enumeration(p, q, L), p=p, q=q, L=L)
        compare("p equal to q", 0.0, p=q, q=q, L=5)
        for distance, L in ((0.03, 1000), (1e-8, 1000), (0.9, 10 ** 5)):
            p, q = distributions(rng, 50, distance)
            growth = L * torch.log1p(((p - q) ** 2 / q).sum())
            compare(f"{L} tokens, the ratios p / q within about {distance:g} of 1",
                    torch.expm1(growth).item(), p=p, q=q, L=L)


# 4. the reduction

def reduction(seeds, reduce, heavier):
    for seed in seeds:
        rng = generator(seed)
        lengths = torch.randint(1, 8, (2, 3, 1), generator=rng)  # (B, G, 1)
        mask = torch.arange(9) < lengths  # no response fills the columns
        loss = torch.randn(2, 3, 9, generator=rng)
        scale = token_scale(mask, "constant")
        for past in (0.0, 5.0, math.nan, math.inf):
            filled = loss.masked_fill(~mask, past).requires_grad_()
            call = f"reduce(loss, mask) with {past:g} past the mask"
            got = reduce(filled, mask.clone())
            same(got, (scale * loss).sum(), call)
            if not got.requires_grad:
                raise Wrong(f"{call} has no gradient: it must stay a tensor that "
                            "depends on loss")
            grad, = torch.autograd.grad(got, filled, allow_unused=True)
            same(grad, scale, f"the gradient of {call}")
        short, long = torch.randint(3, 50, (2,), generator=rng).tolist()
        for (a, b), norm in itertools.product(((10, 100), (short, long)), NORMS):
            lengths = torch.tensor([a, b])
            mask = torch.arange(128) < lengths[None, :, None]
            weight = token_scale(mask, norm)[0, :, 0]
            call = f"heavier(short={a}, long={b}, norm={norm!r})"
            got = torch.tensor(number(heavier(a, b, norm), call), dtype=torch.float64)
            same(got, weight[0] / weight[1], call)


# 5. what a tiny gap does not prove

def key_length(q, k, e, elsewhere=None):
    return -k.norm(dim=-1).t()


def last_query(q, k, e, elsewhere=None):
    last = attention(q, k, elsewhere)[:, :, -1]                 # (nkv, nh / nkv, n)
    return last.mean(dim=(0, 1)).expand(k.shape[1], -1)         # (nkv, n)


def largest_vote(q, k, e, elsewhere=None):
    return attention(q, k, elsewhere).amax(dim=(1, 2))


def all_of_the_window(q, k, e, elsewhere=None):
    return pooled(logits(q, k).softmax(-1).sum(2).mean(1), e)


def one_key_too_many(q, k, e, elsewhere=None):
    row = torch.arange(len(k))
    ahead = row > row[len(k) - len(q):, None] + 1               # (W, n)
    return logits(q, k).masked_fill(ahead, -math.inf).softmax(-1).sum((1, 2))


def by_the_clock(q, k, e, elsewhere=None):
    place = torch.arange(k.shape[1] * len(k)).view(k.shape[1], len(k))  # (nkv, n)
    return (place * time.perf_counter_ns() % 999_983).float()


def python_random(q, k, e, elsewhere=None):
    return torch.tensor([[random.random() for _ in k] for _ in range(k.shape[1])])


def own_generator():
    rng = generator(0)

    def score(q, k, e, elsewhere=None):
        return torch.rand(k.shape[1], len(k), generator=rng)
    return score


def counts(turn):
    calls = itertools.count(1)

    def score(q, k, e, elsewhere=None):
        votes = EVICT["snapkv"](q, k, e, elsewhere)
        return -votes if next(calls) >= turn else votes
    return score


def remembers():
    before = []

    def score(q, k, e, elsewhere=None):
        votes = EVICT["snapkv"](q, k, e, elsewhere)
        before.append(votes)
        if before[-2:-1] and before[-2].shape == votes.shape:
            return votes + before[-2]
        return 2 * votes
    return score


def scorers():
    """(scorer, is it honest?, what it does), anew for each check"""
    ours = [(EVICT[name], True, f"{name} of kvcache.py")
            for name in ("snapkv", "rkv", "h2o", "recent")]
    turned = "one that turns its scores round from its {} call on".format
    return [
        *ours,
        (EVICT["random"], True, "random of kvcache.py: torch.manual_seed repeats it"),
        (key_length, True, "one that scores keys by their norm"),
        (last_query, True, "TOVA, what the last query attends to"),
        (largest_vote, True, "one that takes the largest vote of any query"),
        (all_of_the_window, False, "one whose queries see the whole window, pooled"),
        (one_key_too_many, False, "one whose queries see the key that follows them"),
        (by_the_clock, False, "one that reads the clock"),
        (python_random, False, "one that draws from Python's random without a seed"),
        (own_generator(), False, "one that draws from a generator of its own"),
        (counts(2), False, turned("second")),
        (counts(10), False, turned("tenth")),
        (remembers(), False, "one that adds the scores of the call before")]


def honesty(seeds, useless, honest):
    replayed(useless)
    right = answered(useless)
    if right > 3:
        raise Wrong(f"with useless the embedded checkpoint still answers {right:.0f} "
                    "of 32 kv problems with 48 of 184 keys: at most 3 were asked for")
    cases = scorers()
    random.Random(seeds[-1]).shuffle(cases)
    for method, is_honest, what in cases:
        def score(q, k, e, elsewhere=None):  # one name for all
            return method(q, k, e, elsewhere)
        got = honest(score)
        if bool(got) != is_honest:
            raise Wrong(f"honest(score) says {shown(got)}, expected {is_honest}, of "
                        f"{what}")


# 6. a reward that is gamed

def contains(text, answer):
    """Earns 1.0 for an answer that stands anywhere."""
    return answer in text


TRICKS = {  # texts that are not the answer "coin 4768", and what they are
    "all pairs": "{pairs}", "the prompt": "{prompt}",
    "all codes there are": "{key} {codes}",
    "a wrong pair, then the right one": "{key} {other} {key} {code}",
    "the right pair, then a wrong one": "{key} {code} {key} {other}",
    "two codes": "{key} {code} or {other}",
    "the pair twice": "{key} {code} {key} {code}", "another code": "{key} {other}",
    "the code without its word": "{code}", "the code before its word": "{code} {key}",
    "no space": "{key}{code}", "a digit too many": "{key} {code}0",
    "a zero in front": "{key} 0{code}",
    "a digit too few": "{key} {code[0]}{code[1]}{code[2]}", "a sign": "{key} -{code}",
    "a decimal": "{key} {code}.0",
    "a comma for thousands": "{key} {code[0]},{code[1]}{code[2]}{code[3]}",
    "digits apart": "{key} {code[0]} {code[1]} {code[2]} {code[3]}",
    "full-width digits": "{key} {wide}", "Arabic-Indic digits": "{key} {arabic}",
    "a space of no width among the digits": "{key} {split}",
    "a denial": "not {key} {code}", "a sentence": "The code for {key} is {code}.",
    "a thought": "<think>{key} {code}</think>", "a pattern": r"{key} \d{{4}}",
    "a full stop": "{key} {code}.", "capitals": "{capitals}",
    "bold type": "**{key} {code}**", "an announcement": "Answer: {key} {code}",
    "nothing": ""}


def tricks(task, other):
    """(text, what it is) of TRICKS for the answer of a task. other: another code"""
    key, code = task.answer.rsplit(" ", 1)
    pairs = re.findall(r"The code for (\w+) is (\d{4})\.", task.text)

    def digits_from(zero):
        return "".join(chr(zero + int(digit)) for digit in code)

    parts = dict(key=key, code=code, other=other, prompt=task.text,
                 pairs=" ".join(map(" ".join, pairs)),
                 codes=" ".join(map(str, range(1000, 10000))),
                 wide=digits_from(0xff10), arabic=digits_from(0x660),
                 capitals=f"{key} {code}".upper(), split=f"{code[:2]}\u200b{code[2:]}")
    return [(text.format(**parts), what) for what, text in TRICKS.items()]


def gamed(seeds, exploit, rule):
    for seed, tokens in itertools.product(seeds, (60, 200, 800)):
        task = problem("kv", "train", seed=seed, index=0, tokens=tokens,
                       encode=str.split)  # words are tokens here
        text = exploit(task.text)
        if not isinstance(text, str) or not contains(text, task.answer):
            raise Wrong(f"exploit(prompt) earns nothing where {task.answer!r} is the "
                        f"answer: it gives {shown(text)}")
        for good in (task.answer, f" {task.answer}", f"{task.answer}\n"):
            if not rule(good, task.answer):
                raise Wrong(f"rule({good!r}, {task.answer!r}) refuses the answer")
        other = str(1000 + (int(task.answer[-4:]) + 1234) % 9000)
        bad = list(tricks(task, other))
        if in_form(text.strip(), task.answer) != 1:  # a program may know the answer
            bad.append((text, "what your exploit says"))
        for text, what in bad:
            if rule(text, task.answer):
                call = f"rule({shown(text)}, {task.answer!r})"
                raise Wrong(f"{call} accepts a trick: {what}")


# 7. distillation the other way round

def reverse_kl(seeds, reverse):
    for seed in seeds:
        rng = generator(seed)
        dense, shadow = 3 * torch.randn(2, 5, 11, generator=rng)  # (n, V) each
        dense[:, 4] = shadow[:, 4] = -1e30  # an id that is no token
        dense.requires_grad_()
        shadow.requires_grad_()
        weight = torch.rand(5, generator=rng)                             # of the rows
        logp = [x.double().log_softmax(-1) for x in (shadow, dense.detach())]
        kl = kl_rows(*logp)
        want, = torch.autograd.grad((weight * kl).sum(), shadow)
        call = "reverse(dense_logits, shadow_logits)"
        got = reverse(dense, shadow)
        same(got, kl.detach(), call)
        if not got.requires_grad:
            raise Wrong(f"{call} has no gradient: shadow cannot learn from it")
        grads = torch.autograd.grad((weight * got).sum(), (dense, shadow),
                                    allow_unused=True)
        if grads[0] is not None and grads[0].any():
            raise Wrong(f"{call} sends a gradient to dense_logits, which stay fixed")
        same(grads[1], want, "the gradient to shadow_logits", rtol=1e-4)


# 8. the mask of one copy

def lifetimes(seeds, matrix):
    for seed in seeds:
        for log, (layer, head, b, g), rows, seen in copies(seed):
            P, n = len(log.prompts[b]), int(log.lengths[b, g])
            kept = log.kept[b][layer][head]
            until = log.until[layer, head, b, g].clone()          # (R,)
            got = matrix(kept.clone(), until, P, n)
            with suppress(TypeError, ValueError, RuntimeError):  # then it is no matrix
                got = torch.as_tensor(got)
            same(got, seen[rows][:, rows],
                 f"matrix(kept={kept.tolist()}, until={until.tolist()}, P={P}, n={n})")


# which functions an exercise asks for, and what checks them

EXERCISES = {1: (key_norm, ["keynorm"]), 2: (first_token, ["sees"]),
             3: (sequence_weight, ["variance"]), 4: (reduction, ["reduce", "heavier"]),
             5: (honesty, ["useless", "honest"]), 6: (gamed, ["exploit", "rule"]),
             7: (reverse_kl, ["reverse"]), 8: (lifetimes, ["matrix"])}


def check(number, path):
    """What is wrong with the answer to an exercise that the file at `path` gives, in one sentence;
    None if it is right. Raises OSError for a file that cannot be read."""
    with open(path, "rb") as f:  # bytes: compile knows byte order marks and encodings
        source = f.read()
    run, names = EXERCISES[number]
    mine = types.ModuleType("mine")
    mine.__file__ = path
    sys.modules["mine"] = mine
    search = sys.path[:]
    # it may import its neighbours
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        exec(compile(source, path, "exec"), vars(mine))
        missing = [name for name in names if not callable(getattr(mine, name, None))]
        if missing:
            raise Wrong(f"{os.path.basename(path)} has no function {missing[0]}")
        run((0, zlib.crc32(source)), *(getattr(mine, name) for name in names))
    except Wrong as e:
        return str(e)
    except (Exception, SystemExit) as e:
        said = " ".join(f"{type(e).__name__}: {getattr(e, 'msg', e)}".split())
        return f"{os.path.basename(path)}{line_of(e, path)}: {said}"
    finally:
        sys.path[:] = search
        sys.modules.pop("mine", None)


def line_of(e, path):
    """", line 12": the last line of the file that an exception passed through, or that cannot be
    read; nothing if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__)
             if frame.filename == path]
    if isinstance(e, SyntaxError) and e.filename == path:
        lines.append(e.lineno)
    return f", line {lines[-1]}" if lines else ""


def main(argv=None):
    """-> exit code"""
    args = sys.argv[1:] if argv is None else argv
    help_if_asked(args, __doc__)
    if len(args) != 2 or args[0] not in map(str, EXERCISES):
        sys.exit("error: write python -m experiments.check NUMBER mine.py, NUMBER from "
                 f"1 to {len(EXERCISES)}")
    with one_line_errors(OSError):
        wrong = check(int(args[0]), args[1])
    if wrong is None:
        tell("right")
        return 0
    tell(f"wrong: {wrong}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
