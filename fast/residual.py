"""
What is added to the residual stream, in one pass and, for long inputs, a slice at a time.

The idea. x + linear(y) writes the product, then reads it again, where a matrix product can add to x
as it is written. So a layer returns a Product, and x + Product(linear, y) is one call; without
gradients its result goes into x itself. The inner width of an MLP is the largest around: of a long
input it need not exist for all rows at once.

It replaces linear(y) in model.Block's x = x + f(norm(x)).
"""
import torch
from torch.utils.checkpoint import checkpoint

# of a slice without gradients: at least so many rows, and more where x is narrow, as a card would
# wait for many launches. The inner width of an MLP is 5 to 12 times that of x
ROWS = 2048
BYTES = 10 * 2**20  # of x


class Product:
    """linear(y) of y (N, M), computed when it is added: x (N, C) + Product(linear, y) -> (N, C)."""

    def __init__(self, linear, y):
        self.linear = linear
        self.y = y

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Python's x + product comes here, at a tenth of the time that __radd__ takes."""
        adds = function in (torch.Tensor.add, torch.Tensor.__add__)
        if not adds or not isinstance(args[1], cls):
            return NotImplemented
        x, product = args
        linear = product.linear
        if linear.bias is not None:
            x = x + linear.bias
        if torch.is_grad_enabled():
            return torch.addmm(x, product.y, linear.weight.t())
        return x.addmm_(product.y, linear.weight.t())


def recomputed(f, *inputs):
    """f(*inputs), which keeps its inputs for the backward pass and is computed once more in it."""
    # no random numbers are drawn here
    return checkpoint(f, *inputs, use_reentrant=False, preserve_rng_state=False)


def in_slices(f, x):
    """f(x) for an f that treats rows x (N, C) -> (N, C) alone, some of them at a time. Without
    gradients the result goes into x.

    With gradients a slice of 8 * ROWS is computed once more in the backward pass."""
    if torch.is_grad_enabled():
        if len(x) <= 8 * ROWS:
            return f(x)
        return torch.cat([recomputed(f, some) for some in x.split(8 * ROWS)])
    rows = max(ROWS, BYTES // (x.element_size() * x.shape[1]))
    if len(x) <= rows:
        return f(x)
    for some in x.split(rows):
        some.copy_(f(some))  # nothing to copy where x + Product wrote into these rows
    return x
