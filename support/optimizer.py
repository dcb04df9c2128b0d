"""
fp32 master weights for a model that may hold bf16.

The idea. Sampler and learner read one set of (bf16) weights, so the policy that sampled is
the policy that is scored. The optimizer owns fp32 copies, the masters, and rounds them down
after each step: an update of 1e-6 is below bf16's spacing, so it must be summed up in fp32.
Gradients of micro-batches add up in fp32 too.
"""
from functools import partial

import torch

from support.parallel import sum_gradients


def adamw(params, c):
    return torch.optim.AdamW(
        params, lr=c.lr, betas=(0.9, c.beta2), weight_decay=c.weight_decay, fused=True)


class Masters:
    """The fp32 weights that the optimizer (AdamW) updates; of an fp32 model they are its own
    parameters.

    c: settings with lr, beta2 and weight_decay. value: PPO's value head, an fp32 module
    that is trained and saved with the model's weights. changed: is an update on its way whose
    weights are not to be saved? A step sets it, and who asks for steps sets it back after the
    last."""

    changed = False

    def __init__(self, model, c, value=None):
        self.params = list(model.parameters())
        if value is not None:
            self.params += value.parameters()
        self.masters = [p if p.dtype in (torch.float32, torch.float64)  # of tests
                        else p.detach().float().requires_grad_() for p in self.params]
        self.optimizer = adamw(self.masters, c)
        for p, master in self.copies():
            p.register_post_accumulate_grad_hook(partial(self.collect, master))

    def copies(self):
        """(parameter, master) where they are two tensors"""
        pairs = zip(self.params, self.masters)
        return [(p, master) for p, master in pairs if p is not master]

    @staticmethod
    def collect(master, p):
        """In the middle of a backward pass, when p.grad is complete: add it to the master's
        in fp32 and free it."""
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    def step(self, lr, grad_clip):
        """Add up the gradients of all ranks, clip, update the masters, copy them down. -> gradient
        norm before clipping. One of exactly 0 changes nothing, neither weights nor moments: AdamW
        would go on by its momentum, at the full rate. Raises FloatingPointError, before anything is
        changed, if the norm is not finite."""
        sum_gradients(self.masters)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, grad_clip)
        if not norm.isfinite():
            raise FloatingPointError(f"the gradient's norm is {norm.item()}: "
                                     "the weights were left as they are; lower lr?")
        if norm == 0:
            self.optimizer.zero_grad(set_to_none=True)
            return 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.changed = True
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy_down()
        return norm.item()

    @torch.no_grad()
    def copy_down(self):
        for p, master in self.copies():
            p.copy_(master)

    def state(self):
        """What a checkpoint keeps. Raises FloatingPointError if a weight is not finite."""
        if not all(master.isfinite().all() for master in self.masters):
            raise FloatingPointError(
                "weights are no longer finite: they are not saved; lower lr?")
        return dict(masters=[master.detach() for master in self.masters],
                    optimizer=self.optimizer.state_dict())

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
            self.optimizer.load_state_dict(state["optimizer"])
            fits = all(map(self.has_moments, self.masters))
        except Exception:  # whatever its first wrong entry leads to
            fits = False
        if not fits:
            raise ValueError(f"{name}: its optimizer state does not fit the model")
        for master, x in zip(self.masters, saved):
            master.copy_(x)
        self.copy_down()

    def has_moments(self, master):
        """Has AdamW what it needs of a weight, or, before its first gradient, nothing?"""
        state = self.optimizer.state.get(master, {})
        shapes = {name: x.shape for name, x in state.items()}
        want = dict(step=(), exp_avg=master.shape, exp_avg_sq=master.shape)
        return shapes in ({}, want)
