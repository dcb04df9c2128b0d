"""
shadow_attn.py against an fp64 oracle written apart from it: outputs, gradients, garbage in hidden
keys, strides, errors.

The PyTorch path runs on the whole grid here. The Triton kernels, readable and tuned, run on the
whole grid on a GPU, in fp32 and bf16; on machines without one they run on a smaller grid in
Triton's interpreter, in a process of its own.
"""
import math
import subprocess
import sys
from itertools import product

import pytest
import torch

import experiments.attention
import shadow_attn
from conftest import CUDA, DEVICE, INTERPRET, ROOT, beside_interpreter, kernel, largest_tensor
from experiments.attention import group_until
from fast import attention as tuned
from fast.attention import TILE_K, TILE_Q, make_plan, make_plans
from shadow_attn import definition, shadow_attention, shadow_attention_ref, triton, visible

KERNELS = "(triton or simple) and not gpu and not import"  # in the interpreter
NS = 1, 15, 16, 17, 63, 64, 65, 127, 129, 700
SIZES = 16, 48, 64, 80, 96, 128
HEADS = (4, 4), (6, 2), (8, 1)
# in the interpreter: every N (390 for 700), every head size, many ratios of heads
SMALL_GRID = [(1, 16, (4, 4)), (15, 48, (6, 2)), (16, 80, (8, 1)), (17, 96, (4, 4)),
              (63, 128, (6, 2)), (64, 64, (8, 1)), (65, 16, (6, 2)), (127, 48, (4, 4)),
              (129, 80, (4, 1)), (390, 16, (2, 1))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-13}

gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
ON_CARD = ["triton", "simple"]
REF = pytest.param("ref", "cpu", id="ref")
TUNED, SIMPLE = (pytest.param(x, DEVICE, id=x, marks=kernel) for x in ON_CARD)
every_impl = pytest.mark.parametrize("impl,device", [REF, TUNED, SIMPLE])
real_impl = pytest.mark.parametrize("impl,device", [REF, TUNED])


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter pays per operation, so give it few large blocks; test_triton_real_blocks
    keeps the real ones."""
    if INTERPRET:
        monkeypatch.setattr(tuned, "configs", lambda *_: [(128, 64, 1, 1)])
        monkeypatch.setattr(shadow_attn, "BLOCK", 64)


def oracle(q, k, v, until, grad, scale=None):
    """[out, dq, dk, dv] in fp64: one head at a time, dense mask, softmax over the rows that see
    anything."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    N, nh, hs = q.shape
    scale = 1 / math.sqrt(hs) if scale is None else scale
    time = torch.arange(N, device=q.device)
    out = torch.zeros(N, nh, hs, dtype=torch.float64, device=q.device)
    for h in range(nh):
        g = h * k.shape[1] // nh
        seen = (time <= time[:, None]) & (time[:, None] < until[g].long())  # (N, N)
        rows, keys = seen.any(1), seen.any(0)
        score = q[rows, h] @ k[keys, g].T * scale
        hidden = ~seen[rows][:, keys]
        p = torch.softmax(score.masked_fill(hidden, float("-inf")), 1)
        at = rows.nonzero()[:, 0], torch.tensor(h, device=q.device)
        out = out.index_put(at, p @ v[keys, g])
    out.backward(grad.double())
    return [out.detach()] + [x.grad for x in (q, k, v)]


def case(N, nh, nkv, hs, *, device="cpu", dtype=torch.float32, seed=0):
    """q, k, v, grad and a random until: keys that never die, that die at any time, that nobody
    sees; rows that see nothing."""
    g = torch.Generator().manual_seed(1000 * N + 10 * hs + nh + seed)
    q, k, v, grad = (torch.randn(N, n, hs, generator=g) for n in (nh, nkv, nkv, nh))
    row, r = torch.arange(N), torch.rand(nkv, N, generator=g)
    until = row + 1 + (torch.rand(nkv, N, generator=g) * N).long()
    until = torch.where(r < 0.4, N, until.clamp(max=N + 5))
    early = (row * torch.rand(nkv, N, generator=g)).long() - 3
    until = torch.where(r > 0.85, early, until)
    a, b = N // 3, N // 3 + N // 8  # in the first KV head the rows a..b-1 see nothing
    until[0, :a] = until[0, :a].clamp(max=a)
    until[0, a:b] = 0
    return [x.to(device, dtype) for x in (q, k, v, grad)] + [until.int().to(device)]


def run(impl, q, k, v, until, grad, scale=None):
    """[out, dq, dk, dv]"""
    def attend(q, k, v):
        return shadow_attention(q, k, v, until, scale=scale, impl=impl)

    got = experiments.attention.run(attend, grad, q, k, v)
    assert got[0].shape == q.shape and got[0].dtype == q.dtype
    return got


def errors(got, want):
    """Error in norm of each tensor, relative to max(1, norm)."""
    return [((a.double() - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(got, want)]


def error(got, want):
    return max(errors(got, want))


@torch.no_grad()
def run_forward(impl, q, k, v, until):
    return shadow_attention(q, k, v, until, impl=impl)


def check_case(impl, device, dtype, *, N, hs, heads):
    q, k, v, grad, until = case(N, *heads, hs, device=device, dtype=dtype)
    got = run(impl, q, k, v, until=until, grad=grad)
    want = oracle(q, k, v, until, grad=grad)
    assert error(got, want) < TOLERANCE[dtype], (N, hs, heads)
    seen = visible(until)                                       # (nkv, N, N)
    blind = ~seen.any(2).repeat_interleave(heads[0] // heads[1], 0).T  # (N, nh)
    unseen = ~seen.any(1).T                                     # (N, nkv)
    assert N < 15 or (blind.any() and unseen.any())
    assert (got[0][blind] == 0).all() and (got[1][blind] == 0).all()
    assert (got[2][unseen] == 0).all() and (got[3][unseen] == 0).all()


@pytest.mark.parametrize("scale", (None, 0.3))
def test_definition(scale):
    """The definition in the file is the oracle, in values and gradients; with keys that live one
    row longer it is not."""
    q, k, v, grad, until = case(67, 6, 2, 16, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = oracle(q, k, v, until, grad=grad, scale=scale)
    for shift, right in ((0, True), (1, False)):
        out = definition(*leaves, until + shift, scale)
        got = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        assert (error(got, want) < TOLERANCE[torch.float64]) == right


@pytest.mark.parametrize("N", NS)
def test_ref_grid(N):
    """All sizes and heads; of the longest, which takes seconds, three."""
    sizes = product(SIZES, HEADS)
    if N == 700:
        sizes = zip(SIZES[::2], HEADS)
    for hs, heads in sizes:
        check_case("ref", "cpu", torch.float32, N=N, hs=hs, heads=heads)


@pytest.mark.skipif(not INTERPRET or CUDA, reason="is of the interpreter")
@pytest.mark.parametrize("impl,N,hs,heads", [
    *(("triton", *sizes) for sizes in SMALL_GRID),
    *(("simple", *sizes) for sizes in SMALL_GRID[:-1:2])])
def test_small_grid(impl, N, hs, heads):
    check_case(impl, "cpu", torch.float32, N=N, hs=hs, heads=heads)
    if N == 390:  # several tiles of either side; some pairs need no mask
        for side in make_plan(case(N, *heads, hs)[4])[2:]:
            assert (0 < side.n_partial).any()
            assert (side.n_partial < side.n_visible).any()


@gpu
@pytest.mark.parametrize("impl", ON_CARD)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("hs", SIZES)
def test_gpu_grid(hs, dtype, impl):
    for N, heads in product(NS, HEADS):
        check_case(impl, "cuda", dtype, N=N, hs=hs, heads=heads)


@gpu
def test_ref_gpu():
    for N, hs, heads in ((129, 64, (6, 2)), (1500, 32, (4, 2))):
        check_case("ref", "cuda", torch.float32, N=N, hs=hs, heads=heads)


@kernel
@pytest.mark.parametrize("impl", ON_CARD)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_real_blocks(impl, dtype, monkeypatch):
    monkeypatch.undo()  # the blocks used for real: several per tile
    check_case(impl, DEVICE, dtype, N=131, hs=16, heads=(2, 1))


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()


@every_impl
def test_negative_controls(impl, device):
    """Another until shows, in the output and in every gradient."""
    q, k, v, grad, until = case(67, 4, 2, 16, device=device)
    want = oracle(q, k, v, until, grad=grad)
    assert not torch.equal(until[0], until[1])
    got = run(impl, q, k, v, until=until, grad=grad)
    assert error(got, want) < TOLERANCE[torch.float32]
    for wrong in (until + 1, until - 1):
        assert error([run_forward(impl, q, k, v, until=wrong)], want[:1]) > 1e-2
    swapped = run(impl, q, k, v, until=until.flip(0), grad=grad)
    assert min(errors(swapped, want)) > 1e-2
    want = oracle(q, k, v, until, grad=grad, scale=0.3)
    got = run(impl, q, k, v, until=until, grad=grad, scale=0.3)
    assert error(got, want) < TOLERANCE[torch.float32]


@real_impl
def test_strides(impl, device):
    """Any layout; two runs of a kernel agree bit for bit."""
    # a multiple of the tile: otherwise padding makes a contiguous copy of `until`
    N, nh, nkv, hs = 2 * TILE_K, 4, 2, 16
    *_, until = case(N, nh, nkv, hs, device=device)
    odd = [torch.randn(nh, hs, N, device=device).permute(2, 0, 1),  # columns apart
           torch.randn(N, 2 * nkv, hs, device=device)[:, ::2],      # every second head
           torch.randn(nkv, N, hs, device=device).transpose(0, 1)]
    grads = (torch.ones((), device=device).expand(N, nh, hs),  # of .sum(): strides of 0
             torch.randn(hs, nh, N, device=device).permute(2, 1, 0))
    until = until.t().contiguous().t()
    for g in grads:
        got = run(impl, *odd, until=until, grad=g)
        assert error(got, oracle(*odd, until, grad=g)) < TOLERANCE[torch.float32]
        plain = run(impl, *(x.contiguous() for x in odd), until=until.contiguous(),
                    grad=g.contiguous())
        # the kernel reads the same numbers in the same order; a BLAS may choose another
        # order for another layout
        assert impl == "ref" or all(torch.equal(a, b) for a, b in zip(got, plain))


@every_impl
def test_hidden_keys_do_not_leak(impl, device):
    N, nkv = 130, 2
    q, k, v, grad, until = case(N, 4, nkv, 16, device=device)
    clean = run(impl, q, k, v, until=until, grad=grad)
    unseen = (until <= torch.arange(N, device=device)).T        # (N, nkv)
    assert unseen.any()
    # each of these is in one unseen key of three, in whichever tile
    garbage = torch.tensor([1e4, math.nan, math.inf], device=device).repeat(N // 3 + 1)
    garbage = garbage[:N, None, None].expand(k.shape)           # (N, nkv, hs)
    dirty_k, dirty_v = (torch.where(unseen[:, :, None], garbage, x) for x in (k, v))
    dirty = run(impl, q, dirty_k, dirty_v, until=until, grad=grad)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))
    # a key seen for a while: rows after its death do not feel what it holds, rows before do
    until[:, 5] = 60
    k5, v5 = k.clone(), v.clone()
    k5[5], v5[5] = 3.0, 1e4
    a, b = (run_forward(impl, q, *kv, until=until) for kv in ((k, v), (k5, v5)))
    assert torch.equal(a[60:], b[60:]) and torch.equal(a[:5], b[:5])
    assert not torch.equal(a[5:60], b[5:60])


@every_impl
def test_first_tiles_masked(impl, device):
    # each row sees itself alone: its softmax is 1, however many dead keys come before
    N = 140
    q, k, v, grad, _ = case(N, 2, 1, 16, device=device)
    until = torch.arange(1, N + 1, device=device, dtype=torch.int32)[None]
    out, dq, dk, dv = run(impl, q, k, v, until=until, grad=grad)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
    assert torch.allclose(dv, grad.view(N, 1, 2, 16).sum(2), atol=1e-6)


# the PyTorch path

def test_ref_long_block_and_gather():
    # more than 4 chunks (masks are rebuilt in the backward pass) and a tail where few keys
    # live (they are gathered)
    N = 4 * shadow_attn.CHUNK + 300
    q, k, v, grad, until = case(N, 2, 1, 16, dtype=torch.float64)
    until[:, 20:N - 400] = until[:, 20:N - 400].clamp(max=N - 300)
    got = run("ref", q, k, v, until=until, grad=grad)
    assert error(got, oracle(q, k, v, until, grad=grad)) < TOLERANCE[torch.float64]


def test_ref_empty_rows_whatever_sdpa_does(monkeypatch):
    def eager(q, k, v, attn_mask, scale):
        """NaN for a row without keys, as older versions and other devices have it"""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return (q @ k.mT * scale).masked_fill(~attn_mask, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(shadow_attn.F, "scaled_dot_product_attention", eager)
    *first, until_1 = case(90, 4, 2, 16)  # two sequences, both with empty rows
    *second, until_2 = case(130, 4, 2, 16)
    q, k, v, grad = (torch.cat(pair) for pair in zip(first, second))
    until = torch.cat((until_1.clamp(max=90), until_2 + 90), 1)
    got = run("ref", q, k, v, until=until, grad=grad)
    assert error(got, oracle(q, k, v, until, grad=grad)) < TOLERANCE[torch.float32]
    assert (got[0][90:] == 0).all(2).any()


def test_no_dense_mask():
    N = 1500
    q, k, v, grad, until = case(N, 1, 1, 16)
    until[:] = N  # plain causal, the densest there is
    largest = largest_tensor(lambda: run("ref", q, k, v, until=until, grad=grad))
    assert 0 < largest <= shadow_attn.CHUNK * N < N * N / 5


# the plan

@kernel
def test_triton_plan_is_no_dense_mask():
    N = 600
    until = torch.full((1, N), N, dtype=torch.int32, device=DEVICE)
    assert 0 < largest_tensor(lambda: make_plan(until)) <= 2 * N


def planned(until, **kwargs):
    """make_plan(until), on the CPU."""
    born, dies, by_query, by_key = make_plan(until.to(DEVICE), **kwargs)
    by_key = by_key and [x.cpu() for x in by_key]
    return born.cpu(), dies.cpu(), [x.cpu() for x in by_query], by_key


@kernel
def test_triton_plan_lists_what_is_visible():
    N = 700
    cases = [case(N, 1, 1, 16, seed=s)[4] for s in range(2)]
    until = torch.cat([*cases, group_until(P=300, G=4, R=51, budget=60, nkv=1)])
    heads, row = len(until), torch.arange(N)
    born, dies, (lists, partial, seen, order), by_key = planned(until)
    nq, nk = lists.shape[1:]
    assert (nq, nk) == (-(-N // TILE_Q), -(-N // TILE_K))
    assert sorted(order.tolist()) == list(range(heads * nq))
    longest_first = seen.flatten().sort(descending=True).values
    assert torch.equal(seen.flatten()[order.long()], longest_first)
    mask = torch.zeros(heads, nq * TILE_Q, nk * TILE_K, dtype=torch.bool)
    mask[:, :N] = (born[:, None] <= row[:, None]) & (row[:, None] < dies[:, None])
    assert mask.sum() == visible(until).sum() > 0  # the sort loses and adds nothing
    # visible pairs of each tile
    real = mask.view(heads, nq, TILE_Q, nk, TILE_K).sum((2, 4))
    rows_in = [min(TILE_Q, N - i * TILE_Q) for i in range(nq)]
    n_full = 0
    for h, i in product(range(heads), range(nq)):
        tiles, a, b = lists[h, i].tolist(), partial[h, i], seen[h, i]
        dead = set(range(nk)) - set(tiles[:b])
        assert len(dead) == nk - b and all(real[h, i, t] == 0 for t in dead)
        assert all(real[h, i, t] == rows_in[i] * TILE_K for t in tiles[a:b])
        n_full += int(b - a)
        for t in range(nk):  # the transposed lists say the same
            queries, c, d = by_key[0][h, t].tolist(), by_key[1][h, t], by_key[2][h, t]
            assert (t in tiles[:a]) == (i in queries[:c])
            assert (t in tiles[a:b]) == (i in queries[c:d])
    assert n_full > 0 and int(seen.sum()) < 0.6 * heads * nq * nk
    # the lists of a mask shifted by one do not cover this one
    assert not torch.equal(planned(until - TILE_Q, backward=False)[2][2], seen)


@kernel
def test_triton_layers_are_planned_together():
    N = 150
    until = torch.stack([case(N, 2, 2, 16, seed=s)[4] for s in range(3)]).to(DEVICE)

    def facts(born, dies, *sides):
        """What a plan says, whatever stands behind the end of a list and in whatever order equals
        come."""
        out = [born, dies]
        for lists, partial, seen, order in sides:
            behind = torch.arange(lists.shape[2], device=DEVICE) >= seen[:, :, None]
            in_order = seen.flatten()[order.long()]
            out += [lists.masked_fill(behind, -1), partial, seen, in_order]
        return out

    together, alone = make_plans(until), [make_plan(layer) for layer in until]
    for a_plan, b_plan in zip(together, alone, strict=True):
        pairs = zip(facts(*a_plan), facts(*b_plan), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(together[0].born, alone[1].born)
    plan = make_plan(until[0], backward=False)
    assert plan.by_key is None
    q, k = torch.zeros(N, 2, 16, device=DEVICE), torch.zeros(N, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="prepared without backward lists"):
        shadow_attention(q, k, k, until[0], impl="triton", plan=plan)


@kernel
def test_triton_one_program_for_all_query_heads(monkeypatch):
    """dK and dV from one program per key tile; small cases take one for each query head, too."""
    monkeypatch.setattr(tuned, "FEW_TILES", 0)
    check_case("triton", DEVICE, torch.float32, N=131, hs=16, heads=(6, 1))


@kernel
def test_triton_writes_over_q():
    """With out=q the result is bit for bit the same, in strided memory too; where a gradient is
    recorded, or it does not fit, it is refused."""
    N = 150
    q, k, v, _, until = case(N, 4, 2, 16, device=DEVICE)

    def attend(q, out=None):
        return shadow_attention(q, k, v, until, impl="triton", out=out)

    want = attend(q)
    with pytest.raises(ValueError, match="or would be part of a recorded graph"):
        attend(q, torch.empty_like(q))
    with torch.no_grad():
        wide = torch.zeros(N, 6, 16, device=DEVICE)
        wide[:, :4] = q
        got = attend(wide[:, :4], wide[:, :4])
        assert got.data_ptr() == wide.data_ptr()
        assert torch.equal(got, want) and not torch.equal(want, q)
        assert torch.equal(wide[:, 4:], torch.zeros_like(wide[:, 4:]))
        with pytest.raises(ValueError, match="does not fit q"):
            attend(q, torch.empty_like(q)[:-1])


@kernel
def test_triton_sorting_pays():
    # two policies of one group: nearly all the work in visited tiles is visible work
    until = group_until(P=2048, G=4, R=129, budget=256, nkv=1)
    N = until.shape[1]
    _, _, (_, _, seen, _), _ = planned(until, backward=False)
    pairs = (until.long() - torch.arange(N)).clamp(min=0).sum()
    assert pairs / (seen.sum() * TILE_Q * TILE_K) > 0.85
    causal = sum(-(-min(N, i + TILE_Q) // TILE_K) for i in range(0, N, TILE_Q))
    assert seen.sum() < 0.75 * causal


# the front door

Z = torch.zeros


@pytest.mark.parametrize("change,message", [
    (dict(q=Z(8, 3, 16)), "3 query heads do not divide into 2 KV heads"),
    (dict(q=Z(8, 16)), r"q and k must be \(N, heads, head size\)"),
    (dict(q=Z(0, 4, 16), k=Z(0, 2, 16), v=Z(0, 2, 16), until=Z(2, 0).int()),
     "not empty"),
    (dict(k=Z(8, 2, 15)), r"k and v must be \(8, nkv, 16\)"),
    (dict(v=Z(7, 2, 16)), r"k and v must be \(8, nkv, 16\)"),
    (dict(until=torch.full((2, 8), 8)), "until must be int32"),
    (dict(until=torch.full((1, 8), 8).int()),
     r"of shape \(2, 8\), got torch.int32 of shape \(1, 8\)"),
    (dict(v=Z(8, 2, 16).half()), "share one floating dtype"),
    (dict(q=Z(8, 4, 16).long()), "share one floating dtype, got torch.int64"),
    (dict(v=Z(8, 2, 16, device="meta")), "q, k, v and until are on cpu, cpu, meta"),
    (dict(scale=0.0), "scale must be positive"),
    (dict(scale=-1.0), "scale must be positive"),
    (dict(scale=math.nan), "scale"),
    (dict(impl="flash"), "impl='flash' is unknown")])
def test_errors(change, message):
    good = dict(q=Z(8, 4, 16), k=Z(8, 2, 16), v=Z(8, 2, 16), until=torch.full((2, 8), 8).int())
    shadow_attention(**good)
    with pytest.raises(ValueError, match=message) as e:
        shadow_attention(**{**good, **change})
    assert "\n" not in str(e.value)


@kernel
@pytest.mark.parametrize("impl", ON_CARD)
def test_errors_of_kernels(impl):
    refused = [(16, torch.float64, "takes float32, bfloat16 or float16"),
               (136, torch.float32, "up to 128")]
    if INTERPRET:
        refused.append((16, torch.bfloat16, "interpreter computes bfloat16 wrongly"))
    for hs, dtype, message in refused:
        q, k, v, _, until = case(8, 2, 1, hs, device=DEVICE, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            shadow_attention(q, k, v, until, impl=impl)


def test_dispatch():
    q, k, v, _, until = case(40, 4, 2, 16)
    q, k, v = (x.bfloat16() for x in (q, k, v))  # computed in fp32, rounded once
    low = shadow_attention(q, k, v, until)
    high = shadow_attention_ref(q.float(), k.float(), v.float(), until)
    assert low.dtype == torch.bfloat16 and torch.equal(low, high.bfloat16())
    if triton is not None and not INTERPRET:
        with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
            shadow_attention(q, k, v, until, impl="triton")


@gpu
def test_gpu_takes_the_tuned_kernels():
    q, k, v, _, until = case(40, 4, 2, 16, device="cuda")
    got = shadow_attention(q, k, v, until)
    assert torch.equal(got, shadow_attention(q, k, v, until, impl="triton"))
    for other in ("simple", "ref"):  # controls
        assert not torch.equal(got, shadow_attention(q, k, v, until, impl=other))


def test_import_without_triton():
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch, shadow_attn\n"
            "x = torch.ones(3, 1, 16); until = torch.full((1, 3), 3).int()\n"
            "assert torch.equal(shadow_attn.shadow_attention(x, x, x, until), x)\n"
            "try: shadow_attn.shadow_attention(x, x, x, until, impl='triton')\n"
            "except ValueError as e: print(e)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = "needs the triton package, which is not installed"
    assert said in result.stdout, result.stderr


@pytest.mark.skipif(triton is None, reason="needs the triton package")
def test_smaller_blocks_when_out_of_shared_memory(monkeypatch):
    OutOfResources = triton.runtime.errors.OutOfResources
    used = []

    class Kernel:
        __name__ = "toy"

        def __getitem__(self, grid):
            def call(*args, BLOCK_Q, BLOCK_K, **_):
                used.append((grid, BLOCK_Q))
                if BLOCK_Q > limit:
                    raise OutOfResources(2 ** 17, 2 ** 16, "shared memory")
            return call

    def launch(dtype):
        tuned.launch(Kernel(), dtype, 64, lambda block_q, block_k: 256 // block_q)

    options = [(128, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1)]
    monkeypatch.setattr(tuned, "configs", lambda *_: options)
    monkeypatch.setattr(tuned, "SETTLED", {})
    limit = 64
    with pytest.warns(UserWarning, match="do not fit this card"):
        launch(torch.float16)
    launch(torch.float16)  # remembered: no second failure
    assert used == [((2,), 128), ((4,), 64), ((4,), 64)]
    limit = 16
    with pytest.warns(UserWarning), pytest.raises(OutOfResources):
        launch(torch.float32)


@pytest.mark.skipif(INTERPRET, reason="the kernels are held above")
@pytest.mark.parametrize("bound, ends", [(1e-5, "ok"), (0, "FAILED")])
def test_self_check_command(monkeypatch, capsys, bound, ends):
    """Attention of the learner and of a decoding step, against their formulas."""
    monkeypatch.setattr(experiments.attention, "DECODING", experiments.attention.DECODING[:1])
    monkeypatch.setitem(experiments.attention.BOUNDS, torch.float32, bound)
    assert experiments.attention.main() == (ends == "FAILED")
    assert capsys.readouterr().out.splitlines()[-1].startswith(ends)
