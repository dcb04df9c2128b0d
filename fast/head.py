"""
The output matrix.
"""
import torch
from torch.autograd.function import once_differentiable

from fast.launch import widen

LOGIT_BYTES = 256 * 2**20  # fp32 logits of one chunk, all policies together; five tensors of this size live at once (measured 5.3)


def matmul32(a, b):
    """a (..., n, c) @ b (..., c, m) -> fp32 (fp64 of fp64), without rounding the product to bf16 on the way.

    bf16 inputs keep their fp32 accumulator where the device offers that (CUDA), and are upcast elsewhere. Log-probs in
    the tail move by 0.1 nat if the head's output is rounded, and sampler and learner round differently. Not differentiable
    on CUDA bf16: `Transformer.logits` wraps it."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if a.dim() == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        out = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
        return out.view(*a.shape[:-1], b.shape[-1])
    return widen(a) @ widen(b)


class Head(torch.autograd.Function):
    """hidden (n, C), weight (V, C) -> fp32 logits (n, V); gradients in the inputs' dtype."""
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return matmul32(hidden, weight.t())

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)  # (n, V)
        return grad @ weight, grad.t() @ hidden


def kl_rows(student_logp, teacher_logp):
    """KL(student || teacher) of each row, (n,), from log-probs (n, V) over the whole vocabulary."""
    return (student_logp.exp() * (student_logp - teacher_logp)).sum(-1)


def add_product(total, a, b):
    """total (n, m) fp32 += a (n, c) @ b (c, m), rounded to fp32 only; on CUDA within the product, as total may be a gigabyte."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += matmul32(a, b)


class HeadRows(torch.autograd.Function):
    """fn([hidden_i @ weight.T (n, V)], targets (n,)) -> (k, n), for any n without ever holding (n, V).

    Rows are processed in chunks of LOGIT_BYTES of logits, without a graph in the forward pass; the backward pass runs fn on
    each chunk again, with one. weight (V, C), hidden_i (n, C). The weight's gradient is summed over chunks in fp32 and cast
    once: a bf16 sum would swallow the later chunks. If fn returns fewer rows with gradients enabled, the missing ones at
    the end are taken as constants."""

    @staticmethod
    def chunks(weight, hidden):
        step = max(1, LOGIT_BYTES // (widen(weight[:0]).element_size() * len(weight) * len(hidden)))
        return [slice(i, i + step) for i in range(0, len(hidden[0]), step)]

    @staticmethod
    def forward(ctx, fn, targets, weight, *hidden):
        ctx.fn = fn
        ctx.save_for_backward(targets, weight, *hidden)
        return torch.cat([fn([matmul32(h[rows], weight.t()) for h in hidden], targets[rows])
                          for rows in HeadRows.chunks(weight, hidden)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        targets, weight, *hidden = ctx.saved_tensors
        d_hidden = [torch.empty_like(h) for h in hidden]
        d_weight = torch.zeros_like(weight, dtype=grad.dtype)  # (V, C) fp32
        for rows in HeadRows.chunks(weight, hidden):
            logits = [matmul32(h[rows], weight.t()).requires_grad_() for h in hidden]  # (chunk, V) each
            with torch.enable_grad():
                out = ctx.fn(logits, targets[rows])
            for h, d_h, d in zip(hidden, d_hidden, torch.autograd.grad(out, logits, grad[:len(out), rows])):
                d = d.to(weight.dtype)  # (chunk, V)
                d_h[rows] = d @ weight
                add_product(d_weight, d.t(), h[rows])
        return None, None, d_weight.to(weight.dtype), *d_hidden


def score(logits, targets, temperature, student, stats):
    """Rows that replay returns, (k, n), from logits (n, V) per policy: log-probs of targets (n,), KL(student || other), stats."""
    logp = [(x if temperature == 1 else x / temperature).log_softmax(-1) for x in logits]
    out = [x.gather(-1, targets[:, None])[:, 0] for x in logp]
    if student is not None:
        out.append(kl_rows(logp[student], logp[1 - student].detach()))
    if stats and not torch.is_grad_enabled():  # numbers to print: the backward pass need not compute them again
        out.append(-(logp[-1].exp() * logp[-1]).sum(-1))
        if len(logp) == 2:
            out.append(torch.minimum(*logp).exp().sum(-1))
    return torch.stack(out)
