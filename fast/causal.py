"""
Attention of whole prompts by cuDNN's kernel, where it is faster than ours.

The idea. While prompts are read nothing is evicted and nothing is learnt: each prompt of a pack is
a plain causal sequence. For those cuDNN's kernel, which torch calls, is faster than the packed one,
which can do more. It replaces shadow_attn.shadow_attention there, whose formula the tests hold it
against; rounding differs in the last bit of bf16.

cuDNN plans anew for each length that it has not seen, which costs the host some milliseconds, and
it takes a call a prompt. So short prompts stay with our kernel, as do cards before Hopper, float32
and heads that cuDNN does not know.

Left out: gradients, masks, cuDNN's own packed sequences, which torch does not offer.
Reference: torch.nn.functional.scaled_dot_product_attention.
"""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG = 2048  # tokens of the shortest prompt from which it pays; math.inf: never
BACKEND = SDPBackend.CUDNN_ATTENTION


def serves(q, sizes):
    """Is cuDNN's kernel the faster one for prompts of these `sizes`, q (N, nh, hs)?"""
    if not q.is_cuda or min(sizes) < LONG or torch.is_grad_enabled():
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in (64, 128):
        return False
    return torch.cuda.get_device_capability(q.device)[0] == 9


def causal_attention(q, k, v, sizes):
    """Attention of prompts of `sizes` tokens, one after the other, each causal for itself.
    The result goes over q, which is returned.

    q (N, nh, hs), k and v (N, nkv, hs), N the sum of sizes, columns next to each other; no gradient
    is recorded. Raises RuntimeError where torch cannot use cuDNN for it."""
    row = 0
    for size in sizes:
        rows = slice(row, row + size)
        # (1, heads, size, hs)
        one = [x[None, rows].transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel(BACKEND):  # never another kernel unsaid
            out = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        q[rows] = out[0].transpose(0, 1)
        row = rows.stop
    return q
