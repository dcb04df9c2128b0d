"""
AdamW on fp32 weights that need not be there between two steps, a chunk of them at a time.

The idea. A bf16 weight is its fp32 master rounded, so the master is not held beside it: 16
bits are, which hold the difference. A step puts the masters of a chunk together, lets torch's
own fused kernel update them, and takes them apart again. That changes no bit of what AdamW does to
masters that stay.

    bits of the master = 65,536 x bits of the weight + low        -32,768 <= low <= 32,768

As a weight is rounded to nearest, ties to even, both ends occur, which is one value too many for 16
bits. The upper end, about one weight in 131,072, is noted in a list (ties).

The two moments of the gradient may be held in bf16 as well. They are computed in fp32 and rounded
up or down at random, by how near they lie, so that their mean is right: a step that changes one by
less than half of bf16's spacing, about 1/256 of it, would else be lost each time. Random numbers
follow from the seed and the number of the step, so a run that goes on draws what it would have
drawn.

Of weights in other types the masters are fp32 tensors and updated where they are.

Left out on purpose: gradients in 16 bits, moments in 8 bits, state in the host's memory or spread
over cards.

References (arXiv): AdamW 1711.05101, stochastic rounding 1502.02551, 16 more bits beside a
bf16 weight 2010.06192.
"""
import torch
from torch.optim.adamw import adamw

CHUNK = 2**26  # numbers of one; a step needs 7 more bytes for each, 16 with bf16 moments
BETA1, EPS = 0.9, 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch calls them


def round_to(held, x, rng):
    """held (n,) bf16 becomes x (n,) fp32, which is overwritten: rounded up or down at random, so
    that the mean is x."""
    bits = x.view(torch.int32)
    bits += torch.randint(2**16, bits.shape, generator=rng, dtype=torch.int32,
                          device=x.device)
    bits >>= 16
    held.view(torch.int16).copy_(bits)


def pieces_of(weights):
    """Weights one after the other, in lists of at most CHUNK numbers of one type; a larger one is
    cut into lists of its own. -> lists of (number of the weight, its first number, the end)"""
    found, size = [], CHUNK  # as if the last list were full
    for i, weight in enumerate(weights):
        n = weight.numel()
        other = i > 0 and weight.dtype != weights[i - 1].dtype
        if n > CHUNK:
            found += [[(i, first, min(first + CHUNK, n))]
                      for first in range(0, n, CHUNK)]
            size = CHUNK
        elif size + n > CHUNK or other:
            found.append([(i, 0, n)])
            size = n
        else:
            found[-1].append((i, 0, n))
            size += n
    return found


class Chunk:
    """Some of the weights, which stay where they are, and what AdamW knows of them.

    pieces: see pieces_of. kind: dtype of the moments."""

    def __init__(self, pieces, weights, kind):
        self.pieces = pieces
        self.sizes = [end - first for _, first, end in pieces]
        self.weights = self.cut(weights)
        like, n = self.weights[0], sum(self.sizes)
        self.halved = like.dtype == torch.bfloat16
        self.moments = torch.zeros(2, n, dtype=kind, device=like.device)
        self.pairs = [x.split(self.sizes) for x in self.moments]
        # steps so far of each piece; AdamW corrects its bias by them
        self.steps = torch.zeros(len(pieces), device=like.device).unbind()
        if self.halved:
            self.high = [x.view(torch.int16) for x in self.weights]
            self.low = torch.zeros(n, dtype=torch.int16, device=like.device)
            self.ties = torch.zeros(0, dtype=torch.int64, device=like.device)

    def cut(self, tensors):
        """The pieces of these, one for each weight, (n,) each."""
        return [tensors[i].detach().view(-1)[first:end]
                for i, first, end in self.pieces]

    def put_together(self):
        """The masters of bf16 weights, made anew: (n,) fp32."""
        bits = self.low.int()
        bits.add_(torch.cat(self.high), alpha=2**16)
        if len(self.ties):
            bits[self.ties] += 2**16
        return bits.view(torch.float32)

    def take_apart(self, masters):
        """Let the masters of bf16 weights be these (n,) fp32, which are overwritten."""
        rounded = masters.to(torch.bfloat16)
        torch._foreach_copy_(self.weights, rounded.split(self.sizes))
        bits = masters.view(torch.int32)
        bits.sub_(rounded.view(torch.int16), alpha=2**16)
        self.ties = (bits == 2**15).nonzero()[:, 0]
        if len(self.ties):
            bits[self.ties] -= 2**16
        self.low.copy_(bits)

    def step(self, sums, rng, **how):
        """One step of those weights that have a gradient. how: see torch's adamw."""
        grads = [sums[i].grad for i, _, _ in self.pieces]
        there = [k for k, grad in enumerate(grads) if grad is not None]
        if not there:
            return
        grads = [grads[k].view(-1) for k in there]
        if len(grads) == 1:  # perhaps of a weight that is cut
            _, first, end = self.pieces[there[0]]
            grads = [grads[0][first:end]]
        params, pairs, moments = self.weights, self.pairs, self.moments
        if self.halved:
            masters = self.put_together()
            params = masters.split(self.sizes)
        if rng is not None:
            moments = self.moments.float()
            pairs = [x.split(self.sizes) for x in moments]
        params, first, second, steps = (
            [x[k] for k in there] for x in (params, *pairs, self.steps))
        adamw(params, grads, exp_avgs=first, exp_avg_sqs=second, max_exp_avg_sqs=[],
              state_steps=steps, fused=True, amsgrad=False, maximize=False, **how)
        if self.halved:
            self.take_apart(masters)
        if rng is not None:
            for held, x in zip(self.moments, moments):
                round_to(held, x, rng)


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
            self.chunks.append(Chunk(pieces, weights, self.kinds[i]))

    @torch.no_grad()
    def step(self, lr):
        if self.rng is not None:
            self.rng.manual_seed(2**62 + self.seed * 1_000_003 + self.done)
        self.done += 1
        for chunk in self.chunks:
            chunk.step(self.sums, self.rng, lr=lr, **self.how)

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
        made = self.whole([chunk for chunk in self.chunks if chunk.halved],
                          lambda chunk: chunk.put_together().split(chunk.sizes))
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
            if chunk.halved:
                # a copy: of one piece, cat's may be the file's own
                whole = torch.empty(len(chunk.low), device=chunk.low.device)
                chunk.take_apart(whole.copy_(torch.cat(parts)))
            else:
                for weight, x in zip(chunk.weights, parts):
                    weight.copy_(x)
