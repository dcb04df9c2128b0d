"""
The learner's forward and backward pass, recorded as two CUDA graphs for each number of rows.

The idea. A pass through a small model launches thousands of kernels that a fast card finishes
sooner than Python asks for them. So rows are padded to one of a few numbers, and the passes of each
number are recorded once (fast/record.py) and replayed as two launches. Padded rows are copies of
row 0 that see themselves alone: they are finite where row 0 is, no row sees them, their hidden
states are dropped, and their gradient is 0.

It replaces model(ids, pos, attend, checkpointing) in grpo.replay, on a card, where gradients are
wanted and an optimizer of support/ collects them. Whether a pass is recorded depends on free
memory and on earlier passes, and must not change results, so a pass that is launched kernel by
kernel is padded alike and has the same bits. Passes above WORK are neither padded nor recorded.

1. A number of rows is recorded when it comes for the second time: the first pass compiles its
   kernels. Recording takes about as long as a pass. There are at most SIZES recordings of a model.
2. Addresses are fixed: rows are copied in, hidden states out, and gradients are added to tensors
   that stay, in place of those that the optimizer made. p.collected lists the tensors to whose
   .grad the gradient of a parameter p is added; if there is none, it is p's own. A model whose
   weights moved is recorded anew.
3. All recordings of a model share their memory, so a second pass before the first one's backward
   pass is launched kernel by kernel.
4. That memory is what would be left over: a quarter of the card must stay free even if as much
   again is taken as torch holds. Where less than a quarter is free later, when the sampler records,
   or where a recording does not fit, the model's recordings are dropped for good.
5. A parameter that is used outside too (a tied output matrix) gets a gradient from there and one
   from here; they meet in fp32, where the optimizer collects them, and not in autograd.

torch.cuda.make_graphed_callables does this for inputs of one size. It keeps a second set of
gradients, hands each to autograd by itself, which launches one kernel or more for each parameter,
and leaves it to its user that autograd's nodes of other passes do not reach into the recording.

Left out: the output matrix and the loss, whose kernels are large; passes without gradients; forward
hooks of modules, which run only while a pass is recorded.
"""
import weakref
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from fast.record import LEARNERS, a_quarter_is_free, capture, memory_ended

# parameters times rows, above which a pass is launched as it is: at 6e12 (Qwen2.5-0.5B, 12,256
# rows) an H200 worked 164 of 220 ms (results/host-h200.log), and padding costs up to an eighth
WORK = 1e13
SIZES = 16  # recordings of a model at most; 0: none


def recorded(model, ids, pos, until, attend_under, checkpointing=False):
    """What model(ids, pos, attend_under(until), checkpointing) returns, hidden states (N, C).

    ids, pos (N,) int64, until (L, nkv, N) int32; attend_under(until) -> attend, of any N. Its
    backward pass adds the gradients of all trained parameters to their .grad or to what an
    optimizer collects them in, and runs once. Raises RuntimeError where it would run twice or is
    asked for the gradients of some parameters alone."""
    def run(ids, pos, until):
        return model(ids, pos, attend_under(until), checkpointing)

    params = parameters_of(model)
    trained = [p for p in params if p.requires_grad]
    rows = padded(len(ids))
    pays = rows * sum(p.numel() for p in params) <= WORK
    if not (pays and on_card(ids) and torch.is_grad_enabled() and trained
            and all(hasattr(p, "collected") for p in trained)):
        return run(ids, pos, until)
    with torch.cuda.device_of(ids):
        inputs = pad(ids, pos, until, rows)
        learner = LEARNERS.get(model)
        signature = signature_of(model, params)
        if learner is None or learner.signature != signature:
            learner = LEARNERS[model] = Learner(trained, signature)
        one = learner.choose(model, run, inputs, n=len(ids), key=(rows, checkpointing))
        return Pass.apply(one, *trained)


def on_card(x):
    return x.is_cuda


def parameters_of(model):
    """Those of model.parameters() in another order, in a third of its time: a card waits."""
    found, modules = {}, [model]
    for module in modules:
        for p in module._parameters.values():
            found[id(p)] = p
        modules += module._modules.values()
    found.pop(id(None), None)  # of a layer without a bias
    return list(found.values())


@contextmanager
def nothing_recorded():
    """In here no recording is made."""
    global SIZES
    before, SIZES = SIZES, 0
    try:
        yield
    finally:
        SIZES = before


# ---- padding ----

def padded(n):
    """The number of rows to which n are padded: the next multiple of a sixteenth of the next power
    of two, and of 128, at least 256."""
    step = max(128, (1 << (n - 1).bit_length()) // 16)
    return max(256, -(-n // step) * step)


def pad(ids, pos, until, rows):
    """Add copies of row 0, each of which sees itself alone. -> ids, pos, until, of `rows` rows"""
    n = len(ids)
    own = torch.arange(n + 1, rows + 1, device=ids.device, dtype=torch.int32)
    ids, pos = (torch.cat((x, x[:1].expand(rows - n))) for x in (ids, pos))
    return ids, pos, torch.cat((until, own.expand(*until.shape[:2], -1)), 2)


# ---- one pass ----

class Pass(torch.autograd.Function):
    """The model between ids and hidden states as one step of autograd. Its parameters are inputs,
    so that autograd knows on what hidden states depend; it is told of no gradient of theirs, which
    go their own way (Eager, Replay)."""

    @staticmethod
    def forward(ctx, one, *trained):
        ctx.one = one
        return one.forward()                                    # (n, C)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_hidden):
        one, ctx.one = ctx.one, None
        if one is None:
            raise RuntimeError("a recorded pass has one backward pass; it has run")
        nodes = [node for node, _ in ctx.next_functions if node is not None]
        # torch raises RuntimeError here under torch.autograd.grad
        if not all(map(torch._C._will_engine_execute_node, nodes)):
            raise RuntimeError("a recorded pass gives the gradients of all parameters, "
                               "not of some alone")
        one.backward(d_hidden)
        return (None,) * len(ctx.needs_input_grad)


class Eager:
    """A pass that is launched kernel by kernel."""

    def __init__(self, learner, run, inputs, n):
        self.learner, self.run, self.inputs, self.n = learner, run, inputs, n

    def forward(self):
        with torch.enable_grad():
            self.hidden = self.run(*self.inputs)[:self.n]       # (n, C)
        return self.hidden.detach()

    def backward(self, d_hidden):
        attach(self.learner.grads)
        torch.autograd.backward(self.hidden, d_hidden)


class Replay:
    """A pass that is replayed. While one is alive its recording's memory is taken."""

    def __init__(self, recording, inputs, n):
        self.recording, self.inputs, self.n = recording, inputs, n

    def forward(self):
        for mine, x in zip(self.recording.inputs, self.inputs):
            mine.copy_(x)
        self.recording.ahead.replay()
        return self.recording.hidden[:self.n].clone()           # (n, C)

    def backward(self, d_hidden):
        attach(self.recording.grads)
        self.recording.d_hidden[:self.n] = d_hidden
        self.recording.d_hidden[self.n:] = 0
        self.recording.back.replay()


class Recording:
    """The two graphs of one number of rows and the tensors they read and write: inputs, hidden and
    d_hidden (rows, C), grads {tensor: its .grad}. last: a recording whose memory this one shares,
    or None."""

    def __init__(self, model, run, inputs, grads, last):
        self.inputs = inputs
        reached = {}  # parameters that get a gradient

        def forward():
            self.hidden = run(*self.inputs)

        def backward():
            torch.autograd.backward(self.hidden, self.d_hidden)

        with own_leaves(model, reached):
            self.ahead = capture(forward, last and last.ahead)
            self.d_hidden = torch.zeros_like(self.hidden)
            self.back = capture(backward, self.ahead)
        self.hidden = self.hidden.detach()  # what the forward pass kept goes
        self.grads = {x: grads[x] for x in sinks(reached)}


def sinks(params):
    """The tensors to whose .grad the gradients of parameters are added, as the keys of a dict."""
    return dict.fromkeys(x for p in params for x in p.collected or [p])


def attach(grads):
    """Before a backward pass: let the gradients so far be where recorded passes add to them."""
    fresh = []
    for x, grad in grads.items():
        if x.grad is None:
            fresh.append(grad)
        elif x.grad is not grad:
            grad.copy_(x.grad)
        x.grad = grad
    if fresh:
        torch._foreach_zero_(fresh)


@contextmanager
def own_leaves(model, reached):
    """In here the trained parameters are others over the same memory. Autograd has a node for each
    parameter, which belongs to the stream on which it was made first and lives as long as any pass
    does; a recording needs nodes of its own stream."""
    before = []
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.requires_grad:
                leaf = torch.nn.Parameter(p.detach())
                leaf.register_post_accumulate_grad_hook(partial(hand_on, p, reached))
                before.append((module, name, p))
                setattr(module, name, leaf)
    try:
        yield
    finally:
        for module, name, p in before:
            setattr(module, name, p)


def hand_on(p, reached, leaf):
    """In the middle of a backward pass: give the gradient of a leaf to its parameter, as autograd
    would."""
    reached[p] = True
    grad, leaf.grad = leaf.grad, None
    if p.grad is None:
        p.grad = grad
    else:
        p.grad.add_(grad)
    for hook in (p._post_accumulate_grad_hooks or {}).values():
        hook(p)


# ---- all passes of a model ----

class Learner:
    """The recordings of one model. signature: of the model as it was recorded. trained: its
    parameters with a gradient."""

    def __init__(self, trained, signature):
        self.trained, self.signature = trained, signature
        self.seen = set()    # (rows, checkpointing) of passes so far
        self.made = {}       # (rows, checkpointing) -> Recording
        self.grads = {}      # tensor -> its .grad, those of all recordings
        self.alive = nobody  # function: the last Replay, None once its backward pass has run
        self.dropped = False

    def choose(self, model, run, inputs, n, key):
        """-> Replay or Eager, by which a pass of n rows is made. key: rows with padding,
        checkpointing"""
        if self.alive() is None:
            if self.may_record(key):
                self.record(model, run, inputs, key)
            if key in self.made:
                one = Replay(self.made[key], inputs, n)
                self.alive = weakref.ref(one)
                return one
        self.seen.add(key)
        return Eager(self, run, inputs, n)

    def may_record(self, key):
        new = key in self.seen and key not in self.made and len(self.made) < SIZES
        return (new and not self.dropped and self.collects()
                and a_quarter_is_free(beyond=torch.cuda.memory_reserved()))

    def collects(self):
        """Are there no gradients but those that are collected?"""
        ours = sinks(self.trained)
        return all(p.grad is None or p in ours for p in self.trained)

    def record(self, model, run, inputs, key):
        """Make a recording; where it does not fit, none from now on."""
        before = {x: x.grad for x in sinks(self.trained)}
        grads = {x: self.grads[x] if x in self.grads else torch.zeros_like(x)
                 for x in before}
        last = next(iter(self.made.values()), None)
        try:
            for x, grad in grads.items():
                x.grad = grad  # its address is recorded
            made = Recording(model, run, inputs, grads=grads, last=last)
        except RuntimeError as e:
            if not memory_ended(e):
                raise
            self.drop()
            return
        finally:
            for x, grad in before.items():
                x.grad = grad
        self.made[key] = made
        self.grads.update(made.grads)

    def drop(self):
        """Give the memory back: of no use any more, it comes to torch."""
        self.made, self.grads, self.dropped = {}, {}, True


def nobody():
    return None


def pooled():
    """Bytes of the current card that recordings hold and torch does not count as allocated: those
    that a replay uses, which were allocated and freed as it was recorded."""
    graphs = [made.ahead for learner in LEARNERS.values()
              for made in learner.made.values()]
    pools = {tuple(graph.pool()) for graph in graphs}
    return sum(part["total_size"] - part["allocated_size"]
               for part in torch.cuda.memory_snapshot()
               if part["device"] == torch.cuda.current_device()
               and tuple(part["segment_pool_id"]) in pools)


def signature_of(model, params):
    """What a recording depends on: where weights lie, which are trained, where their gradients are
    collected."""
    return [model.rope_freq.data_ptr()] + [
        (p.data_ptr(), p.requires_grad, *map(id, getattr(p, "collected", ())))
        for p in params]
