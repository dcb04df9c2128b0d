"""
The sampler's kernels against the formula that they replace, rollout.draw_token.

They run on a GPU if there is one, else in Triton's interpreter, in a process of its own.
"""
import pytest
import torch

from conftest import CUDA, DEVICE, beside_interpreter, kernel
from fast.launch import jit, tl
from fast.sampling import consider, gumbel, sample_triton
from rollout import draw_token

KERNELS = "not interpreter"  # tests that run in the interpreter


@pytest.fixture
def t():
    return torch.tensor(4, device=DEVICE)  # the step


@kernel
@pytest.mark.parametrize("temperature", (0.0, 1.0, 0.3))
def test_log_probs(temperature, t):
    """Greedy takes the first maximum; log-probs are those of the token drawn. 5,000 logits are two
    parts of a row, the second ragged."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5000, device=DEVICE) * 3
    logits[1, 77] = logits[1, 4500] = 50.0
    logits[2, :4000] = float("-inf")
    token, logp = sample_triton(logits, temperature, 11, t)
    want = (logits / (temperature or 1)).log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logp, want, atol=2e-6, rtol=1e-5)
    if not temperature:
        greedy, want = draw_token(logits, temperature, None)
        assert token.tolist() == greedy.tolist()
        assert token.tolist() == [int(logits[0].argmax()), 77, int(logits[2].argmax())]
        torch.testing.assert_close(logp, want, atol=2e-6, rtol=1e-5)
    # the control: log-probs at another temperature
    other = (logits / 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert (logp - other).abs().max() > 1e-3


@kernel
def test_distribution(t):
    """Draws follow the softmax, as draw_token's do; a row's does not depend on the rows after."""
    n = 200_000 if CUDA else 100
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5], device=DEVICE)
    p = (row / 0.5).softmax(0)
    token, _ = sample_triton(row.expand(n, 5), 0.5, 5, t)
    rng = torch.Generator(device=DEVICE).manual_seed(0)
    drawn, _ = draw_token(row.expand(200_000, 5), 0.5, rng)

    def shares(tokens):
        return tokens.bincount(minlength=5) / len(tokens)

    def bound(n):
        return 4 * (p * (1 - p) / n).sqrt()  # four standard deviations

    assert ((shares(drawn) - p).abs() < bound(200_000)).all()
    assert ((shares(token) - p).abs() < bound(n)).all()
    assert ((shares(token) - shares(drawn)).abs() < bound(n) + bound(200_000)).all()
    # the control: another temperature would be seen
    assert ((p - row.softmax(0)).abs() > bound(100)).any()
    few = n // 10
    assert torch.equal(sample_triton(row.expand(few, 5), 0.5, 5, t)[0], token[:few])


@kernel
def test_draws_depend_on_seed_step_and_row(t):
    """Among 4,000 equal logits two draws of their own are almost never the same."""
    logits = torch.zeros(6, 4000, device=DEVICE)

    def draw(seed, t, first=0):
        return sample_triton(logits[first:], 0.5, seed, t, first=first)[0]

    token = draw(5, t)
    assert torch.equal(draw(5, t, first=4), token[4:])  # as among all
    assert (sample_triton(logits[4:], 0.5, 5, t)[0] != token[4:]).all()  # control
    assert torch.equal(draw(5, t), token)
    assert (draw(6, t) != token).all() and (draw(5, t + 1) != token).all()
    assert len(token.unique()) == 6


@kernel
def test_far_tail():
    """With 150,000 equal logits the winner is decided among noises of 1e-5: no column is favoured
    by rounding. They are 13 parts of several steps each."""
    logits = torch.zeros(2000 if CUDA else 1, 150_000, device=DEVICE)
    token, logp = sample_triton(logits, 1.0, 3, torch.tensor(0, device=DEVICE))
    assert (logp + torch.tensor(150_000.0).log().item()).abs().max() < 1e-5
    if CUDA:
        assert len(token.unique()) > 1960
        assert abs(token.double().mean().item() - 75_000) < 4 * 43_301 / 2000 ** 0.5


@jit()
def noise_kernel(WORDS, OUT, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, gumbel(tl.load(WORDS + i)))


@kernel
def test_noise_of_every_end():
    """The noise of given random words against fp64: finite and right to 1e-5 for the smallest and
    the largest, where the formula changes, and in between."""
    ends = [torch.arange(2**k - 256, 2**k + 256) for k in (27, 31)]
    some = torch.randint(2**32, (2**12,), generator=torch.Generator().manual_seed(0))
    low, high = torch.arange(256), torch.arange(2**32 - 256, 2**32)
    words = torch.cat((low, high, *ends, some))
    out = torch.empty(len(words), device=DEVICE)
    noise_kernel[len(words) // 256,](words.to(DEVICE, torch.uint32), out, BLOCK=256)
    noise = out.cpu()
    want = -(-torch.log1p(-(words.double() + 0.5) * 2.0 ** -32)).log()
    assert (noise - want).abs().max() < 1e-5
    assert noise.min() >= -3.2 and noise.max() <= 22.9
    assert noise[0] == noise.max() and noise[511] == noise.min()
    # the control: u in fp32 is 1 for the largest 128 words, and no logit outweighs that noise
    u = (words.float() + 0.5) * 2.0 ** -32
    wrong = (-(-torch.log1p(-u)).log()).isinf().nonzero()[:, 0]
    assert (wrong >= 256 + 128).sum() == 128


@jit()
def duel_kernel(FIRST, SECOND, AT, x, BLOCK: tl.constexpr):
    # every lane draws one of two columns, of logits x and 0, with the words that it is given
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.float32)
    column = tl.zeros((BLOCK,), tl.int32)
    m, l, best, at, _ = consider(
        zero + x, column, tl.load(FIRST + i), zero - 3e38, zero, zero - 3e38, column, zero,
        False)
    m, l, best, at, _ = consider(zero, column + 1, tl.load(SECOND + i), m, l, best, at, zero, False)
    tl.store(AT + i, at)


@kernel
def test_no_impossible_token_wins(t):
    """A million draws, by the words most against it among them: what has probability 2e-22 never
    wins, what has a half does. So do the sampler and the formula that it replaces."""
    rng = torch.Generator().manual_seed(0)
    first, second = torch.randint(2**32, (2, 2**20), generator=rng)
    first[:256] = torch.arange(2**32 - 256, 2**32)  # least noise for the likely token
    second[:256] = torch.arange(256)  # the most for the other
    at = torch.empty(2**20, device=DEVICE, dtype=torch.int32)
    lanes = 4096 if CUDA else 2**17

    def losses(x):
        words = (w.to(DEVICE, torch.uint32) for w in (first, second))
        duel_kernel[2**20 // lanes,](*words, at, x, BLOCK=lanes)
        return int(at.sum())

    assert losses(50.0) == 0 and abs(losses(0.0) - 2**19) < 4 * 2**9

    n = 2**20 if CUDA else 4
    row = torch.zeros(16, device=DEVICE)
    row[0] = 50.0
    assert (sample_triton(row.expand(n, 16), 1.0, 7, t)[0] == 0).all()
    rng = torch.Generator(device=DEVICE).manual_seed(0)
    assert (draw_token(row.expand(2**20, 16), 1.0, rng)[0] == 0).all()
    row[0] = 0.0
    assert (sample_triton(row.expand(n, 16), 1.0, 7, t)[0] != 0).any()


@kernel
@pytest.mark.parametrize("wrong", (float("nan"), float("inf")))
def test_logits_that_are_not_finite_show(wrong, t):
    """Whatever token comes, its log-prob is no number, so that a rollout can refuse it."""
    logits = torch.randn(4, 5000, device=DEVICE)
    logits[1, 4321] = wrong
    logits[2, 0] = wrong
    for token, logp in (sample_triton(logits, 1.0, 3, t),
                        sample_triton(logits, 0.0, 3, t), draw_token(logits, 0.0, None)):
        assert logp.isfinite().tolist() == [True, False, False, True]
        assert ((token >= 0) & (token < 5000)).all()


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()
