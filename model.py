"""
A decoder-only transformer that reads real Hugging Face checkpoints: Llama (Llama 2/3.x, SmolLM2), Qwen2/2.5, Qwen3.

The idea. Attention is the only place where tokens meet, so this file leaves it to the caller (and what stands between the
matrix products to fused.py). There is no batch dimension: `model(ids (N,), pos (N,), attend)` maps N tokens to N hidden states and
hands each layer's rotated queries, keys and values to `attend(layer, q, k, v)`. Prefill, decoding and the learner differ only in
the function they pass; this is where a Shadow Mask enters the learner.

Left out on purpose: dropout, sliding windows, mixture of experts, YaRN and other RoPE scalings but Llama 3's (all refused by name),
quantised weights, sentencepiece models' tokenizers.

Parameter names are those of the checkpoint without the leading "model.", so loading is a strict comparison of names
and shapes and saving is its inverse; q, k, v and gate, up are joined into one matrix each (`tensors` takes them apart), for two
wide products are faster than five narrow ones.

References: Llama 3 (arXiv 2407.21783), Qwen2.5 (2412.15115), Qwen3 (2505.09388), RoPE (2104.09864).
"""
import json
import math
import os
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fast.fused import rms_norm, rotate, swiglu
from fast.head import Head, matmul32
from fast.launch import widen

MLP_ROWS = 2048  # rows of an MLP slice in prefill; under activation checkpointing, where a slice is computed once more, 8 times that
CHECKPOINT = dict(use_reentrant=False, preserve_rng_state=False)  # nothing here draws random numbers

# which tensors an architecture has beyond the common ones; a bias of None means "ask config.attention_bias"
ARCHITECTURES = {
    "llama": dict(qkv_bias=None, o_bias=None, qk_norm=False),
    "qwen2": dict(qkv_bias=True, o_bias=False, qk_norm=False),
    "qwen3": dict(qkv_bias=None, o_bias=None, qk_norm=True),
}


@dataclass
class Config:
    arch: str
    n_layer: int
    n_head: int
    n_kv_head: int
    head_size: int
    width: int
    mlp_width: int
    vocab_size: int
    max_pos: int  # longest context in tokens the checkpoint was made for
    eps: float
    rope: dict = field(repr=False)  # rope_theta, rope_type and what that type needs
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    raw: dict = field(default_factory=dict, repr=False)  # config.json as read; written back by save_pretrained

    @classmethod
    def from_dict(cls, raw):
        """config.json as a dict -> Config. Raises ValueError for anything this file would compute wrongly."""
        arch = raw.get("model_type")
        if arch not in ARCHITECTURES:
            raise ValueError(f"unknown architecture model_type={arch!r}: this code reads {', '.join(ARCHITECTURES)}")
        missing = [k for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                               "max_position_embeddings", "rms_norm_eps") if k not in raw]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported (silu is)")
        sliding = raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or [])
        if sliding:
            raise ValueError("sliding-window attention is not supported")
        if raw.get("quantization_config"):
            raise ValueError("quantised weights (quantization_config) are not supported")
        # transformers 5 moved rope_theta into rope_parameters; before that it stood beside rope_scaling (or nothing)
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", raw.get("rope_theta"))
        if rope["rope_theta"] is None:
            raise ValueError("config.json gives no rope_theta, neither at the top nor in rope_parameters")
        if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        n_head, spec = raw["num_attention_heads"], ARCHITECTURES[arch]
        bias = bool(raw.get("attention_bias", False))
        config = cls(
            arch=arch, n_layer=raw["num_hidden_layers"], n_head=n_head, n_kv_head=raw.get("num_key_value_heads") or n_head,
            head_size=raw.get("head_dim") or (128 if arch == "qwen3" else raw["hidden_size"] // n_head),
            width=raw["hidden_size"], mlp_width=raw["intermediate_size"], vocab_size=raw["vocab_size"],
            max_pos=raw["max_position_embeddings"], eps=raw["rms_norm_eps"], rope=rope,
            tied=raw.get("tie_word_embeddings", False), qk_norm=spec["qk_norm"], mlp_bias=bool(raw.get("mlp_bias", False)),
            qkv_bias=bias if spec["qkv_bias"] is None else spec["qkv_bias"],
            o_bias=bias if spec["o_bias"] is None else spec["o_bias"], raw=raw)
        sizes = dict(num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
                     head_dim=config.head_size, hidden_size=config.width, intermediate_size=config.mlp_width,
                     vocab_size=config.vocab_size, max_position_embeddings=config.max_pos)
        for key, n in sizes.items():
            if type(n) is not int or not 0 < n < 10**7:
                raise ValueError(f"{key} must be a positive integer, got {n!r}")
        if config.head_size % 2:
            raise ValueError(f"head_dim must be even, got {config.head_size}")
        if config.n_head % config.n_kv_head:
            raise ValueError(f"{config.n_head} query heads do not divide into {config.n_kv_head} KV heads")
        rope_frequencies(config)  # an unknown rope_type fails here, before any weight is read
        return config

    def kv_bytes_per_token(self, dtype):
        """Bytes one token takes in a dense KV cache: keys and values of every layer and KV head."""
        return 2 * self.n_layer * self.n_kv_head * self.head_size * dtype.itemsize


def rope_frequencies(config):
    """Radians per position of each rotated pair, (hs/2,) fp32. `rope_type` "default" or "llama3" (per-band stretching)."""
    rope, hs = config.rope, config.head_size
    freq = rope["rope_theta"] ** -(torch.arange(0, hs, 2, dtype=torch.int64).float() / hs)  # (hs/2,)
    if rope["rope_type"] == "default":
        return freq
    if rope["rope_type"] == "llama3":
        need = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [k for k in need if k not in rope]
        if missing:
            raise ValueError(f"rope_type llama3 needs {', '.join(missing)}")
        # turns made within the original context: few turns -> stretched by `factor`, many -> untouched, linear between
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
        lo, hi = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - lo) / (hi - lo)).clamp(0, 1)
        return (1 - smooth) * freq / rope["factor"] + smooth * freq
    raise ValueError(f"rope_type {rope['rope_type']!r} is not supported (default and llama3 are)")


class RMSNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def add_linear(x, y, linear):
    """x + linear(y), (N, C): the product adds to the residual stream as it is written; in place where no gradient is recorded."""
    x = x if linear.bias is None else x + linear.bias
    return (torch.addmm if torch.is_grad_enabled() else torch.Tensor.addmm_)(x, y, linear.weight.t())


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.c, self.layer = c, layer
        self.qkv_proj = nn.Linear(c.width, (c.n_head + 2 * c.n_kv_head) * c.head_size, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.n_head * c.head_size, c.width, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_size, c.eps), RMSNorm(c.head_size, c.eps)

    def forward(self, x, norm, cos, sin, attend):
        c, N = self.c, len(x)
        qkv = self.qkv_proj(norm(x)).view(N, -1, c.head_size)                                # (N, nh + 2 nkv, hs)
        q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)                     # (N, nh or nkv, hs)
        if c.qk_norm:  # per head and before the rotation
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, k, cos, sin)
        y = attend(self.layer, q, k, v)                                                      # (N, nh, hs)
        return add_linear(x, y.reshape(N, -1), self.o_proj)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.width, 2 * c.mlp_width, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.mlp_width, c.width, bias=c.mlp_bias)

    def forward(self, x, norm):
        return add_linear(x, swiglu(self.gate_up_proj(norm(x))), self.down_proj)


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, c.eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.width, c.eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, attend, slices=True):
        """x (N, C) -> (N, C). slices: long inputs pass the MLP, whose inner width is the largest around, a slice at a time."""
        x, norm = self.self_attn(x, self.input_layernorm, cos, sin, attend), self.post_attention_layernorm
        size = MLP_ROWS * (8 if torch.is_grad_enabled() else 1)
        if not slices or len(x) <= size:
            return self.mlp(x, norm)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self.mlp, rows, norm, **CHECKPOINT) for rows in x.split(size)])
        for rows in x.split(size):
            rows.copy_(self.mlp(rows, norm))  # in place; nothing to copy where the product already was
        return x


class Transformer(nn.Module):
    """`model(ids (N,), pos (N,), attend)` -> hidden states (N, C), normalised, ready for `model.logits`.

    ids, pos: int64 on the model's device; pos are true positions (RoPE), whatever row a token sits in.
    attend(layer, q (N, nh, hs), k (N, nkv, hs), v (N, nkv, hs)) -> (N, nh, hs)."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.width)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.norm = RMSNorm(c.width, c.eps)
        if not c.tied:
            self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)
        # embedding tables are padded past the tokenizer (Qwen2.5: 151,936 rows, 151,665 tokens): whoever knows the tokenizer
        # lowers this, and the padding leaves the support of sampler and learner alike
        self.vocab_used = c.vocab_size
        self.rope_freq = rope_frequencies(c)  # (hs/2,) fp32

    def _apply(self, fn, *args, **kwargs):  # .to(), .bfloat16(): move the RoPE table, never round it
        super()._apply(fn, *args, **kwargs)
        self.rope_freq = rope_frequencies(self.config).to(self.norm.weight.device)
        return self

    def forward(self, ids, pos, attend, checkpointing=False):
        """checkpointing: keep one hidden state a layer for the backward pass and compute the rest again: less memory, a fifth
        more time (measured on an H100 at 1.5B parameters)."""
        with torch.cuda.device_of(ids):  # Triton launches on the current card, which need not be the model's
            return self.run_layers(ids, pos, attend, checkpointing)

    def run_layers(self, ids, pos, attend, checkpointing):
        x = self.embed_tokens(ids)                                                           # (N, C)
        angle = pos.to(torch.promote_types(x.dtype, torch.float32))[:, None] * self.rope_freq  # (N, hs/2)
        cos, sin = angle.cos(), angle.sin()
        del angle  # a long prompt's is not small
        for layer in self.layers:
            if checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, **CHECKPOINT)
            else:
                x = layer(x, cos, sin, attend, slices=not torch.is_grad_enabled())
        return self.norm(x)

    def tensors(self):
        """{name in the checkpoint, without the leading "model.": tensor}; parts of the joined matrices are slices of them."""
        c, out = self.config, {}
        heads = [n * c.head_size for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
        for name, p in self.named_parameters():
            for joined, parts, sizes in (("qkv_proj", ("q_proj", "k_proj", "v_proj"), heads),
                                         ("gate_up_proj", ("gate_proj", "up_proj"), [c.mlp_width] * 2)):
                if joined in name:
                    out.update({name.replace(joined, part): x for part, x in zip(parts, p.detach().split(sizes))})
                    break
            else:
                out[name] = p.detach()
        return out

    @property
    def head(self):
        """The output matrix (vocab_used, C)."""
        return (self.embed_tokens if self.config.tied else self.lm_head).weight[:self.vocab_used]

    def logits(self, hidden):
        """hidden (n, C) -> fp32 logits (n, vocab_used). Callers pass few rows at a time: n x V is the largest tensor around."""
        return Head.apply(hidden, self.head)

    @property
    def device(self):
        return self.norm.weight.device

    @property
    def dtype(self):
        return self.norm.weight.dtype

    @classmethod
    def from_pretrained(cls, path, device="cpu", dtype=torch.float32):
        """Load a Hugging Face checkpoint from a folder or, if there is no such folder, from the hub under that name.

        Raises ValueError or FileNotFoundError, naming the culprit, for an unknown architecture or rope_type, a missing or
        truncated file, and any tensor that is missing, unused or of the wrong shape."""
        path = find_checkpoint(path)
        file = os.path.join(path, "config.json")
        try:
            with open(file, encoding="utf-8") as f:
                raw = json.load(f)
        except ValueError as e:
            raise ValueError(f"{file} is not valid JSON: {e}") from None
        try:
            config = Config.from_dict(raw)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as e:  # whatever types may stand in a JSON file
            raise ValueError(f"{file}: {' '.join(str(e).split())}") from None
        if torch.device(device).type == "cuda" and config.head_size > 128:
            raise ValueError(f"{file}: the Triton kernels take head sizes up to 128, the model has {config.head_size}")
        with torch.device("meta"):  # no memory, no uninitialised weights: every tensor must come from the checkpoint
            model = cls(config)
        tensors = {}
        for k, t in read_safetensors(path):
            k = k.removeprefix("model.")
            if k in tensors or not t.is_floating_point():
                raise ValueError(f"{path}: tensor {k} " + ("is there twice" if k in tensors else f"has dtype {t.dtype}"))
            tensors[k] = t  # a view of the file, read when it is copied
        if model.config.tied:
            tensors.pop("lm_head.weight", None)  # the config wins when a tied checkpoint carries both
        tensors = {k: t for k, t in tensors.items() if not k.endswith("rotary_emb.inv_freq")}  # old exports store a table
        want = model.tensors()
        for what, names in (("lacks", want.keys() - tensors.keys()), ("has unused", tensors.keys() - want.keys())):
            if names:
                raise ValueError(f"{path} {what} {len(names)} tensor(s), e.g. {min(names)}")
        for k, t in want.items():
            if tensors[k].shape != t.shape:
                raise ValueError(f"{path}: {k} has shape {tuple(tensors[k].shape)}, config.json implies {tuple(t.shape)}")
        model = model.to(dtype).to_empty(device=device)
        for k, t in model.tensors().items():  # all of them, as was just checked
            t.copy_(tensors[k])
        model.rope_freq = rope_frequencies(model.config).to(model.device)
        return model

    def save_pretrained(self, path):
        """Write config.json and model.safetensors into folder `path`; transformers' AutoModelForCausalLM reads it. The file
        appears whole or not at all. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file
        os.makedirs(path, exist_ok=True)
        full = lambda k: k if k.startswith("lm_head.") else "model." + k
        tensors = {full(k): t.to("cpu", copy=True) for k, t in self.tensors().items()}
        file = os.path.join(path, "model.safetensors")
        try:
            save_file(tensors, file + ".tmp", metadata={"format": "pt"})
            os.replace(file + ".tmp", file)
        except SafetensorError as e:
            raise OSError(f"could not write {file}: {e}") from None
        name = str(self.dtype).removeprefix("torch.")
        raw = {k: v for k, v in self.config.raw.items() if k not in ("dtype", "torch_dtype")}
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
            json.dump({**raw, "torch_dtype": name, "dtype": name}, f, indent=2)  # the key moved; both readers find theirs


def find_checkpoint(path):
    """A local folder as it is; otherwise download the hub repository of that name. -> folder"""
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            raise FileNotFoundError(f"{path} holds no config.json")
        return path
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except Exception as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise FileNotFoundError(f"{path!r} is neither a local folder nor could it be downloaded from the hub: {reason}") from None


def read_safetensors(path):
    """Yield (name, tensor) from model.safetensors or, without it, from the shards that the index lists; no stray file is read."""
    from safetensors import SafetensorError, safe_open
    index, weight_map = os.path.join(path, "model.safetensors.index.json"), None
    # in this order, as in transformers: a checkpoint saved over a sharded one leaves the old index behind
    if os.path.exists(index) and not os.path.exists(os.path.join(path, "model.safetensors")):
        with open(index, encoding="utf-8") as f:
            try:
                weight_map = json.load(f)["weight_map"]
            except (ValueError, KeyError) as e:
                raise ValueError(f"{index} is not a valid index of shards: {e!r}") from None
    files = sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]
    for name in files:
        file = os.path.join(path, name)
        if not os.path.exists(file):
            why = " although model.safetensors.index.json lists it" if weight_map else ""
            raise FileNotFoundError(f"{file} is missing{why}")
        try:
            with safe_open(file, framework="pt") as f:
                for key in f.keys():
                    if weight_map is None or weight_map.get(key) == name:
                        yield key, f.get_tensor(key)
        except SafetensorError as e:
            raise ValueError(f"{file} is truncated or not a safetensors file: {e}") from None
