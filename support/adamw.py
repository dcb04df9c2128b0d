"""
AdamW on fp32 weights that need not be there between two steps, a chunk of them at a time.

The idea. A bf16 weight is its fp32 master rounded, so the master is not held beside it: 16 bits
are, by which it differs from the weight. A step puts the masters of a chunk together, lets torch's
own fused kernel update them, and takes them apart again. That changes no bit of what AdamW does to
masters that stay.

    bits of the master = 65,536 x bits of the weight + low        -32,768 <= low <= 32,768

As a weight is rounded to nearest, ties to even, both ends occur, which is one value too many for 16
bits. The upper end, about one weight in 131,072, is noted in a list (ties).

The two moments of the gradient may be held in bf16 as well. They are computed in fp32 and rounded
up or down at random, by how near they lie, so that their mean is right: a step that changes one by
less than half of bf16's spacing (1/256) would else be lost each time. Random numbers follow from
the seed and the number of the step, so a run that goes on draws what it would have drawn.

Of weights in other types the masters are fp32 tensors and updated where they are.

Left out on purpose: gradients in 16 bits, moments in 8 bits, state in the host's memory or spread
over cards.

References (arXiv): AdamW 1711.05101, stochastic rounding 1502.02551, 16 more bits beside a
bf16 weight 2010.06192.
"""
import torch
from torch.optim.adamw import adamw

CHUNK = 2**25  # numbers: a step takes up to 18 bytes of each beside what is held
BETA1, EPS = 0.9, 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch calls them


def to_bfloat16(x, rng):
    """x (n,) fp32, which is overwritten, rounded up or down at random. -> (n,) bf16 with mean x"""
    bits = x.view(torch.int32)
    bits += torch.randint(2**16, bits.shape, generator=rng, dtype=torch.int32,
                          device=x.device)
    bits >>= 16
    return bits.to(torch.int16).view(torch.bfloat16)


def pieces_of(weights):
    """Weights one after the other, in lists of at most CHUNK numbers of one type; a larger one is
    cut. -> lists of (number of the weight, its first number, the end)"""
    found, size = [], CHUNK
    for i, weight in enumerate(weights):
        n = weight.numel()
        before = weights[i - 1].dtype if i else None
        if weight.dtype != before or size + n > CHUNK:
            size = CHUNK
        for first in range(0, n, CHUNK):
            end = min(first + CHUNK, n)
            if size + end - first > CHUNK:
                found.append([])
                size = 0
            found[-1].append((i, first, end))
            size += end - first
    return found


class Chunk:
    """Some of the weights and what AdamW knows of them. pieces: see pieces_of. like: a weight.
    kind: dtype of the moments."""

    def __init__(self, pieces, like, kind):
        self.pieces = pieces
        self.sizes = [end - first for _, first, end in pieces]
        n, device = sum(self.sizes), like.device
        self.split = like.dtype == torch.bfloat16
        self.moments = torch.zeros(2, n, dtype=kind, device=device)
        # steps so far of each piece; AdamW corrects its bias by them
        self.steps = list(torch.zeros(len(pieces), device=device).unbind())
        if self.split:
            self.low = torch.zeros(n, dtype=torch.int16, device=device)
            self.ties = torch.zeros(0, dtype=torch.int64, device=device)

    def cut(self, tensors):
        """The pieces of these, one for each weight, (n,) each; None of None."""
        flat = [None if x is None else x.detach().view(-1) for x in tensors]
        return [flat[i] if flat[i] is None or end - first == len(flat[i])
                else flat[i][first:end] for i, first, end in self.pieces]

    def join(self, weights):
        """The masters of bf16 weights, made anew: (n,) fp32."""
        high = torch.cat([x.view(torch.int16) for x in self.cut(weights)])
        bits = self.low.int()
        bits.add_(high, alpha=2**16)
        bits[self.ties] += 2**16
        return bits.view(torch.float32)

    def part(self, masters, weights):
        """Let the masters of bf16 weights be these (n,) fp32, which are overwritten."""
        rounded = masters.to(torch.bfloat16)
        torch._foreach_copy_(self.cut(weights), rounded.split(self.sizes))
        bits = masters.view(torch.int32)
        bits.sub_(rounded.view(torch.int16), alpha=2**16)
        self.ties = (bits == 2**15).nonzero()[:, 0]
        bits[self.ties] -= 2**16
        self.low.copy_(bits)

    def step(self, weights, sums, rng, **how):
        """One step of those weights that have a gradient. how: see torch's adamw."""
        grads = self.cut([x.grad for x in sums])
        there = [i for i, grad in enumerate(grads) if grad is not None]
        if not there:
            return
        masters = self.join(weights) if self.split else None
        moments = self.moments if rng is None else self.moments.float()
        params = masters.split(self.sizes) if self.split else self.cut(weights)
        first, second = (x.split(self.sizes) for x in moments)
        params, grads, first, second, steps = (
            [x[i] for i in there] for x in (params, grads, first, second, self.steps))
        adamw(params, grads, exp_avgs=first, exp_avg_sqs=second, max_exp_avg_sqs=[],
              state_steps=steps, fused=True, amsgrad=False, maximize=False, **how)
        if self.split:
            self.part(masters, weights)
        if rng is not None:
            for held, x in zip(self.moments, moments):
                held.copy_(to_bfloat16(x, rng))


class AdamW:
    """As torch's, of weights that may be the upper halves of their masters.

    weights: contiguous; those in bf16 are their masters rounded, others are masters themselves.
    sums: tensors of their shapes, whose .grad are the gradients in the masters' type. config: has
    beta2, weight_decay, moments (float32 or bfloat16) and seed."""

    def __init__(self, weights, sums, config):
        self.weights = weights
        self.sums = sums
        self.how = dict(beta1=BETA1, beta2=config.beta2, eps=EPS,
                        weight_decay=config.weight_decay)
        self.seed = config.seed
        self.done = 0  # steps
        self.rng = None
        self.kinds = [x.dtype for x in sums]  # of each weight's moments
        if config.moments == "bfloat16":
            self.rng = torch.Generator(weights[0].device)
            self.kinds = [torch.bfloat16] * len(weights)
        self.chunks = []
        for pieces in pieces_of(weights):
            i, _, _ = pieces[0]
            self.chunks.append(Chunk(pieces, weights[i], self.kinds[i]))

    @torch.no_grad()
    def step(self, lr):
        if self.rng is not None:
            self.rng.manual_seed(2**62 + self.seed * 1_000_003 + self.done)
        self.done += 1
        for chunk in self.chunks:
            chunk.step(self.weights, self.sums, self.rng, lr=lr, **self.how)

    def whole(self, chunks, parts):
        """parts: function of a chunk -> a tensor (n,) of each piece. -> of each weight in these
        chunks, one after the other, what its pieces are together, in its shape"""
        found = []
        for chunk in chunks:
            for (i, _, end), x in zip(chunk.pieces, parts(chunk)):
                found.append(x)
                if end == self.weights[i].numel():
                    if len(found) > 1:
                        x = torch.cat(found)
                    yield x.view(self.weights[i].shape)
                    found = []

    @torch.no_grad()
    def masters(self):
        """Of each weight its master, one after the other; that of a bf16 weight is made when it is
        asked for."""
        made = self.whole([chunk for chunk in self.chunks if chunk.split],
                          lambda chunk: chunk.join(self.weights).split(chunk.sizes))
        for weight in self.weights:
            yield next(made) if weight.dtype == torch.bfloat16 else weight.detach()

    def moments(self):
        """Of each weight both moments, one after the other."""
        return zip(*(self.whole(self.chunks, lambda chunk, k=k:
                                chunk.moments[k].split(chunk.sizes)) for k in (0, 1)))

    def state(self):
        """What a checkpoint keeps, as torch's state_dict has it: nothing of a weight that had no
        gradient yet."""
        steps = {i: step for chunk in self.chunks for (i, _, _), step
                 in zip(chunk.pieces, torch.stack(chunk.steps).cpu())}
        state = {i: dict(step=steps[i], exp_avg=first, exp_avg_sq=second)
                 for i, (first, second) in enumerate(self.moments()) if steps[i] > 0}
        return dict(state=state, done=self.done)

    def check(self, state):
        """Raise ValueError where this is no state of such weights, or of moments of another type.
        """
        done = state.get("done", 0)  # torch's has none
        if type(done) is not int or not 0 <= done < 2**40:
            raise ValueError(f"its optimizer cannot have done {done!s:.50} steps")
        for i, weight in enumerate(self.weights):
            saved = state["state"].get(i, {})
            shapes = {name: x.shape for name, x in saved.items()}
            want = dict(step=(), exp_avg=weight.shape, exp_avg_sq=weight.shape)
            if shapes not in ({}, want):
                raise ValueError("its optimizer state does not fit the model")
            for name in MOMENTS[:len(saved)]:
                kind = saved[name].dtype
                if kind != self.kinds[i]:
                    kind, now = (str(x).removeprefix("torch.")
                                 for x in (kind, self.kinds[i]))
                    raise ValueError(
                        f"its moments are {kind}, not {now}: a run keeps the type that "
                        f"it began with, set --moments={kind}")

    @torch.no_grad()
    def load(self, state, masters):
        """state: what `state` returned, or torch's, after `check`. masters: fp32, of each weight.
        """
        self.done = state.get("done", 0)
        for chunk in self.chunks:
            for name, held in zip(MOMENTS, chunk.moments.zero_()):
                for (i, first, end), x in zip(chunk.pieces, held.split(chunk.sizes)):
                    if state["state"].get(i):
                        x.copy_(state["state"][i][name].reshape(-1)[first:end])
            for (i, _, _), step in zip(chunk.pieces, chunk.steps):
                step.fill_(float(state["state"].get(i, {}).get("step", 0)))
            parts = chunk.cut(masters)
            if chunk.split:
                whole = torch.cat(parts).to(chunk.low.device, torch.float32)
                chunk.part(whole, self.weights)
            else:
                for weight, x in zip(chunk.cut(self.weights), parts):
                    weight.copy_(x)
