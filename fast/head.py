"""
The output matrix: logits, and what is read off them, without holding (rows, vocabulary) at once.

The idea. Of a row of logits the learner needs a few numbers: the log-prob of one token
under each policy and perhaps the KL between two. `from_logits` computes them from logits;
`head_rows` does so from hidden states, some rows at a time, and computes each chunk's
logits again in the backward pass.

Left out: sharding the vocabulary over cards, fusing product and softmax into one kernel.
"""
import torch
from torch.autograd.function import once_differentiable

from fast.launch import widen

# bytes of fp32 logits in one chunk, all policies together; about five tensors of this size live at
# once in the backward pass (5.3 measured)
LOGIT_BYTES = 256 * 2**20


# ---- products ----

def matmul32(a, b):
    """a (..., n, c) @ b (..., c, m) -> (..., n, m) fp32 (fp64 of fp64); also under torch.vmap.

    bf16 inputs keep the product's fp32 accumulator where the device offers it (CUDA) and
    are upcast elsewhere: log-probs in the tail move by 0.1 nat if logits are rounded, and
    sampler and learner round differently. Not differentiable under vmap, nor for bf16 on
    CUDA (see Head)."""
    if any(map(torch._C._functorch.is_batchedtensor, (a, b))):
        return BatchedMatmul32.apply(a, b)
    if not keeps_accumulator(a):
        return widen(a) @ widen(b)
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    out = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
    return out.view(*a.shape[:-1], b.shape[-1])


def keeps_accumulator(x):
    """Whether torch.mm, bmm and addmm take out_dtype=torch.float32 for x."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class BatchedMatmul32(torch.autograd.Function):
    """matmul32 under torch.vmap, for which torch.bmm with out_dtype has no rule of its own."""

    @staticmethod
    def forward(a, b):
        return matmul32(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, a, b):
        """in_dims: where the batch dimension is, which moves to the front; None if all share it."""
        batched = []
        for x, dim in zip((a, b), in_dims):
            if dim is None:
                batched.append(x.expand(info.batch_size, *x.shape))
            else:
                batched.append(x.movedim(dim, 0))
        return matmul32(*batched), 0  # batched once more if another vmap is outside


def add_matmul32(total, a, b):
    """total (n, m) fp32 += a (n, c) @ b (c, m), which is rounded to fp32 only."""
    if keeps_accumulator(a):  # within the product, for total may be a gigabyte
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += matmul32(a, b)


class Head(torch.autograd.Function):
    """hidden (n, C), weight (V, C) -> fp32 logits (n, V), for few rows; gradients as the inputs."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return matmul32(hidden, weight.t())                     # (n, V)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)                            # (n, V)
        d_weight = grad.t() @ hidden if ctx.needs_input_grad[1] else None
        return grad @ weight, d_weight


def leave_out(logits, absent):
    """logits (n, V), in place: ids that are no token (absent (m,) int64, or None) get so little
    that their probability is 0, and their log-prob still a number."""
    if absent is None or not len(absent):
        return logits
    return logits.index_fill_(1, absent, -1e30)


# ---- what is read off log-probs over the whole vocabulary, (n, V) -> (n,) ----

def log_probs(logits, temperature=1.0):
    """Log-probs (n, V) of logits (n, V); no copy is made where the temperature is 1."""
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)


def kl_rows(student_logp, teacher_logp):
    """KL(student || teacher) of each row."""
    return (student_logp.exp() * (student_logp - teacher_logp)).sum(-1)


def entropy_rows(logp):
    """Entropy of each row, in nats."""
    return -(logp.exp() * logp).sum(-1)


def acceptance_rows(logp_a, logp_b):
    """Sum of min(p_a, p_b): how often speculative decoding would accept one policy's token
    for the other's (2606.08446)."""
    return torch.minimum(logp_a, logp_b).exp().sum(-1)


def from_logits(logits, targets, temperature=1.0, student=None, stats=False,
                teacher=None):
    """What `head_rows` returns, from logits: a list of (n, V), one per policy; teacher (n, V)."""
    logp = [log_probs(x, temperature) for x in logits]          # (n, V) each
    out = {"logp": torch.stack([x.gather(-1, targets[:, None])[:, 0] for x in logp])}
    if student is not None:
        if teacher is None:
            teacher_logp = logp[1 - student]
        else:
            teacher_logp = log_probs(teacher, temperature)
        out["kl"] = kl_rows(logp[student], teacher_logp.detach())
    if stats:
        out["entropy"] = entropy_rows(logp[-1])
    if stats and len(logp) == 2:
        out["accept"] = acceptance_rows(*logp)
    return out


# ---- the same in chunks of rows ----

def head_rows(weight, hidden, targets, temperature=1.0, student=None, stats=False,
              absent=None, teacher=None):
    """Score rows under one or two policies that share an output matrix; (n, V) never exists.

    weight (V, C); hidden: a list of (n, C), one per policy; targets (n,) int64; absent: see
    leave_out; teacher: the output matrix (V, C) and hidden (n, C) of another model, both without
    gradients -> dict of fp32:
        "logp"     (policies, n): log-probs of targets at the temperature, differentiable
        "kl"       (n,): with student, an index into hidden: KL(student || teacher, detached), the
                   other policy if no teacher is given
        "entropy"  (n,): with stats: of the last policy, never differentiable
        "accept"   (n,): with stats and two policies: see acceptance_rows; never differentiable"""
    out = HeadRows.apply(
        weight, targets, temperature, student, stats, absent, teacher, *hidden)
    return {name: x for name, x in zip(HeadRows.NAMES, out) if x is not None}


def chunks(weight, hidden, teacher=None):
    """Slices of rows whose logits, of all policies and the teacher, take LOGIT_BYTES together; at
    least one row."""
    copies = len(hidden) + (teacher is not None)
    row_bytes = widen(weight[:0]).element_size() * len(weight) * copies
    step = max(1, LOGIT_BYTES // row_bytes)
    return [slice(i, i + step) for i in range(0, len(hidden[0]), step)]


def chunk_logits(weight, hidden, chunk, absent):
    """Logits (chunk, V) of a slice of rows."""
    return leave_out(matmul32(hidden[chunk], weight.t()), absent)


def teacher_logits(teacher, chunk, absent):
    """The same of the teacher, None if there is none."""
    return None if teacher is None else chunk_logits(*teacher, chunk, absent)


class HeadRows(torch.autograd.Function):
    """`from_logits` of a chunk at a time, without a graph; the backward pass repeats it with one.

    The weight's gradient is summed over chunks in fp32 and cast once: a bf16 sum would
    swallow the later chunks."""
    NAMES = ("logp", "kl", "entropy", "accept")

    @staticmethod
    def forward(ctx, weight, targets, temperature, student, stats, absent, teacher,
                *hidden):
        ctx.temperature = temperature
        ctx.student = student
        ctx.absent = absent
        ctx.teacher = teacher
        ctx.save_for_backward(weight, targets, *hidden)
        found = []
        for chunk in chunks(weight, hidden, teacher):
            # no name for the logits: they must be gone before the next chunk's
            found.append(from_logits(
                [chunk_logits(weight, h, chunk, absent) for h in hidden],
                targets[chunk], temperature=temperature, student=student, stats=stats,
                teacher=teacher_logits(teacher, chunk, absent)))
        out = {name: torch.cat([x[name] for x in found], dim=-1) for name in found[0]}
        plain = [out[name] for name in ("entropy", "accept") if name in out]
        ctx.mark_non_differentiable(*plain)
        return tuple(out.get(name) for name in HeadRows.NAMES)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp, d_kl, d_entropy, d_accept):
        weight, targets, *hidden = ctx.saved_tensors
        d_hidden = [torch.empty_like(h) for h in hidden]
        d_weight = None  # of a frozen weight
        if ctx.needs_input_grad[0]:
            d_weight = torch.zeros_like(weight, dtype=d_logp.dtype)  # (V, C) fp32
        for chunk in chunks(weight, hidden, ctx.teacher):
            logits = [chunk_logits(weight, h, chunk, ctx.absent).requires_grad_()
                      for h in hidden]                          # (chunk, V)
            with torch.enable_grad():
                out = from_logits(
                    logits, targets[chunk], temperature=ctx.temperature,
                    student=ctx.student,
                    teacher=teacher_logits(ctx.teacher, chunk, ctx.absent))
            grads = [d_logp[:, chunk]]
            if ctx.student is not None:
                grads.append(d_kl[chunk])
            d_logits = torch.autograd.grad(list(out.values()), logits, grads)
            for h, d_h, d in zip(hidden, d_hidden, d_logits):
                d = d.to(weight.dtype)           # (chunk, V), 0 where a token is absent
                d_h[chunk] = d @ weight
                if d_weight is not None:
                    add_matmul32(d_weight, d.t(), h[chunk])
            del logits, out, d_logits, d  # gone before the next chunk's
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_weight, None, None, None, None, None, None, *d_hidden
