"""
fp32 master weights for a model that may hold bf16.

The idea. Sampler and learner read one set of (bf16) weights, so the policy that sampled is the policy that is scored; the
optimizer owns fp32 copies and rounds them down after each step. Gradients of micro-batches add up in fp32.
"""
from functools import partial

import torch


class Masters:
    """fp32 weights that the optimizer (AdamW) owns. c: settings with lr, beta2 and weight_decay. The model may hold bf16
    copies: an update of 1e-6 is below bf16's spacing, so it must be summed up here. For an fp32 model the masters are its
    own parameters. value: PPO's value head, an fp32 module trained and saved with the model's weights."""

    def __init__(self, model, c, value=None):
        self.params = [*model.parameters(), *(value.parameters() if value is not None else [])]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=c.lr, betas=(0.9, c.beta2), weight_decay=c.weight_decay, fused=True)
        for p, m in zip(self.params, self.masters):
            if p is not m:
                p.register_post_accumulate_grad_hook(partial(self.collect, m))

    @staticmethod
    def collect(m, p):
        """In the middle of a backward pass, when p.grad is complete: add it to the master's in fp32 and free it."""
        m.grad = p.grad.float() if m.grad is None else m.grad.add_(p.grad)
        p.grad = None

    def step(self, lr, grad_clip):
        """Clip, update the masters, copy them down. -> gradient norm before clipping"""
        norm = torch.nn.utils.clip_grad_norm_(self.masters, grad_clip)
        if not norm.isfinite():
            raise FloatingPointError(f"the gradient's norm is {norm.item()}: the weights were left as they are; lower lr?")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy_down()
        return norm.item()

    @torch.no_grad()
    def copy_down(self):
        for p, m in zip(self.params, self.masters):
            if p is not m:
                p.copy_(m)

    def state(self):
        return dict(masters=[m.detach() for m in self.masters], optimizer=self.optimizer.state_dict())

    @torch.no_grad()
    def load(self, state):
        if [m.shape for m in self.masters] != [saved.shape for saved in state["masters"]]:
            raise ValueError("the checkpoint's weights have other shapes than the model")
        for m, saved in zip(self.masters, state["masters"]):
            m.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.copy_down()
