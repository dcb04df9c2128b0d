"""
fp32 master weights for a model that may hold bf16 or fp16.

The idea. Sampler and learner read one set of (bf16) weights, so the policy that sampled is
the policy that learns. The optimizer owns fp32 weights, the masters, and rounds them to the
model's type after each step: an update of 1e-6 is below bf16's spacing, so it must be summed
up in fp32. Gradients of micro-batches add up in fp32 too. Of bf16 weights the masters are made
for a step alone (adamw.py).

fp16 has three more bits than bf16, so sampler and learner are nearer to each other (2510.26788),
but ends at 65,504 and 6e-8. Gradients lie near its lower end: the loss is multiplied by a scale,
a power of two, and the masters' gradients are divided by it. Where a gradient is infinite the
scale was too large: it is halved, and the step left out. After many good steps it is doubled.
Loss scaling: 1710.03740.
"""
import math
import weakref
from functools import partial

import torch

from support.adamw import AdamW
from support.parallel import sum_gradients

FIRST_SCALE = 2.0**16  # of the loss, where weights are fp16
LARGEST_SCALE = 2.0**24
GOOD_STEPS = 200       # with finite gradients, after which the scale is doubled
BEYOND = ("above 65,504, the largest float16 (try --dtype=bfloat16 or "
          "--dtype=float32)")


def master_of(p):
    """What takes the sum of gradients of p in fp32, and of fp16 holds p's numbers too."""
    if p.dtype == torch.bfloat16:
        return torch.zeros((), device=p.device).expand(p.shape).requires_grad_()
    return p.detach().float().requires_grad_()


def first_scale(params):
    """Of the loss where a parameter is fp16, else None."""
    half = any(p.dtype == torch.float16 for p in params)
    return FIRST_SCALE if half else None


class Masters:
    """Sums gradients in fp32 and steps AdamW on fp32 masters of a model's parameters; those of an
    fp32 model are the parameters.

    masters: tensors of their shapes whose .grad is the sum of gradients. Those of bf16 parameters
    hold no numbers: `whole` makes them. config: see AdamW. value: PPO's value head, an fp32 module
    that is trained and saved with the model's weights. halfway: have some updates of a rollout
    changed the weights, and more may follow? They are not saved then. A step sets it, and who
    asks for steps sets it back after the last. scale: of the loss, None but for fp16; good: finite
    steps since it was last changed. scaling: of fp16, what the log says of the last step."""

    halfway = False
    good = 0
    scaling = {}

    def __init__(self, model, config, value=None):
        self.params = list(model.parameters())
        if value is not None:
            self.params += value.parameters()
        self.masters = [p if p.dtype in (torch.float32, torch.float64)  # of tests
                        else master_of(p) for p in self.params]
        weights = [p if p.dtype == torch.bfloat16 else master for p, master
                   in zip(self.params, self.masters)]
        self.optimizer = AdamW(weights, self.masters, config)
        self.scale = first_scale(self.params)
        for p, master in zip(self.params, self.masters):
            # for fast/recorded.py: whose .grad gets its gradient; none: its own
            p.collected = [] if p is master else [master]
        self.collect_by(dict(self.copies()))

    def copies(self):
        """(parameter, master) where they are two tensors"""
        pairs = zip(self.params, self.masters)
        return [(p, master) for p, master in pairs if p is not master]

    def collect_by(self, takers):
        """Let `collect` hand gradients on. takers: {parameter: what takes its gradient}. A hook
        would live as long as its parameter, and what it takes with it; these go with this object.
        """
        for p, taker in takers.items():
            hook = p.register_post_accumulate_grad_hook(partial(self.collect, taker))
            weakref.finalize(self, hook.remove)

    @staticmethod
    def collect(master, p):
        """In the middle of a backward pass, when p.grad is complete: add it to the master's
        in fp32 and free it. Of a recorded pass autograd comes a second time, with nothing."""
        if p.grad is None:
            return
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    def backward(self, loss):
        """The gradients of a loss () are added to the masters', times the scale. Raises
        FloatingPointError if the loss of an fp16 model is not finite: its activations are not, and
        no scale mends that."""
        if self.scale is None:
            loss.backward()
            return
        if not loss.isfinite():
            raise FloatingPointError(
                f"the loss is {loss.item()}: activations are {BEYOND}, or training "
                "diverged")
        (self.scale * loss).backward()

    def step(self, lr, grad_clip):
        """Add up the gradients of all ranks, clip, update the masters, copy them down. -> gradient
        norm before clipping. One of exactly 0 changes nothing, neither weights nor moments: AdamW
        would go on by its momentum, at the full rate. Nor does one of fp16 that is not finite,
        which halves the scale; it counts as 0. Raises FloatingPointError, before anything is
        changed, if the norm is not finite and no scale can help."""
        sum_gradients(self.masters)
        for master in self.masters if self.scale is not None else ():
            if master.grad is not None:
                master.grad.div_(self.scale)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, grad_clip)
        if self.scale is not None and self.rescale(norm):
            norm = torch.zeros(())
        norm = norm.item()  # a card is asked once
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}: "
                                     "the weights were left as they are; lower lr?")
        if norm == 0:
            self.forget()
            return 0.0
        self.halfway = True
        self.optimizer.step(lr)
        self.forget()
        self.copy_down()
        return norm

    def forget(self):
        """Let go of all gradients."""
        for x in (*self.params, *self.masters):
            x.grad = None

    def rescale(self, norm):
        """Change the scale by what the norm of the gradients says. All ranks have the same norm.
        -> is this step to be left out?"""
        skipped = not norm.isfinite()
        if skipped and self.scale <= 1:
            raise FloatingPointError(
                f"the gradient's norm is {norm.item()} at a scale of 1: gradients are "
                f"{BEYOND}; the weights were left as they are")
        if skipped:
            self.scale /= 2
            self.good = 0
        elif norm > 0:
            self.good += 1
        if self.good == GOOD_STEPS:
            self.scale = min(2 * self.scale, LARGEST_SCALE)
            self.good = 0
        self.scaling = dict(loss_scale=self.scale, skipped=int(skipped))
        return skipped

    @torch.no_grad()
    def copy_down(self):
        # a step has rounded bf16 weights itself
        copies = [pair for pair in self.copies() if pair[0].dtype != torch.bfloat16]
        if copies:
            torch._foreach_copy_(*map(list, zip(*copies)))

    def whole(self):
        """The masters, fp32, one after the other; those of bf16 weights are made as they are asked
        for."""
        return self.optimizer.masters()

    def state(self):
        """What a checkpoint keeps. Raises FloatingPointError if a weight is not finite."""
        masters = [master.detach() for master in self.whole()]
        weights = masters
        if self.scale is not None:  # a master may be finite where its copy is not
            weights = [*weights, *self.params]
        if not all(weight.isfinite().all() for weight in weights):
            raise FloatingPointError(
                "weights are no longer finite: they are not saved; lower lr?")
        state = dict(masters=masters, optimizer=self.optimizer.state())
        if self.scale is not None:
            state.update(scale=self.scale, good=self.good)
        return state

    @torch.no_grad()
    def load(self, state, name="ckpt.pt"):
        """Raises ValueError, naming the file, for anything but the state of such a model."""
        saved = state.get("masters")
        if not isinstance(saved, list) or not all(map(torch.is_tensor, saved)):
            raise ValueError(f"{name}: learner holds no list of tensors named masters")
        if [master.shape for master in self.masters] != [x.shape for x in saved]:
            raise ValueError(f"{name}: its weights have other shapes than the model")
        if not all(x.is_floating_point() and x.isfinite().all() for x in saved):
            raise ValueError(f"{name}: its weights are not finite numbers")
        try:
            self.optimizer.check(state["optimizer"])
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
        except Exception:  # whatever its first wrong entry leads to
            raise ValueError(
                f"{name}: its optimizer state does not fit the model") from None
        if self.scale is not None:
            scale = state.get("scale")
            good = state.get("good")
            if not (type(scale) is float and 1 <= scale <= LARGEST_SCALE
                    and type(good) is int and 0 <= good < GOOD_STEPS):
                raise ValueError(
                    f"{name}: it holds no scale of the loss, which float16 needs")
            self.scale = scale
            self.good = good
        self.optimizer.load(state["optimizer"], saved)
        self.copy_down()
