"""
A decoder-only transformer that reads real Hugging Face checkpoints: Llama (Llama 2/3.x,
SmolLM2), Qwen2/2.5, Qwen3, Mistral without its window.

The idea. Attention is the only place where tokens meet, so this file leaves it to the
caller. There is no batch dimension: `model(ids (N,), pos (N,), attend)` maps N tokens to N
hidden states and hands each layer's rotated queries, keys and values to
`attend(layer, q, k, v)`. Prefill, decoding and the learner differ only in the function they
pass; there a Shadow Mask enters the learner.

What stands between the matrix products (RMSNorm, rotation, SwiGLU) is written out below; on
a GPU the kernels of fast/fused.py compute the same. What a checkpoint's files say, and which
are refused, is in support/hf_config.py and support/hub.py.

Left out on purpose: dropout, sliding windows, mixture of experts, YaRN and other RoPE
scalings but Llama 3's (all refused by name), quantised weights.

Parameter names are those of the checkpoint without the leading "model.", so loading is a
strict comparison of names and shapes and saving is its inverse. q, k, v and gate, up are
joined into one matrix each (`tensors` takes them apart): two wide products are faster than
five narrow ones.

References: Llama 3 (arXiv 2407.21783), Qwen2.5 (2412.15115), Qwen3 (2505.09388), RMSNorm
(1910.07467), RoPE (2104.09864), SwiGLU (2002.05202).
"""
import json
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from fast import fused
from fast.head import Head, leave_out
from fast.launch import kernels, widen
from fast.residual import Product, in_slices, recomputed
from support.checkpoint import write_tensors, write_text
from support.hf_config import Config, read_config
from support.hub import check_names, copy_finite, find_checkpoint, read_tensors

# ---- the formulas between the matrix products ----

def rms_norm(x, weight, eps):
    """x (..., C), weight (C,) -> weight * x / sqrt(mean(x^2) + eps).

    Normalised in fp32, cast, then scaled: the order the checkpoints were trained with."""
    scale = torch.rsqrt(widen(x).pow(2).mean(-1, keepdim=True) + eps)  # (..., 1)
    return weight * (widen(x) * scale).to(x.dtype)


def rope_frequencies(config):
    """Radians per position of each rotated pair, (hs/2,) fp32. The rope_type "llama3" stretches
    slow pairs."""
    rope = config.rope
    channel = torch.arange(0, config.head_size, 2, dtype=torch.int64)  # (hs/2,)
    freq = rope["rope_theta"] ** -(channel.float() / config.head_size)
    if rope["rope_type"] == "default":
        return freq
    # turns within the original context: few -> stretched by `factor`, many -> untouched
    turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
    few = rope["low_freq_factor"]
    many = rope["high_freq_factor"]
    smooth = ((turns - few) / (many - few)).clamp(0, 1)
    return (1 - smooth) * freq / rope["factor"] + smooth * freq


def rotate(q, k, cos, sin):
    """RoPE: q (N, nh, hs), k (N, nkv, hs), cos and sin (N, hs/2) fp32 -> q, k rotated."""
    if kernels(q):
        return fused.rotate(q, k, cos, sin)  # without gradients in place
    return rotate_one(q, cos, sin), rotate_one(k, cos, sin)


def rotate_one(x, cos, sin):
    """x (N, heads, hs): channel i pairs with i + hs/2, as checkpoints on the hub have it."""
    a, b = widen(x).chunk(2, dim=-1)                            # (N, heads, hs/2)
    cos, sin = cos[:, None], sin[:, None]                       # (N, 1, hs/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def swiglu(x):
    """x (N, 2 M), gate and up side by side -> silu(gate) * up (N, M)."""
    if kernels(x):
        return fused.swiglu(x)
    gate, up = x.chunk(2, dim=-1)                               # (N, M)
    return F.silu(gate) * up


# ---- layers ----

class RMSNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        # with gradients on a CPU too: the same bits, and a backward pass that keeps less
        if kernels(x) or torch.is_grad_enabled():
            return fused.rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections around attention; attention itself is the caller's (see Block)."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head, config.n_kv_head, config.n_kv_head  # of q, k and v
        self.head_size = config.head_size
        self.qk_norm = config.qk_norm
        qkv_width = sum(self.heads) * self.head_size
        y_width = config.n_head * self.head_size
        self.qkv_proj = nn.Linear(config.width, qkv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(y_width, config.width, bias=config.o_bias)
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.eps)
            self.k_norm = RMSNorm(self.head_size, config.eps)

    def forward(self, x, cos, sin):
        """x (N, C) -> q (N, nh, hs), k (N, nkv, hs), both rotated, v (N, nkv, hs)."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_size)  # (N, nh + 2 nkv, hs)
        q, k, v = qkv.split(self.heads, dim=1)                  # (N, nh or nkv, hs)
        if self.qk_norm:  # per head and before the rotation
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = rotate(q, k, cos, sin)
        if k.dtype == torch.float16:
            # a key beyond 65,504 is infinite, scores -inf, and would be passed over without a
            # word: as NaN it reaches the logits. Other overflows do by themselves
            k = torch.add(k, k.detach(), alpha=0)  # 0 * inf is NaN
        return q, k, v


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.width, config.mlp_width
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x):
        """x (N, C) -> what is to be added (N, C), as a Product"""
        return Product(self.down_proj, swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    """x = x + attention(norm(x)), then x = x + mlp(norm(x)). What is added is a Product of a matrix
    and activations, which is computed as it is added: without gradients into x itself
    (fast/residual.py)."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend, slices=True):
        """x (N, C) -> (N, C). slices: long inputs pass the MLP a slice at a time."""
        x = x + self.attention(self.input_layernorm(x), cos, sin, attend)
        if slices:
            return in_slices(self.add_mlp, x)
        return self.add_mlp(x)

    def attention(self, x, cos, sin, attend):
        """x (N, C) -> what is to be added (N, C), as a Product"""
        q, k, v = self.self_attn(x, cos, sin)                   # (N, nh or nkv, hs)
        del x  # that of a long prompt is large
        y = attend(self.layer, q, k, v).flatten(1)              # (N, nh * hs)
        return Product(self.self_attn.o_proj, y)

    def add_mlp(self, x):
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """`model(ids (N,), pos (N,), attend)` -> hidden states (N, C), normalised, for `model.logits`.

    ids, pos: int64 on the model's device; pos are true positions (RoPE), whatever the rows are.
    attend(layer, q (N, nh, hs), k (N, nkv, hs), v (N, nkv, hs)) -> (N, nh, hs)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.width, config.eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        # whoever knows the tokenizer says more, see use_tokens. absent: not among the weights, and
        # no parameter of the checkpoint, so it is on a real device where they are not yet
        self.vocab_used = config.vocab_size
        self.absent = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.rope_freq = rope_frequencies(config)               # (hs/2,) fp32

    def _apply(self, fn, *args, **kwargs):
        # .to(), .bfloat16(), to_empty(): make the RoPE table on the device, never round it
        super()._apply(fn, *args, **kwargs)
        self.rope_freq = rope_frequencies(self.config).to(self.norm.weight.device)
        if self.device.type != "meta":
            self.absent = self.absent.to(self.device)
        return self

    def use_tokens(self, n, absent=()):
        """Sample and score ids below n only, and none of those in `absent`: sampler and learner
        alike give the others probability 0.

        Embedding tables are padded past the tokenizer (Qwen2.5: 151,936 rows, 151,665 tokens),
        and some tokenizers have holes. Raises ValueError for ids that the model does not have."""
        if not 1 <= n <= self.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {n} ids, the model takes {self.config.vocab_size}")
        absent = sorted(set(absent))
        if absent and not 0 <= absent[0] <= absent[-1] < n or len(absent) == n:
            raise ValueError(f"absent ids must be some, not all, of 0 to {n - 1}, "
                             f"got {len(absent)} from {absent[0]} to {absent[-1]}")
        self.vocab_used = n
        self.absent = torch.tensor(absent, dtype=torch.int64, device=self.device)

    def forward(self, ids, pos, attend, checkpointing=False):
        """checkpointing: keep one hidden state a layer for the backward pass and compute
        the rest again: less memory, a fifth more time (measured on an H100 at 1.5B
        parameters)."""
        # Triton launches on the current card, which may be another
        with torch.cuda.device_of(ids):
            return self.run_layers(ids, pos, attend, checkpointing)

    def run_layers(self, ids, pos, attend, checkpointing):
        x = self.embed_tokens(ids)                              # (N, C)
        pos = pos.to(torch.promote_types(x.dtype, torch.float32))  # (N,)
        angle = pos[:, None] * self.rope_freq                   # (N, hs/2)
        cos, sin = angle.cos(), angle.sin()
        del angle  # a long prompt's is not small
        gradients = torch.is_grad_enabled()
        for layer in self.layers:
            if checkpointing and gradients:
                x = recomputed(layer, x, cos, sin, attend)
            else:
                # slices would save nothing where the backward pass needs all they computed
                x = layer(x, cos, sin, attend, slices=not gradients)
        return self.norm(x)

    def parts(self):
        """{name in the checkpoint, without the leading "model.": (parameter, slice of it along its
        first dimension)}; q, k, v and gate, up lie one after the other in the joined matrices."""
        config = self.config
        q_size = config.n_head * config.head_size
        kv_size = config.n_kv_head * config.head_size
        mlp_size = config.mlp_width
        joined = dict(
            qkv_proj=dict(q_proj=q_size, k_proj=kv_size, v_proj=kv_size),
            gate_up_proj=dict(gate_proj=mlp_size, up_proj=mlp_size))
        found = {}
        for name, parameter in self.named_parameters():
            module = name.split(".")[-2]
            whole = {module: len(parameter)}
            start = 0
            for part, size in joined.get(module, whole).items():
                name_of_part = name.replace(module, part)
                found[name_of_part] = parameter, slice(start, start + size)
                start += size
        return found

    def tensors(self):
        """The same names, and the tensors under them, detached."""
        return {name: parameter.detach()[part]
                for name, (parameter, part) in self.parts().items()}

    @property
    def head(self):
        """The output matrix (vocab_used, C)."""
        layer = self.embed_tokens if self.config.tied else self.lm_head
        return layer.weight[:self.vocab_used]

    def logits(self, hidden):
        """hidden (n, C) -> fp32 logits (n, vocab_used). Few rows at a time: n x V is the
        largest tensor around. The learner, which has many, calls fast.head.head_rows."""
        return leave_out(Head.apply(hidden, self.head), self.absent)

    @property
    def device(self):
        return self.norm.weight.device

    @property
    def dtype(self):
        return self.norm.weight.dtype

    @classmethod
    def from_pretrained(cls, path, device="cpu", dtype=torch.float32):
        """Load a Hugging Face checkpoint from a folder or, if there is no such folder, from
        the hub under that name.

        Raises ValueError or FileNotFoundError, naming the culprit, for an unknown
        architecture or rope_type, a missing or truncated file, and any tensor that is
        missing, unused or of the wrong shape."""
        path = find_checkpoint(path)
        config = read_config(os.path.join(path, "config.json"), device)
        tensors = read_tensors(path, config, dtype)
        # no memory, no initial weights: all come from the checkpoint
        with torch.device("meta"):
            model = cls(config)
        check_names(path, model.tensors(), tensors)
        model = model.to(dtype).to_empty(device=device)
        copy_finite(model.tensors(), tensors)
        return model

    def save_pretrained(self, path):
        """Write config.json and model.safetensors into folder `path`, as transformers'
        AutoModelForCausalLM reads them. Each file appears whole or not at all. Raises
        OSError."""
        os.makedirs(path, exist_ok=True)
        tensors = {}
        for name, tensor in self.tensors().items():
            if not name.startswith("lm_head."):
                name = "model." + name
            tensors[name] = tensor
        write_tensors(os.path.join(path, "model.safetensors"), tensors)
        # transformers 5 renamed torch_dtype; both readers find theirs
        dtype = str(self.dtype).removeprefix("torch.")
        raw = {key: value for key, value in self.config.raw.items()
               if key not in ("dtype", "torch_dtype")}
        raw |= dict(torch_dtype=dtype, dtype=dtype)
        write_text(os.path.join(path, "config.json"), json.dumps(raw, indent=2))
