"""fast/head.py: values by hand, chunks against the whole, matmul32 under torch.vmap."""
import math

import pytest
import torch

from conftest import largest_tensor, rel
from fast import head
from fast.head import acceptance_rows, entropy_rows, from_logits, head_rows, kl_rows, matmul32

P3, Q3 = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")


# matmul32

def test_products_of_bf16_are_not_rounded():
    torch.manual_seed(0)
    a, b = torch.randn(7, 64).bfloat16(), torch.randn(64, 9).bfloat16()
    exact = a.double() @ b.double()
    assert matmul32(a, b).dtype == torch.float32
    assert (matmul32(a, b) - exact).abs().max() < 1e-4 < ((a @ b) - exact).abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_vmap_is_the_loop(batch, dtype, device):
    """a (.., 8, 16) @ b (.., 16, 33) for each of 5; on CPU bit for bit"""
    torch.manual_seed(0)
    a = torch.randn(5, *batch, 8, 16, device=device).to(dtype)
    b = torch.randn(5, *batch, 16, 33, device=device).to(dtype)

    def same(got, want):
        assert got.dtype == torch.float32 and got.shape == want.shape
        if device == "cpu":
            return torch.equal(got, want)
        return rel(got, want) < 1e-6  # far below what rounding to bf16 would leave

    both = torch.stack([matmul32(x, y) for x, y in zip(a, b)])
    assert same(torch.vmap(matmul32)(a, b), both)
    last = a.movedim(0, -1).contiguous()
    other_dims = torch.vmap(matmul32, in_dims=(-1, 0), out_dims=1)
    assert same(other_dims(last, b), both.movedim(0, 1))
    only_a = torch.stack([matmul32(x, b[0]) for x in a])
    assert same(torch.vmap(matmul32, in_dims=(0, None))(a, b[0]), only_a)
    only_b = torch.stack([matmul32(a[0], y) for y in b])
    assert same(torch.vmap(matmul32, in_dims=(None, 0))(a[0], b), only_b)
    # the controls: other pairs of matrices, and a product rounded to the inputs' dtype
    assert not same(torch.vmap(matmul32)(a, b.flip(0)), both)
    assert not same(only_a, both) and not same(only_b, both)
    if dtype != torch.float32:
        assert not same(torch.vmap(torch.matmul)(a, b).float(), both)


# what is read off a row of logits

def test_kl_direction_and_reduction():
    p, q = P3.log()[None], Q3.log()[None]
    assert kl_rows(p, q).item() == pytest.approx(0.08512, abs=1e-5)
    assert kl_rows(q, p).item() == pytest.approx(0.09203, abs=1e-5)
    # control: the mean over the vocabulary
    assert kl_rows(p, q).item() / 3 == pytest.approx(0.02837, abs=1e-5)
    # logits, not log-probs; the student is named by its place
    for student, want in ((1, 0.08512), (0, 0.09203)):
        kl = from_logits([q - 3, p + 5], torch.tensor([0]), student=student)["kl"].item()
        assert kl == pytest.approx(want, abs=1e-5)


def test_kl_gradient_is_the_students():
    torch.manual_seed(0)
    s, t = (torch.randn(3, 5, dtype=torch.double).requires_grad_() for _ in range(2))
    kl = from_logits([s, t], torch.zeros(3, dtype=torch.int64), student=0)["kl"]
    got, of_teacher = torch.autograd.grad(kl.sum(), (s, t), allow_unused=True)
    p, q = s.softmax(-1), t.softmax(-1)
    want = torch.autograd.grad((p * (p / q).log()).sum(), s)[0]
    assert rel(got, want) < 1e-12 and of_teacher is None
    p, q = s.softmax(-1), t.softmax(-1)
    other = torch.autograd.grad((q * (q / p).log()).sum(), s)[0]
    assert rel(got, other) > 0.1  # control: the other direction


def test_temperature():
    logits, targets = [torch.tensor([[2.0, 1.0, 0.0]])], torch.tensor([0])
    for temperature, want in ((0.5, -0.1429), (1.0, -0.4076)):
        logp = from_logits(logits, targets, temperature)["logp"].item()
        assert logp == pytest.approx(want, abs=1e-4)


def test_acceptance_and_entropy():
    logits = [P3.log()[None], Q3.log()[None]]
    out = from_logits(logits, torch.tensor([1]), student=0, stats=True)
    want = dict(logp=[math.log(0.2), math.log(0.3)], kl=[0.08512],
                entropy=[-(Q3 * Q3.log()).sum().item()], accept=[0.5 + 0.2 + 0.1])
    assert out.keys() == want.keys()
    for name, values in want.items():
        assert out[name].flatten().tolist() == pytest.approx(values, abs=1e-5), name
    assert entropy_rows(logits[0]).item() != pytest.approx(want["entropy"][0], abs=1e-2)
    assert acceptance_rows(logits[0], logits[0]).item() == pytest.approx(1)


def test_what_is_not_asked_for_is_not_there():
    weight, hidden, targets, _ = head_case()
    for some, asked, names in ((hidden, {}, "logp"), (hidden, dict(student=0), "logp kl"),
                               (hidden, dict(stats=True), "logp entropy accept"),
                               (hidden[:1], dict(stats=True), "logp entropy")):
        assert set(head_rows(weight, some, targets, **asked)) == set(names.split())


# the head in chunks

def head_case(n=203, V=97, C=12, dtype=torch.double):
    """weight, hidden of two policies, targets, coefficients (3, n) of two log-probs and the KL"""
    torch.manual_seed(0)
    shapes = (V, C), (n, C), (n, C)
    weight, *hidden = (torch.randn(*s, dtype=dtype).requires_grad_() for s in shapes)
    return weight, hidden, torch.randint(V, (n,)), torch.randn(3, n, dtype=dtype)


def weighted(out, coefs):
    return (coefs[:2] * out["logp"]).sum() + (coefs[2] * out["kl"]).sum()


def in_chunks(weight, hidden, targets, coefs):
    """head_rows, and gradients of a weighted sum wrt weight and both hidden"""
    out = head_rows(weight, hidden, targets, 0.7, student=1)
    return out, torch.autograd.grad(weighted(out, coefs), [weight, *hidden])


def test_chunks_change_nothing(monkeypatch):
    weight, hidden, targets, coefs = head_case()
    want = from_logits([h @ weight.t() for h in hidden], targets, 0.7, student=1)
    grads = torch.autograd.grad(weighted(want, coefs), [weight, *hidden])
    for rows in (1, 7, 203, 1000):
        monkeypatch.setattr(head, "LOGIT_BYTES", rows * 2 * 97 * 8)
        assert len(head.chunks(weight, hidden)) == -(-203 // rows)
        got, got_grads = in_chunks(weight, hidden, targets, coefs)
        assert got.keys() == want.keys()
        assert all(rel(got[name], want[name]) < 1e-14 for name in want)
        assert all(rel(a, b) < 1e-12 for a, b in zip(got_grads, grads))
    # control: the backward pass forgets one row
    monkeypatch.setattr(head, "LOGIT_BYTES", 2 * 97 * 8)
    out = head_rows(weight, hidden, targets, 0.7, student=1)
    some = head.chunks(weight, hidden)[:-1]
    monkeypatch.setattr(head, "chunks", lambda *_: some)
    assert rel(torch.autograd.grad(weighted(out, coefs), weight)[0], grads[0]) > 1e-4


def test_log_probs_alone(monkeypatch):
    """without a student, and of one policy"""
    weight, hidden, targets, coefs = head_case()
    monkeypatch.setattr(head, "LOGIT_BYTES", 7 * 97 * 8)
    for some in (hidden, hidden[:1]):
        want = from_logits([h @ weight.t() for h in some], targets, 0.7)["logp"]
        got = head_rows(weight, some, targets, 0.7)["logp"]
        assert got.shape == (len(some), 203) and rel(got, want) < 1e-14
        c = coefs[:len(some)]
        grads = torch.autograd.grad((c * want).sum(), [weight, *some])
        got_grads = torch.autograd.grad((c * got).sum(), [weight, *some])
        assert all(rel(a, b) < 1e-12 for a, b in zip(got_grads, grads))
    # control: the second policy counts
    assert rel(grads[0], in_chunks(weight, hidden, targets, coefs)[1][0]) > 1e-2


def test_statistics_have_no_gradient(monkeypatch):
    """they ride along in the forward pass only, and gradients are those without them"""
    weight, hidden, targets, coefs = head_case()
    monkeypatch.setattr(head, "LOGIT_BYTES", 7 * 2 * 97 * 8)
    out = head_rows(weight, hidden, targets, 0.7, student=1, stats=True)
    assert all(out[name].shape == (203,) for name in ("kl", "entropy", "accept"))
    assert out["logp"].requires_grad and out["kl"].requires_grad
    assert not out["entropy"].requires_grad and not out["accept"].requires_grad
    total = weighted(out, coefs) + out["entropy"].sum() + out["accept"].sum()
    got = torch.autograd.grad(total, [weight, *hidden])
    grads = in_chunks(weight, hidden, targets, coefs)[1]
    assert all(torch.equal(a, b) for a, b in zip(got, grads))
    # control: with gradients they would differ
    whole = from_logits([h @ weight.t() for h in hidden], targets, 0.7, student=1, stats=True)
    assert rel(out["entropy"], whole["entropy"].detach()) < 1e-14
    assert rel(out["accept"], whole["accept"].detach()) < 1e-14
    total = weighted(whole, coefs) + whole["entropy"].sum() + whole["accept"].sum()
    assert rel(torch.autograd.grad(total, weight)[0], grads[0]) > 1e-4


def test_absent_tokens_are_no_tokens(monkeypatch):
    """Columns left out, by their numbers: what is returned, and all gradients, are those of a head
    without these rows, whose own gradient is exactly 0."""
    weight, hidden, targets, coefs = head_case()
    absent = torch.tensor([0, 41, 96])
    there = torch.ones(97, dtype=torch.bool).index_fill(0, absent, False)
    with torch.no_grad():
        weight[41] *= 100  # by far the largest logits
    targets = there.nonzero()[:, 0][targets % 94]
    monkeypatch.setattr(head, "LOGIT_BYTES", 7 * 2 * 97 * 8)

    def run(weight, targets, absent):
        out = head_rows(weight, hidden, targets, 0.7, student=1, stats=True, absent=absent)
        return out, torch.autograd.grad(weighted(out, coefs), [weight, *hidden])

    few = weight[there].detach().requires_grad_()
    want, want_grads = run(few, (there.cumsum(0) - 1)[targets], None)
    got, got_grads = run(weight, targets, absent)
    assert all(rel(got[name], want[name]) < 1e-14 for name in want)
    assert (got_grads[0][absent] == 0).all() and rel(got_grads[0][there], want_grads[0]) < 1e-12
    assert all(rel(a, b) < 1e-12 for a, b in zip(got_grads[1:], want_grads[1:]))
    # the controls: left in; none to leave out is nothing done
    free, free_grads = run(weight, targets, torch.zeros(0, dtype=torch.int64))
    assert rel(free["logp"], want["logp"]) > 0.1 and free_grads[0][41].abs().max() > 0.1
    assert torch.equal(free["logp"], run(weight, targets, None)[0]["logp"])


def test_a_teacher_with_its_own_matrix(monkeypatch):
    """Another model in the other policy's place: as plain softmaxes say, in chunks, with an id that
    is no token, for one policy and for two; no gradient but the student's."""
    weight, hidden, targets, coefs = head_case()
    own, of_teacher = torch.randn(97, 12).double(), torch.randn(203, 12).double()
    there = [i for i in range(97) if i != 41]
    targets = torch.where(targets == 41, 0, targets)
    monkeypatch.setattr(head, "LOGIT_BYTES", 7 * 3 * 97 * 8)

    def run(hidden, student, **kw):
        out = head_rows(weight, hidden, targets, 0.7, student=student, absent=torch.tensor([41]),
                        **kw)
        return out["kl"], torch.autograd.grad((coefs[2] * out["kl"]).sum(), [weight, *hidden])

    q = (of_teacher @ own[there].t() / 0.7).log_softmax(-1)
    for some, student in ((hidden, 0), (hidden, 1), (hidden[:1], 0)):
        p = (some[student] @ weight[there].t() / 0.7).log_softmax(-1)
        want = (p.exp() * (p - q)).sum(-1)
        grads = torch.autograd.grad((coefs[2] * want).sum(), [weight, some[student]])
        got, (d_weight, *d_hidden) = run(some, student, teacher=(own, of_teacher))
        assert rel(got, want) < 1e-13 and rel(d_weight, grads[0]) < 1e-12
        assert rel(d_hidden.pop(student), grads[1]) < 1e-12
        assert all((d == 0).all() for d in d_hidden)
        # controls: its hidden states met by the student's matrix; the other policy as the teacher
        wrong = run(some, student, teacher=(weight.detach(), of_teacher))
        assert rel(wrong[0], want) > 0.1 and rel(wrong[1][0], grads[0]) > 0.1
    assert rel(run(hidden, 0)[0], run(hidden, 0, teacher=(own, of_teacher))[0]) > 0.1
    # a chunk has room for the teacher's logits
    assert len(head.chunks(weight, hidden, (own, of_teacher))) == 29 > len(
        head.chunks(weight, hidden))


def test_rows_times_vocabulary_never_exists(monkeypatch):
    weight, hidden, targets, coefs = head_case(n=600, V=503, C=8, dtype=torch.float32)
    largest = {}

    def both():
        in_chunks(weight, hidden, targets, coefs)
        head_rows(weight, hidden, targets, student=0, stats=True)

    for budget in (16 * 2 * 503 * 4, 2**40):
        monkeypatch.setattr(head, "LOGIT_BYTES", budget)
        largest[budget] = largest_tensor(both)
    # control: with no budget the big one is
    assert list(largest.values()) == [16 * 503, 600 * 503]


def test_head_gradient_is_summed_in_fp32(monkeypatch):
    """bf16 weights, one row a chunk, 2048 equal contributions: a bf16 sum stops growing at 256"""
    V, C, n = 5, 4, 2048
    torch.manual_seed(0)
    weight = torch.randn(V, C).bfloat16().requires_grad_()
    hidden = torch.randn(1, C).bfloat16().expand(n, C).contiguous().requires_grad_()
    monkeypatch.setattr(head, "LOGIT_BYTES", 1)
    logp = head_rows(weight, [hidden], torch.zeros(n, dtype=torch.int64))["logp"]
    assert logp.dtype == torch.float32
    got, got_hidden = torch.autograd.grad(logp.sum(), [weight, hidden])
    row = (hidden[:1].float() @ weight.float().t()).log_softmax(-1)[0, 0]
    one = torch.autograd.grad(row, weight)[0].double()
    assert got.dtype == got_hidden.dtype == torch.bfloat16
    assert rel(got.double(), n * one) < 2**-6
    total = torch.zeros_like(weight)
    for _ in range(n):
        total += one.bfloat16()
    assert rel(total.double(), n * one) > 0.5  # control
