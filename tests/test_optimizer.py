"""support/adamw.py and support/optimizer.py: masters that are not held, moments in bf16."""
import gc
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch

import support.adamw
from conftest import learner, read_checkpoint, read_log, same_weights, toy, train_here
from support.adamw import AdamW, pieces_of, round_to
from support.checkpoint import write_checkpoint
from support.optimizer import Masters

SHAPES = [(50, 64), (64,), (100, 37), (3,), (128, 130)]
ASK = ["--dtype=bfloat16", "--lr=1e-2", "--warmup=0", "--eval_every=9", "--weight_decay=0.1"]


def settings(moments="float32", seed=0):
    return SimpleNamespace(beta2=0.95, weight_decay=0.1, moments=moments, seed=seed)


def some_weights(dtype=torch.bfloat16, **how):
    """-> weights, what takes their gradients, AdamW of them"""
    rng = torch.Generator().manual_seed(0)
    weights = [(0.1 * torch.randn(shape, generator=rng)).to(dtype) for shape in SHAPES]
    sums = [torch.zeros(()).expand(w.shape).requires_grad_() for w in weights]
    return weights, sums, AdamW(weights, sums, settings(**how))


def steps(sums, opt, numbers, lr=1e-3, missing=()):
    """Steps of these numbers, of random gradients that each number alone decides. missing: weights
    that have none."""
    for i in numbers:
        rng = torch.Generator().manual_seed(i)
        for j, x in enumerate(sums):
            grad = torch.randn(x.shape, generator=rng)
            x.grad = None if j in missing else grad
        opt.step(lr)


def all_of(opt):
    """Everything that an optimizer holds, as one list of tensors."""
    moments = [x for one in opt.state()["state"].values() for x in one.values()]
    return [x.clone() for x in (*opt.masters(), *moments)]


# masters that are made for a step

@pytest.mark.parametrize("chunk", [2**26, 8192, 1024])
def test_it_is_adamw_on_masters_that_stay(chunk, monkeypatch):
    """torch's, bit for bit, over 50 steps: masters, both moments, and the weights, which are the
    masters rounded to nearest, ties to even. Ties that 16 bits cannot hold came up. The control
    forgets them."""
    monkeypatch.setattr(support.adamw, "CHUNK", chunk)
    weights, sums, opt = some_weights()
    masters = [w.float().requires_grad_() for w in weights]
    theirs = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ties = 0
    for i in range(50):
        missing = (1, 4) if i < 2 else ()  # as AdamW leaves out what has no gradient
        lr = theirs.param_groups[0]["lr"] = 1e-3 * (i + 1) / 50
        steps(sums, opt, [i], lr, missing=missing)
        for m, x in zip(masters, sums):
            m.grad = x.grad
        theirs.step()
        ties += sum(len(c.ties) for c in opt.chunks)
        assert all(map(torch.equal, opt.masters(), masters)), i
        assert all(map(torch.equal, weights, (m.bfloat16() for m in masters))), i
        for j, one in opt.state()["state"].items():
            for name, x in theirs.state[masters[j]].items():
                assert torch.equal(one[name], x), (i, j, name)
    assert len(opt.state()["state"]) == len(SHAPES) and ties > 5
    opt.chunks[0].ties = torch.tensor([5])
    assert not all(map(torch.equal, opt.masters(), masters))


def test_every_kind_of_number_is_taken_apart_and_put_together():
    """All low halves beside some high ones: zeros and subnormals of both signs, large numbers."""
    high = torch.tensor([0, 1, -32768, 128, 16256, 16257, -16511, 32639 - 128])
    bits = high[:, None] * 2**16 + torch.arange(2**16)
    masters = bits.int().view(torch.float32).reshape(-1)
    assert masters.isfinite().all() and masters.bfloat16().isfinite().all()
    weights = [torch.zeros(len(masters), dtype=torch.bfloat16)]
    opt = AdamW(weights, [torch.zeros(()).expand(len(masters))], settings())
    opt.load(dict(state={}), [masters])
    again, = opt.masters()
    assert torch.equal(again.view(torch.int32), masters.view(torch.int32))
    assert torch.equal(weights[0], masters.bfloat16())
    ties, = (c.ties for c in opt.chunks)
    assert len(ties) == sum(h % 2 == 0 for h in high.tolist())  # odd ones are rounded up


def test_pieces():
    """Whole weights where they fit, of one type; all numbers once, in order."""
    def of(*sizes):
        return pieces_of([torch.zeros(n, dtype=dtype) for n, dtype in sizes])
    half, full = torch.bfloat16, torch.float32
    n = support.adamw.CHUNK
    assert of((3, half), (n - 3, half)) == [[(0, 0, 3), (1, 0, n - 3)]]
    assert of((3, half), (n - 2, half)) == [[(0, 0, 3)], [(1, 0, n - 2)]]
    assert of((3, half), (3, full)) == [[(0, 0, 3)], [(1, 0, 3)]]
    assert of((2 * n + 1, half), (5, half)) == [
        [(0, 0, n)], [(0, n, 2 * n)], [(0, 2 * n, 2 * n + 1)], [(1, 0, 5)]]


def test_what_a_weight_takes():
    """Bytes between two steps: 2 for its weight, 2 for the rest of its master, 8 or 4 for the two
    moments. Of fp32 weights 4 and the moments."""
    for dtype, moments, want in ((torch.bfloat16, "float32", 12), (torch.bfloat16, "bfloat16", 8),
                                 (torch.float32, "float32", 12), (torch.float32, "bfloat16", 8)):
        weights, sums, opt = some_weights(dtype, moments=moments)
        steps(sums, opt, range(2))
        held = weights + [x for c in opt.chunks for x in vars(c).values() if torch.is_tensor(x)
                          and x.dtype != torch.int64]  # a few ties
        assert sum(x.nbytes for x in held) == want * sum(w.numel() for w in weights)


def test_an_optimizer_that_is_dropped_is_gone():
    """Hooks on the parameters do not keep it, nor its gradients; the next one works alone."""
    net = toy(dtype=torch.bfloat16)
    _, _, opt = learner(net)
    sum(p.sum() for p in net.parameters()).backward()
    refs = [weakref.ref(x) for x in (opt, opt.optimizer.chunks[0].moments, opt.masters[0])]
    assert all(ref() is not None for ref in refs)
    _, _, second = learner(net)
    del opt
    gc.collect()
    assert all(ref() is None for ref in refs)
    sum(p.sum() for p in net.parameters()).backward()
    assert all((m.grad == 1).all() for m in second.masters)
    assert all(p.grad is None for p in net.parameters())


def test_nothing_changes_where_a_gradient_is_not_finite():
    net = toy(dtype=torch.bfloat16)
    _, _, opt = learner(net)

    def with_gradient(x):
        sum(p.float().sum() for p in net.parameters()).mul(x).backward()
        return opt.step(1e-2, 1.0)

    with_gradient(1.0)
    before = all_of(opt.optimizer)
    for wrong in (float("nan"), float("inf")):
        opt.halfway = False
        with pytest.raises(FloatingPointError, match="the gradient's norm is"):
            with_gradient(wrong)
        assert not opt.halfway
        opt.forget()
    assert with_gradient(0.0) == 0 and all(map(torch.equal, before, all_of(opt.optimizer)))
    with_gradient(1.0)  # the control
    assert opt.halfway and not any(map(torch.equal, before[:3], all_of(opt.optimizer)))


# moments in bf16

def rounded_by(rng, x):
    held = torch.empty(len(x), dtype=torch.bfloat16)
    round_to(held, x.clone(), rng)
    return held.float()


def test_rounding_at_random_keeps_the_mean():
    """Within 5 standard errors, of numbers between two of bf16; those that bf16 has stay. Rounded
    to nearest, the control, the mean is off by far more."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, generator=rng).repeat_interleave(4096)
    rounded = rounded_by(rng, x)
    low = (x.view(torch.int32) >> 16 << 16).view(torch.float32)
    high = ((x.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    share = ((x - low) / (high - low)).view(64, -1)[:, 0]
    error = (high - low).view(64, -1)[:, 0].abs() * (share * (1 - share) / 4096).sqrt()
    off = (rounded - x).view(64, -1).mean(1).abs()
    assert (off < 5 * error).all() and (off < 1.5 * error).float().mean() > 0.7
    nearest = (x.bfloat16().float() - x).view(64, -1).mean(1).abs()
    assert (nearest > 5 * error).float().mean() > 0.8
    known = torch.tensor([0.0, 1.0, -3.0, 2.0**-130]).repeat(100)
    assert torch.equal(rounded_by(rng, known), known)


def test_moments_in_bf16_follow_those_in_fp32():
    """Their mean over many equal gradients, though each step changes the second by less than bf16
    could tell: rounded to nearest it would stay where it is."""
    n = 20_000
    weights = [torch.zeros(n, dtype=torch.bfloat16)]
    sums = [torch.zeros(()).expand(n).requires_grad_()]
    found = {}
    for moments in ("float32", "bfloat16"):
        config = settings(moments)
        config.beta2 = 0.999
        opt = AdamW(weights, sums, config)
        for i in range(300):
            sums[0].grad = torch.full((n,), 1.0 if i else 3.0)
            opt.step(0.0)
        found[moments] = [x.float().mean().item() for x in next(opt.moments())]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=1e-3)
    v = torch.tensor(9 * 0.001).bfloat16()
    for _ in range(300):
        v = (0.999 * v.float() + 0.001).bfloat16()
    assert abs(v.item() - found["float32"][1]) > 1e-2 * found["float32"][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_seed_and_a_step_decide_the_rounding(dtype):
    """4 steps equal 2 and, from what was saved, 2 more. Controls: another seed, a count of steps
    that was lost."""
    def after(seed=0, lost=False):
        weights, sums, opt = some_weights(dtype, moments="bfloat16", seed=seed)
        steps(sums, opt, range(2))
        state, masters = opt.state(), [m.clone() for m in opt.masters()]
        weights, sums, again = some_weights(dtype, moments="bfloat16", seed=seed)
        if lost:
            state["done"] = 0
        again.check(state)
        again.load(state, masters)
        steps(sums, again, range(2, 4))
        return all_of(again)

    _, sums, whole = some_weights(dtype, moments="bfloat16")
    steps(sums, whole, range(4))
    whole = all_of(whole)
    assert all(map(torch.equal, whole, after()))
    assert not all(map(torch.equal, whole, after(seed=1)))
    assert not all(map(torch.equal, whole, after(lost=True)))
    assert {x.dtype for x in whole if x.dim()} == {torch.float32, torch.bfloat16}


# in a run

@pytest.mark.parametrize("more", [[], ["--moments=bfloat16"],
                                  ["--moments=bfloat16", "--lora_rank=4"]])
def test_a_run_goes_on_bitwise(more, tmp_path, capsys, monkeypatch):
    """4 steps equal 2 and 2 more, where weights are cut into chunks too; the other type of moments
    is refused by name."""
    monkeypatch.setattr(support.adamw, "CHUNK", 2**16)
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    train_here(*ASK, *more, f"--out_dir={whole}")
    said = capsys.readouterr().out
    assert ("bfloat16 moments" in said) == bool(more)
    train_here(*ASK, *more, "--steps=2", f"--out_dir={cut}")
    kinds = {x.dtype for one in read_checkpoint(cut)["learner"]["optimizer"]["state"].values()
             for x in one.values() if x.dim()}
    assert kinds == {torch.bfloat16 if more else torch.float32}
    other = [] if more else ["--moments=bfloat16"]
    with pytest.raises(SystemExit, match="moments was '"):
        train_here(*ASK, *more[1:], *other, "--resume=True", f"--out_dir={cut}")
    train_here(*ASK, *more, "--resume=True", f"--out_dir={cut}")
    assert same_weights(whole, cut) and read_log(whole)[1] == read_log(cut)[1]


def test_a_checkpoint_from_before(tmp_path):
    """Without the setting's name, with moments as torch's own AdamW saved them: it goes on to the
    same bits. Moments of the other type are refused."""
    whole, cut, other = (str(tmp_path / name) for name in ("whole", "cut", "other"))
    train_here(*ASK, f"--out_dir={whole}")
    train_here(*ASK, "--steps=2", f"--out_dir={cut}")
    state = read_checkpoint(cut)
    del state["config"]["moments"], state["learner"]["optimizer"]["done"]
    write_checkpoint(f"{cut}/ckpt.pt", state)
    shutil.copytree(cut, other)
    with pytest.raises(SystemExit, match="moments was 'float32' in the run"):
        train_here(*ASK, "--resume=True", "--moments=bfloat16", f"--out_dir={cut}")
    train_here(*ASK, "--resume=True", f"--out_dir={cut}")
    assert same_weights(whole, cut)
    state["config"]["moments"] = "bfloat16"  # though it holds others
    write_checkpoint(f"{other}/ckpt.pt", state)
    with pytest.raises(SystemExit, match="are float32, not bfloat16: .*--moments=float32$"):
        train_here(*ASK, "--resume=True", "--moments=bfloat16", f"--out_dir={other}")


def test_masters_of_torch_are_taken_over():
    """What torch.optim.AdamW.state_dict holds beside is no harm."""
    net, masters = toy(dtype=torch.bfloat16), []
    _, _, opt = learner(net)
    for m in opt.whole():
        masters.append((m + 1e-4).requires_grad_())
        masters[-1].grad = torch.ones_like(m)
    theirs = torch.optim.AdamW(masters, fused=True)
    theirs.step()
    opt.load(dict(masters=[m.detach() for m in masters], optimizer=theirs.state_dict()))
    assert all(map(torch.equal, opt.whole(), masters)) and isinstance(opt, Masters)
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(net.parameters(), masters))
    assert all(torch.equal(theirs.state[m]["exp_avg"], x)
               for m, (x, _) in zip(masters, opt.optimizer.moments()))
