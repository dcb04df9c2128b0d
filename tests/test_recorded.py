"""fast/recorded.py: padding, and recorded passes against passes launched kernel by kernel. Without
a GPU a recording is pretended: its replay runs the same steps again on the same tensors."""
import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import CUDA, DEVICE, EVICTION, learn, learner, prompts, rel, some_rewards, toy
from fast import record, recorded
from grpo import replay
from rollout import generate

LAST = {}  # the model whose passes are recorded, for `pretended`


def pretended(step, last=None):
    """capture without a card. As there, the model's parameters are others in its steps."""
    model = LAST["model"]

    def run():
        with torch.enable_grad(), recorded.own_leaves(model, {}):
            step()

    step()
    return SimpleNamespace(replay=run)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """Recordings are made, whatever else is on the card."""
    monkeypatch.setattr(recorded, "a_quarter_is_free", lambda beyond: True)
    if not CUDA:
        monkeypatch.setattr(recorded, "on_card", lambda x: True)
        monkeypatch.setattr(recorded, "capture", pretended)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    yield
    record.LEARNERS.clear()


def make(seed=0, dtype=torch.float32, **changes):
    net = toy(seed, dtype).to(DEVICE)
    LAST["model"] = net
    return net, *learner(net, toy(1, dtype).to(DEVICE), **changes)


def made(net):
    return len(record.LEARNERS[net].made) if net in record.LEARNERS else 0


def rollouts(net):
    """Two, of about 130 and 390 rows."""
    return [generate(net, prompts(*sizes), 3, 12, eviction=EVICTION, seed=i)
            for i, sizes in enumerate(((20, 24), (90, 100, 110)))]


def gradients(opt):
    return [torch.zeros(()) if x.grad is None else x.grad.clone() for x in opt.masters]


def equal(a, b):
    return all(map(torch.equal, a, b))


# padding

def test_few_sizes_and_few_rows_more():
    for n in (*range(1, 5000), 16256, 16384, 16385):
        rows = recorded.padded(n)
        assert n <= rows == recorded.padded(rows) and (rows <= n + max(128, n / 8) or rows == 256)
    assert len({recorded.padded(n) for n in range(4097, 16385)}) == recorded.SIZES


@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_does_not_touch(checkpointing, monkeypatch):
    """Log-probs and gradients are those of the plain pass. Controls: keys that die a row early
    touch, and so does a gradient of padded rows."""
    monkeypatch.setattr(recorded, "SIZES", 0)
    net, _, _, opt = make()
    r = rollouts(net)[1]

    def found():
        out = replay(net, r, checkpointing=checkpointing)
        opt.forget()
        (out["dense"].sum() - 2 * out["shadow"].sum()).backward()
        return out["shadow"].detach(), torch.cat([x.flatten() for x in gradients(opt)])

    logp, grad = found()
    assert net in record.LEARNERS
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "on_card", lambda x: False)
        want, want_grad = found()
    bound = 1e-4 if CUDA else 1e-6
    assert rel(logp, want) < bound and rel(grad, want_grad) < 10 * bound

    pad = recorded.pad
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "pad", lambda ids, pos, until, rows: pad(
            ids, pos, until=until - 1, rows=rows))
        assert rel(found()[0], want) > 1e-3

    class Touched(recorded.Eager):
        def forward(self):
            self.n, n = len(self.inputs[0]), self.n
            return super().forward()[:n]

        def backward(self, d):
            super().backward(torch.nn.functional.pad(d, (0, 0, 0, self.n - len(d)), value=1.0))

    with monkeypatch.context() as patch:
        patch.setattr(recorded, "Eager", Touched)
        assert rel(found()[1], want_grad) > 1e-3


def test_padded_rows_are_row_0():
    """And finite where it is; no real row sees them, and they see themselves alone."""
    n, rows = 5, 8
    ids, pos = torch.arange(7, 7 + n), torch.arange(n)
    until = torch.tensor([[[5, 3, 5, 4, 5]]], dtype=torch.int32)
    ids, pos, until = recorded.pad(ids, pos, until=until, rows=rows)
    assert ids.tolist() == [7, 8, 9, 10, 11, 7, 7, 7] and pos.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert until.dtype == torch.int32 and until.tolist() == [[[5, 3, 5, 4, 5, 6, 7, 8]]]


# recorded against launched one by one

def trained(sizes, monkeypatch, seed=0, dtype=torch.float32, steps=3, **changes):
    """Steps on two rollouts. -> weights, logs, recordings"""
    monkeypatch.setattr(recorded, "SIZES", sizes)
    net, c, objective, opt = make(seed, dtype, **changes)
    logs = []
    for _ in range(steps):
        for r in rollouts(toy(dtype=dtype).to(DEVICE)):
            rewards = some_rewards(*r.lengths.shape).to(DEVICE)
            logs.append(learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-3))
    return [x.detach().clone() for x in opt.whole()], logs, made(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [
    {}, dict(checkpointing=True), dict(lora_rank=4), dict(micro_rows=200, checkpointing=True),
    dict(objective="ppo", updates=2), dict(objective="dpo", lora_rank=4)], ids=str)
def test_recorded_is_launched(dtype, changes, monkeypatch):
    """Weights and logs, bit for bit. Control: another model's."""
    weights, logs, n = trained(16, monkeypatch, dtype=dtype, **changes)
    assert n == 2 - ("micro_rows" in changes)
    want, want_logs, none = trained(0, monkeypatch, dtype=dtype, **changes)
    assert none == 0 and equal(weights, want) and logs == want_logs
    other, *_ = trained(16, monkeypatch, seed=1, dtype=dtype, steps=1, **changes)
    assert not equal(weights, other)


def warm(net, opt, r):
    """Two passes, of which the second is recorded."""
    for _ in range(2):
        replay(net, r)["shadow"].sum().backward()
    assert made(net) == 1
    opt.forget()


def test_two_passes_before_a_backward_pass(monkeypatch):
    """They share memory, so the second is launched one by one; the order of backward passes does
    not matter. Control: the second alone has other gradients."""
    found = []
    for sizes in (16, 0):
        monkeypatch.setattr(recorded, "SIZES", sizes)
        net, _, _, opt = make()
        a = rollouts(net)[0]
        b = replace(a, prompts=[prompt[::-1] for prompt in a.prompts])
        if sizes:
            warm(net, opt, a)
        first, second = replay(net, a)["shadow"].sum(), replay(net, b)["shadow"].sum()
        second.backward()
        alone = gradients(opt)
        first.backward()
        found.append(gradients(opt))
    assert equal(*found) and not equal(alone, found[0])


def test_a_pass_that_is_thrown_away_frees_its_memory(monkeypatch):
    net, _, _, opt = make()
    a, _ = rollouts(net)
    warm(net, opt, a)
    out = replay(net, a)
    assert record.LEARNERS[net].alive() is not None
    del out
    gc.collect()
    assert record.LEARNERS[net].alive() is None


def test_hidden_states_are_the_callers(monkeypatch):
    """What a recorded pass gave stays as it was when the next one runs."""
    net, _, _, opt = make()
    a, _ = rollouts(net)
    b = replace(a, prompts=[prompt[::-1] for prompt in a.prompts])
    warm(net, opt, a)
    found = []
    real = recorded.Pass.apply
    monkeypatch.setattr(recorded.Pass, "apply",
                        lambda *args: found.append(real(*args)) or found[-1])
    for r in (a, b):
        replay(net, r)["shadow"].sum().backward()
    copy = found[0].detach().clone()
    replay(net, a)["shadow"].sum().backward()
    assert torch.equal(found[0], copy) and torch.equal(found[2], copy)
    assert not torch.equal(found[1], copy)


def test_what_a_pass_refuses():
    """A second backward pass, and gradients of some parameters: they would be wrong or missing."""
    net, _, _, opt = make()
    a, _ = rollouts(net)
    warm(net, opt, a)
    loss = replay(net, a)["shadow"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="it has run"):
        loss.backward()
    for some in ([net.embed_tokens.weight], list(net.parameters())):
        with pytest.raises(RuntimeError):
            torch.autograd.grad(replay(net, a)["shadow"].sum(), some)
    with pytest.raises(RuntimeError, match="not of some alone"):
        replay(net, a)["shadow"].sum().backward(inputs=[net.embed_tokens.weight])


def test_which_passes_are_padded(monkeypatch):
    """With gradients, of a model that an optimizer owns, and not so large that the card is the
    limit."""
    net, _, _, opt = make()
    a, _ = rollouts(net)

    def rows(net, r=a):
        seen = []
        hook = net.layers[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        replay(net, r)
        hook.remove()
        return seen

    few = [len(replay.__globals__["pack"](a).ids)]
    assert rows(net) == [256] and few[0] < 256
    with torch.no_grad():
        assert rows(net) == few
    assert rows(toy().to(DEVICE)) == few  # nobody said where its gradients go
    if CUDA:  # on a card alone
        other = toy()
        learner(other)
        assert rows(other, rollouts(other)[0]) == few
    monkeypatch.setattr(recorded, "WORK", 256 * sum(p.numel() for p in net.parameters()) - 1)
    assert rows(net) == few


# memory

def test_weights_that_move_are_recorded_anew():
    net, _, _, opt = make()
    a, _ = rollouts(net)
    warm(net, opt, a)
    before = record.LEARNERS[net]
    replay(net, a)["shadow"].sum().backward()
    assert record.LEARNERS[net] is before
    net.norm.weight.data = net.norm.weight.data.clone()
    replay(net, a)["shadow"].sum().backward()
    assert record.LEARNERS[net] is not before and made(net) == 0
    del before, net, opt
    LAST.clear()
    gc.collect()
    assert not record.LEARNERS


def test_dropped_recordings(monkeypatch):
    """For good; a pass that is under way still gives its gradients. Where the sampler has too
    little memory to record, it drops them."""
    net, _, _, opt = make()
    a, _ = rollouts(net)
    warm(net, opt, a)
    loss = replay(net, a)["shadow"].sum()
    for owner, name, value in (
            (record, "a_quarter_is_free", lambda: False), (record, "RECORDED", {}),
            (record, "capture", lambda step, last=None: SimpleNamespace(replay=None)),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "empty_cache", lambda: None), (torch.cuda, "current_device", lambda: 0)):
        monkeypatch.setattr(owner, name, value)
    record.record(None, DEVICE)
    assert made(net) == 0
    loss.backward()
    grad = gradients(opt)
    opt.forget()
    for _ in range(3):
        replay(net, a)["shadow"].sum().backward()
        assert made(net) == 0 and equal(grad, gradients(opt))
        opt.forget()
    assert max(x.abs().max() for x in grad) > 0


def test_no_room(monkeypatch):
    """Nothing is recorded where a quarter of the card would not stay free, or where memory ends in
    a recording; another failure is raised. Gradients stay where they were."""
    def fails(error):
        def capture(step, last=None):
            raise error
        return capture

    def at(beyond):
        assert beyond == torch.cuda.memory_reserved()
        return False

    for name, value, dropped in (
            ("a_quarter_is_free", at, False),
            ("capture", fails(torch.OutOfMemoryError("out of memory")), True)):
        with monkeypatch.context() as patch:
            patch.setattr(recorded, name, value)
            net, _, _, opt = make()
            a, _ = rollouts(net)
            for n in (1, 2):
                replay(net, a)["shadow"].sum().backward()
                if n == 1:
                    once = gradients(opt)
            assert made(net) == 0 and record.LEARNERS[net].dropped == dropped
            assert rel(gradients(opt)[-1], 2 * once[-1]) < 1e-5
    monkeypatch.setattr(recorded, "capture", fails(RuntimeError("a mistake")))
    net, _, _, opt = make()
    replay(net, a)["shadow"].sum().backward()
    with pytest.raises(RuntimeError, match="a mistake"):
        replay(net, a)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_recordings_share_memory_that_is_counted():
    net, _, _, opt = make()
    for r in rollouts(net):
        for _ in range(2):
            replay(net, r)["shadow"].sum().backward()
    assert made(net) == 2 and recorded.pooled() > 0
    pools = {one.ahead.pool() for one in record.LEARNERS[net].made.values()}
    assert len(pools) == 1
    record.LEARNERS.clear()
    gc.collect()
    assert recorded.pooled() == 0
