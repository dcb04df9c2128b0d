"""
LoRA: two thin matrices are trained beside each of some large ones, which stay as they are.

The idea. Of W = W0 + s B A, s = alpha / rank, W0 (out, in) is frozen, A (rank, in) and B (out,
rank) are trained in fp32. The model's own weight is W, merged and rounded once a step: sampler,
replay and kernels know nothing of LoRA, and the policy that sampled is the policy that is scored.
The backward pass gives dW; at once, one matrix at a time, it becomes

    dA = s B^T dW        dB = s dW A^T

and is freed. Masters, gradients and AdamW's moments are held of A and B alone. The price: W0 is
held beside W, and dW is computed, as in full training, where a product with A and B apart would
spare it.

All other weights are frozen; W0's model and the trained one share them. Of a joined matrix (q, k,
v; gate, up) the gradient of rows that are no target is thrown away.

Left out on purpose: W0 in 4 or 8 bits, 8-bit moments (those of A and B are small), dropout, other
scales than alpha / rank, other starts than peft's, other layers than the seven matrices.

Reference: LoRA 2106.09685 (arXiv). Files are as peft reads them.
"""
import copy
import difflib
import json
import math
import os

import torch

from support.adamw import AdamW
from support.checkpoint import write_tensors, write_text
from support.jsonfile import shown
from support.optimizer import Masters, first_scale

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TOGETHER = dict(all=TARGETS, qkvo=ATTENTION)  # names for several


def check_lora(c, defaults):
    """Raises ValueError for settings of LoRA without LoRA, and for targets that are none."""
    for key in ("lora_alpha", "lora_targets"):
        if not c.lora_rank and getattr(c, key) != defaults[key]:
            raise ValueError(f"{key} {shown(getattr(c, key))} does nothing while "
                             f"lora_rank=0: set lora_rank, or leave out {key}")
    targets_of(c)


def targets_of(c):
    """Names of the matrices that c.lora_targets asks for, in the order of TARGETS."""
    asked = TOGETHER.get(c.lora_targets, c.lora_targets.split(","))
    for name in asked:
        if name not in TARGETS:
            known = [*TARGETS, *TOGETHER]
            near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"lora_targets: unknown matrix {shown(name)}; the nearest is {near!r} "
                f"({', '.join(TOGETHER)}, or names joined by commas)")
    return [name for name in TARGETS if name in asked]


def targeted(model, c):
    """{name in the checkpoint: (parameter, slice of its rows)} of the targets."""
    targets = targets_of(c)
    return {name: part for name, part in model.parts().items()
            if name.endswith(".weight") and name.split(".")[-2] in targets}


def frozen_base(model, c):
    """Freeze all of the model but the targets. -> the model as it is now, frozen: targets are
    copies, everything else is shared."""
    trained = {id(p) for p, _ in targeted(model, c).values()}
    shared = {}
    for p in model.parameters():
        p.requires_grad_(id(p) in trained)
        if id(p) not in trained:
            shared[id(p)] = p
    return copy.deepcopy(model, shared).requires_grad_(False)


class Adapter:
    """A and B of one matrix. w (out, in): the rows of the model's weight that are W; w0: W0."""

    def __init__(self, w, w0, scale, rank, rng):
        rows, columns = w.shape
        dtype = torch.promote_types(w.dtype, torch.float32)
        a = torch.empty(rank, columns, dtype=dtype)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=rng)
        self.w, self.w0, self.scale = w, w0, scale
        self.A = a.to(w.device).requires_grad_()
        self.B = torch.zeros(rows, rank, device=w.device, dtype=dtype).requires_grad_()

    @torch.no_grad()
    def collect(self, dw):
        """Add what the gradient of W (out, in) means for A and B to theirs."""
        dw = dw.to(self.A.dtype)
        for x, grad in ((self.A, self.B.t() @ dw), (self.B, dw @ self.A.t())):
            if x.grad is None:
                x.grad = grad.mul_(self.scale)
            else:
                x.grad.add_(grad, alpha=self.scale)

    @torch.no_grad()
    def merge(self):
        """W = W0 + s B A, rounded once."""
        w0 = self.w0.to(self.A.dtype)
        self.w.copy_(torch.addmm(w0, self.B, self.A, alpha=self.scale))  # (out, in)


class LoRA(Masters):
    """In place of Masters: what the optimizer updates are A and B of each target.

    c: settings with lora_rank, lora_alpha, lora_targets, model and seed too. base: what frozen_base
    returned, if it was called before. Raises ValueError for a rank that a target does not have."""

    def __init__(self, model, c, value=None, base=None):
        self.c = c
        base = base or frozen_base(model, c)
        self.params = list(model.parameters())
        before, rng = base.tensors(), torch.Generator().manual_seed(c.seed)
        self.adapters = {}
        found = {}  # parameter -> [(slice of its rows, Adapter)]
        for name, (p, rows) in targeted(model, c).items():
            w = p.detach()[rows]
            if c.lora_rank > min(w.shape):
                raise ValueError(
                    f"lora_rank {c.lora_rank} is more than {name} of {len(w)} x "
                    f"{w.shape[1]} can have: at most {min(w.shape)}")
            scale = c.lora_alpha / c.lora_rank
            adapter = Adapter(w, before[name], scale, rank=c.lora_rank, rng=rng)
            self.adapters[name] = adapter
            found.setdefault(p, []).append((rows, adapter))
        self.masters = []
        for adapter in self.adapters.values():
            self.masters += adapter.A, adapter.B
        self.trained = sum(x.numel() for x in self.masters)
        if value is not None:
            self.params += value.parameters()
            self.masters += value.parameters()
        self.optimizer = AdamW(self.masters, self.masters, c)
        self.scale = first_scale(self.params)
        for p, parts in found.items():
            p.collected = [x for _, adapter in parts for x in (adapter.A, adapter.B)]
        self.collect_by(found)

    @staticmethod
    def collect(parts, p):
        """In the middle of a backward pass, when p.grad is complete: hand it on and free it."""
        if p.grad is None:  # as in Masters.collect
            return
        for rows, adapter in parts:
            adapter.collect(p.grad[rows])
        p.grad = None

    def copy_down(self):
        for adapter in self.adapters.values():
            adapter.merge()

    def save_pretrained(self, path):
        """Write adapter_config.json and adapter_model.safetensors into folder `path`, as peft's
        PeftModel.from_pretrained reads them. Each file appears whole or not at all. Raises
        OSError."""
        os.makedirs(path, exist_ok=True)
        tensors = {}
        for name, adapter in self.adapters.items():
            name = "base_model.model.model." + name.removesuffix("weight")
            tensors[name + "lora_A.weight"] = adapter.A.detach()
            tensors[name + "lora_B.weight"] = adapter.B.detach()
        write_tensors(os.path.join(path, "adapter_model.safetensors"), tensors)
        config = dict(
            peft_type="LORA", task_type="CAUSAL_LM", r=self.c.lora_rank,
            base_model_name_or_path=self.c.model, lora_alpha=self.c.lora_alpha,
            target_modules=targets_of(self.c), lora_dropout=0.0, bias="none",
            fan_in_fan_out=False, inference_mode=True)
        text = json.dumps(config, indent=2)
        write_text(os.path.join(path, "adapter_config.json"), text)
