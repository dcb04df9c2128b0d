"""
The sampler's kernels against the formula that they replace, rollout.draw_token.

They run on a GPU if there is one, else in Triton's interpreter, in a process of its own
(TRITON_INTERPRET must be set before the import).
"""
import os

import pytest
import torch

from fast.launch import triton
from fast.sampling import sample_triton
from rollout import draw_token

CUDA = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = "not interpreter"  # tests that run in the interpreter
DEVICE = "cuda" if CUDA else "cpu"
kernel = pytest.mark.skipif(
    triton is None or not (CUDA or INTERPRET), reason="needs a GPU or TRITON_INTERPRET=1")


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
    n = 200_000 if CUDA else 400
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
    assert ((p - row.softmax(0)).abs() > bound(400)).any()
    few = n // 10
    assert torch.equal(sample_triton(row.expand(few, 5), 0.5, 5, t)[0], token[:few])


@kernel
def test_draws_depend_on_seed_step_and_row(t):
    """Among 4,000 equal logits two draws of their own are almost never the same."""
    logits = torch.zeros(6, 4000, device=DEVICE)

    def draw(seed, t):
        return sample_triton(logits, 0.5, seed, t)[0]

    token = draw(5, t)
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


@pytest.mark.skipif(
    CUDA or INTERPRET or triton is None, reason="runs the kernels where there is no GPU")
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()
