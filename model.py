"""
A decoder-only transformer that reads real Hugging Face checkpoints: Llama (Llama 2/3.x,
SmolLM2), Qwen2/2.5, Qwen3, Mistral without its window.

The idea. Attention is the only place where tokens meet, so this file leaves it to the
caller. There is no batch dimension: `model(ids (N,), pos (N,), attend)` maps N tokens to N
hidden states and hands each layer's rotated queries, keys and values to
`attend(layer, q, k, v)`. Prefill, decoding and the learner differ only in the function they
pass; there a Shadow Mask enters the learner.

What stands between the matrix products (RMSNorm, rotation, SwiGLU) is written out below; on
a GPU the kernels of fast/fused.py compute the same.

Left out on purpose: dropout, sliding windows, mixture of experts, YaRN and other RoPE
scalings but Llama 3's (all refused by name), quantised weights.

Parameter names are those of the checkpoint without the leading "model.", so loading is a
strict comparison of names and shapes and saving is its inverse. q, k, v and gate, up are
joined into one matrix each (`tensors` takes them apart): two wide products are faster than
five narrow ones.

References: Llama 3 (arXiv 2407.21783), Qwen2.5 (2412.15115), Qwen3 (2505.09388), RMSNorm
(1910.07467), RoPE (2104.09864), SwiGLU (2002.05202).
"""
import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fast import fused
from fast.head import Head, leave_out
from fast.launch import kernels, widen
from support.checkpoint import write_tensors, write_text
from support.jsonfile import entry, read_json, shown
from support.run import is_of_a_run

MLP_ROWS = 2048  # rows of an MLP slice, see in_slices
CHECKPOINT = dict(use_reentrant=False, preserve_rng_state=False)  # no random numbers are drawn here

# the class of an architecture's language model in transformers, and which tensors it has beyond the
# common ones; None: config.json's attention_bias says
ARCHITECTURES = {
    "llama": dict(name="LlamaForCausalLM", qkv_bias=None, o_bias=None, qk_norm=False),
    "qwen2": dict(name="Qwen2ForCausalLM", qkv_bias=True, o_bias=False, qk_norm=False),
    "qwen3": dict(name="Qwen3ForCausalLM", qkv_bias=None, o_bias=None, qk_norm=True),
    "mistral": dict(name="MistralForCausalLM", qkv_bias=False, o_bias=False, qk_norm=False),
}
# keys of config.json that change what is computed, in families that are not read here (Granite,
# Gemma, SmolLM3, MiniCPM, GPT-NeoX, mixtures of experts): one that is not off is refused, whatever
# its family
CHANGES = re.compile("multiplier|scal|soft_?cap|no_?rope|interleav|clip|window|chunk|expert|mrope|"
                     "mup|qk_|query_|temperature_tuning|local_|global_|bidirect|alibi|non_causal|"
                     "rotary|rope_(pct|ratio)|output_gate|parallel_(residual|attn|block)|"
                     "zero_centered|post_norm|kv_shared|head_bias|k_eq_v|compression|pruned|"
                     "encoder_decoder|cross_attention|sink")
READ = ("rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers",
        "partial_rotary_factor")
# keys that say what is computed here too, with the values that say so
SAID = dict(is_causal=(True,), use_rope=(True,), position_embedding_type=("rope", "rotary"),
            hidden_activation=("silu",), activation_function=("silu",),
            norm_type=("rmsnorm", "rms_norm", "RMSNorm"))
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "vocab_size", "max_position_embeddings", "rms_norm_eps")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LARGEST = 10**7  # above every size in config.json
MOST_LAYERS = 10**4  # a million take a gigabyte before the weights are asked for
RANGES = dict(  # what makes sense in config.json, far beyond what is used
    rms_norm_eps=(1e-20, 1), rope_theta=(1, 1e12), factor=(1, 1e6), low_freq_factor=(1e-6, 1e6),
    high_freq_factor=(1e-6, 1e6), original_max_position_embeddings=(1, LARGEST))
DTYPES = ("F64", "F32", "BF16", "F16")  # of tensors, as safetensors calls them


# ---- config.json ----

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
    raw: dict = field(default_factory=dict, repr=False)  # config.json as read, for save_pretrained

    @classmethod
    def from_dict(cls, raw):
        """config.json as a dict -> Config. Raises ValueError for what would be computed wrongly."""
        refuse_unsupported(raw)
        arch = raw["model_type"]
        spec = ARCHITECTURES[arch]
        bias = entry(raw, "attention_bias", bool, False)
        width, n_head = size(raw, "hidden_size"), size(raw, "num_attention_heads")
        head_size = width // n_head
        if arch == "qwen3":  # its default does not depend on the width
            head_size = 128
        config = cls(
            arch=arch,
            n_layer=size(raw, "num_hidden_layers"),
            n_head=n_head,
            n_kv_head=size(raw, "num_key_value_heads", n_head),
            head_size=size(raw, "head_dim", head_size),
            width=width,
            mlp_width=size(raw, "intermediate_size"),
            vocab_size=size(raw, "vocab_size"),
            max_pos=size(raw, "max_position_embeddings"),
            eps=number(raw, "rms_norm_eps"),
            rope=read_rope(raw),
            tied=entry(raw, "tie_word_embeddings", bool, False),
            qkv_bias=bias if spec["qkv_bias"] is None else spec["qkv_bias"],
            o_bias=bias if spec["o_bias"] is None else spec["o_bias"],
            mlp_bias=entry(raw, "mlp_bias", bool, False),
            qk_norm=spec["qk_norm"],
            raw=raw,
        )
        config.check()
        return config

    def check(self):
        """Raises ValueError for sizes that do not go together."""
        if self.head_size == 0 or self.head_size % 2:
            raise ValueError(f"head_dim must be even and positive, got {self.head_size}")
        if self.n_head * self.head_size >= LARGEST:
            raise ValueError(f"num_attention_heads {self.n_head} x head_dim {self.head_size} is "
                             "more than any model has")
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"{self.n_head} query heads do not divide into {self.n_kv_head} KV heads")

    def kv_bytes_per_token(self, dtype):
        """Bytes of one token in a dense KV cache: keys and values of every layer and KV head."""
        return 2 * self.n_layer * self.n_kv_head * self.head_size * dtype.itemsize


def size(raw, key, default=None):
    """A positive integer of a size that models have. Raises ValueError."""
    n, most = entry(raw, key, int, default), LARGEST
    if key == "num_hidden_layers":
        most = MOST_LAYERS
    if not 0 < n < most:
        raise ValueError(f"{key} must be a positive integer below {most:,}, got {shown(n)}")
    return n


def number(raw, key):
    """A number in its range, which keeps zero, NaN and infinity out. Raises ValueError."""
    x = entry(raw, key, float)
    low, high = RANGES[key]
    if not low <= x <= high:
        raise ValueError(f"{key} must be between {low:g} and {high:g}, got {shown(x)}")
    return float(x)


def refuse_unsupported(raw):
    """Raises ValueError, naming what in config.json this file would compute wrongly or lacks."""
    arch = entry(raw, "model_type", str)
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture model_type={shown(arch)}: "
                         f"this code reads {', '.join(ARCHITECTURES)}")
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    refuse_changes(raw, ARCHITECTURES[arch]["name"])
    if entry(raw, "hidden_act", str, "silu") != "silu":
        raise ValueError(f"hidden_act={shown(raw['hidden_act'])} is not supported (silu is)")
    if entry(raw, "use_sliding_window", bool, False):
        raise ValueError("sliding-window attention (use_sliding_window) is not supported")
    # Qwen2 writes a width that use_sliding_window switches on; Mistral's counts, and has a default
    if arch == "mistral" and raw.get("sliding_window", 4096) is not None:
        raise ValueError(f"sliding-window attention (sliding_window="
                         f"{shown(raw.get('sliding_window', 4096))}) is not supported: null is")
    kinds, n = entry(raw, "layer_types", list, []), size(raw, "num_hidden_layers")
    if kinds and len(kinds) != n:
        raise ValueError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {n}")
    for kind in kinds:
        if kind != "full_attention":
            raise ValueError(f"layer_types: {shown(kind)} is not supported (full_attention is)")
    if raw.get("quantization_config"):
        raise ValueError("quantised weights (quantization_config) are not supported")


def refuse_changes(raw, name):
    """Raises ValueError for another model on top of these layers, for code of its own, and for keys
    by which others compute something else."""
    for found in entry(raw, "architectures", list, []):
        if found != name:
            raise ValueError(f"architectures: {shown(found)} is not supported ({name} is)")
    if raw.get("auto_map"):
        raise ValueError("auto_map: a model with code of its own is not supported")
    for key, known in SAID.items():
        if raw.get(key) is not None and raw[key] not in known:
            raise ValueError(f"{key}={shown(raw[key])} is not supported "
                             f"({shown(known[0])} is)")
    for key, value in raw.items():
        off = not value or value == 1 and value is not True
        if CHANGES.search(key) and key not in READ and not off:
            raise ValueError(f"{key[:100]}={shown(value)} is not supported")


def read_rope(raw):
    """rope_theta, rope_type and what that type needs, as transformers 4 and 5 write them. Raises
    ValueError for a rope_type that is neither "default" nor "llama3"."""
    # transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling (or nothing)
    rope, older = entry(raw, "rope_parameters", dict, {}), entry(raw, "rope_scaling", dict, {})
    if rope and older and rope != older:
        raise ValueError("rope_parameters and rope_scaling differ: which one counts?")
    rope = rope or older
    unknown = rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA3}
    kind = entry(rope, "rope_type", str, entry(rope, "type", str, "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError(
            "config.json gives no rope_theta, neither at the top nor in rope_parameters")
    for where in (raw, rope):
        if entry(where, "partial_rotary_factor", float, 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {shown(kind)} is not supported (default and llama3 are)")
    if unknown:
        raise ValueError(f"{shown(min(unknown))} of rope_parameters is not supported")
    read = dict(rope_type=kind, rope_theta=number(dict(rope_theta=theta), "rope_theta"))
    if kind == "default":
        return read
    missing = [key for key in LLAMA3 if key not in rope]
    if missing:
        raise ValueError(f"rope_type llama3 needs {', '.join(missing)}")
    read.update({key: number(rope, key) for key in LLAMA3})
    if read["low_freq_factor"] >= read["high_freq_factor"]:
        raise ValueError(f"low_freq_factor {read['low_freq_factor']:g} must be below "
                         f"high_freq_factor {read['high_freq_factor']:g}")
    return read


def rope_frequencies(config):
    """Radians per position of each rotated pair, (hs/2,) fp32. The rope_type "llama3" stretches
    slow pairs."""
    rope, hs = config.rope, config.head_size
    exponent = torch.arange(0, hs, 2, dtype=torch.int64).float() / hs  # (hs/2,)
    freq = rope["rope_theta"] ** -exponent
    if rope["rope_type"] == "default":
        return freq
    # turns within the original context: few -> stretched by `factor`, many -> untouched
    turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
    lo, hi = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - lo) / (hi - lo)).clamp(0, 1)
    return (1 - smooth) * freq / rope["factor"] + smooth * freq


# ---- the formulas between the matrix products ----

def rms_norm(x, weight, eps):
    """x (..., C), weight (C,) -> weight * x / sqrt(mean(x^2) + eps).

    Normalised in fp32, cast, then scaled: the order the checkpoints were trained with."""
    r = torch.rsqrt(widen(x).pow(2).mean(-1, keepdim=True) + eps)  # (..., 1)
    return weight * (widen(x) * r).to(x.dtype)


def rotate(q, k, cos, sin):
    """RoPE: q (N, nh, hs), k (N, nkv, hs), cos and sin (N, hs/2) fp32 -> q, k rotated."""
    if kernels(q):
        return fused.rotate(q, k, cos, sin)  # without gradients in place
    return rotate_one(q, cos, sin), rotate_one(k, cos, sin)


def rotate_one(x, cos, sin):
    """x (N, heads, hs): channel i pairs with i + hs/2, as checkpoints on the hub have it."""
    a, b = widen(x).chunk(2, dim=-1)                                        # (N, heads, hs/2)
    cos, sin = cos[:, None], sin[:, None]                                   # (N, 1, hs/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def swiglu(x):
    """x (N, 2 M), gate and up side by side -> silu(gate) * up (N, M)."""
    if kernels(x):
        return fused.swiglu(x)
    gate, up = x.chunk(2, dim=-1)                                           # (N, M)
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

    def __init__(self, c):
        super().__init__()
        self.c = c
        heads = c.n_head + 2 * c.n_kv_head
        self.qkv_proj = nn.Linear(c.width, heads * c.head_size, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.n_head * c.head_size, c.width, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_size, c.eps)
            self.k_norm = RMSNorm(c.head_size, c.eps)

    def forward(self, x, cos, sin):
        """x (N, C) -> q (N, nh, hs), k (N, nkv, hs), both rotated, v (N, nkv, hs)."""
        c = self.c
        qkv = self.qkv_proj(x).view(len(x), -1, c.head_size)                # (N, nh + 2 nkv, hs)
        q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)    # (N, nh or nkv, hs)
        if c.qk_norm:  # per head and before the rotation
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, k, cos, sin)
        return q, k, v


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.width, 2 * c.mlp_width, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.mlp_width, c.width, bias=c.mlp_bias)

    def forward(self, x):
        """x (N, C) -> (N, M), which down_proj takes back to the width (see Block)."""
        return swiglu(self.gate_up_proj(x))


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(c.width, c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.width, c.eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, attend, slices=True):
        """x (N, C) -> (N, C). slices: long inputs pass the MLP a slice at a time."""
        # x = x + attention(norm(x))
        q, k, v = self.self_attn(self.input_layernorm(x), cos, sin)         # (N, nh or nkv, hs)
        y = attend(self.layer, q, k, v).flatten(1)                          # (N, nh * hs)
        x = add_product(x, y, self.self_attn.o_proj)                        # x + o_proj(y)
        del q, k, v, y  # those of a long prompt are large
        # x = x + mlp(norm(x))
        if slices:
            return in_slices(self.add_mlp, x)
        return self.add_mlp(x)

    def add_mlp(self, x):
        y = self.mlp(self.post_attention_layernorm(x))                      # (N, M)
        return add_product(x, y, self.mlp.down_proj)                        # x + down_proj(y)


def add_product(x, y, linear):
    """x + linear(y), (N, C): the product adds to the residual stream as it is written, and
    where no gradient is recorded it writes into x itself."""
    if linear.bias is not None:
        x = x + linear.bias
    if torch.is_grad_enabled():
        return torch.addmm(x, y, linear.weight.t())
    return x.addmm_(y, linear.weight.t())


def in_slices(f, x):
    """f(x) for an f that treats rows x (N, C) -> (N, C) alone, MLP_ROWS rows at a time: the
    inner width of an MLP is the largest around. Without gradients the result goes into x.

    With gradients a slice is computed once more in the backward pass; slices are then 8
    times as long, for fewer launches."""
    if torch.is_grad_enabled():
        if len(x) <= 8 * MLP_ROWS:
            return f(x)
        return torch.cat([checkpoint(f, rows, **CHECKPOINT) for rows in x.split(8 * MLP_ROWS)])
    if len(x) <= MLP_ROWS:
        return f(x)
    for rows in x.split(MLP_ROWS):
        rows.copy_(f(rows))  # nothing to copy where add_product wrote into rows already
    return x


class Transformer(nn.Module):
    """`model(ids (N,), pos (N,), attend)` -> hidden states (N, C), normalised, for `model.logits`.

    ids, pos: int64 on the model's device; pos are true positions (RoPE), whatever the rows are.
    attend(layer, q (N, nh, hs), k (N, nkv, hs), v (N, nkv, hs)) -> (N, nh, hs)."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.width)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.norm = RMSNorm(c.width, c.eps)
        if not c.tied:
            self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)
        # whoever knows the tokenizer says more, see use_tokens. absent: not among the weights, and
        # no parameter of the checkpoint, so it is on a real device where they are not yet
        self.vocab_used = c.vocab_size
        self.absent = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.rope_freq = rope_frequencies(c)  # (hs/2,) fp32

    def _apply(self, fn, *args, **kwargs):
        # .to(), .bfloat16(): move the RoPE table, never round it
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
            raise ValueError(f"the tokenizer has {n} ids, the model {self.config.vocab_size}")
        absent = sorted(set(absent))
        if absent and not 0 <= absent[0] <= absent[-1] < n or len(absent) == n:
            raise ValueError(f"absent ids must be some of 0 to {n - 1}, got {len(absent)} from "
                             f"{absent[0]} to {absent[-1]}")
        self.vocab_used = n
        self.absent = torch.tensor(absent, dtype=torch.int64, device=self.device)

    def forward(self, ids, pos, attend, checkpointing=False):
        """checkpointing: keep one hidden state a layer for the backward pass and compute
        the rest again: less memory, a fifth more time (measured on an H100 at 1.5B
        parameters)."""
        with torch.cuda.device_of(ids):  # Triton launches on the current card, which may be another
            return self.run_layers(ids, pos, attend, checkpointing)

    def run_layers(self, ids, pos, attend, checkpointing):
        x = self.embed_tokens(ids)                                          # (N, C)
        at = pos.to(torch.promote_types(x.dtype, torch.float32))            # (N,)
        angle = at[:, None] * self.rope_freq                                # (N, hs/2)
        cos, sin = angle.cos(), angle.sin()
        del angle  # a long prompt's is not small
        for layer in self.layers:
            if checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, **CHECKPOINT)
            else:
                # slices would save nothing where the backward pass needs all they computed
                x = layer(x, cos, sin, attend, slices=not torch.is_grad_enabled())
        return self.norm(x)

    def parts(self):
        """{name in the checkpoint, without the leading "model.": (parameter, slice of its rows)};
        q, k, v and gate, up are rows of the joined matrices."""
        c = self.config
        out = {}
        for name, p in self.named_parameters():
            if "qkv_proj" in name:
                joined, names = "qkv_proj", ("q_proj", "k_proj", "v_proj")
                sizes = [n * c.head_size for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
            elif "gate_up_proj" in name:
                joined, names = "gate_up_proj", ("gate_proj", "up_proj")
                sizes = [c.mlp_width, c.mlp_width]
            else:
                out[name] = p, slice(len(p))
                continue
            for part, size, end in zip(names, sizes, itertools.accumulate(sizes)):
                out[name.replace(joined, part)] = p, slice(end - size, end)
        return out

    def tensors(self):
        """The same names, and the tensors under them, detached."""
        return {name: p.detach()[rows] for name, (p, rows) in self.parts().items()}

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
        with torch.device("meta"):  # no memory, no initial weights: all come from the checkpoint
            model = cls(config)
        check_names(path, model, tensors)
        model = model.to(dtype).to_empty(device=device)
        for name, t in model.tensors().items():
            file, weights = tensors[name]
            t.copy_(weights)
            # one reading without a copy: NaN and infinity reach the least or the largest
            if not torch.stack(t.aminmax()).isfinite().all():
                raise ValueError(f"{file}: tensor {name} holds NaN, infinity or what is infinite "
                                 f"in {str(dtype).removeprefix('torch.')}")
        model.rope_freq = rope_frequencies(config).to(model.device)
        return model

    def save_pretrained(self, path):
        """Write config.json and model.safetensors into folder `path`, as transformers'
        AutoModelForCausalLM reads them. Each file appears whole or not at all. Raises
        OSError."""
        os.makedirs(path, exist_ok=True)
        tensors = {}
        for name, t in self.tensors().items():
            if not name.startswith("lm_head."):
                name = "model." + name
            tensors[name] = t
        write_tensors(os.path.join(path, "model.safetensors"), tensors)
        raw = {k: v for k, v in self.config.raw.items() if k not in ("dtype", "torch_dtype")}
        # transformers 5 renamed torch_dtype; both readers find theirs
        raw["torch_dtype"] = raw["dtype"] = str(self.dtype).removeprefix("torch.")
        write_text(os.path.join(path, "config.json"), json.dumps(raw, indent=2))


# ---- files of a checkpoint ----

def find_checkpoint(path):
    """A local folder as it is; otherwise download the hub repository of that name. -> folder.
    Raises FileNotFoundError; ValueError for an adapter."""
    folder = os.path.expanduser(str(path))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is a file: name the folder that holds config.json")
    if is_of_a_run(os.path.join(folder, "config.json")):
        raise FileNotFoundError(f"{folder} is a run's folder: say --model={folder}/model or "
                                f"{folder}/best")
    is_path = folder.startswith(("/", ".", "~")) or folder.count("/") > 1
    if not os.path.isdir(folder) and is_path:
        raise FileNotFoundError(f"{shown(path)}: no such folder")
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download
        try:
            folder = snapshot_download(
                path, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"])  # the same weights in other layouts
        except Exception as e:
            raise FileNotFoundError(
                f"{shown(path)} is neither a local folder nor could it be downloaded from the "
                f"hub: {why_not(e)}") from None
    # transformers and peft would add it to the weights
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise ValueError(f"{folder} holds an adapter (adapter_config.json), which is not read "
                         "here: name a folder with merged weights, such as a run's model/ (in "
                         "peft: merge_and_unload, then save_pretrained)")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise FileNotFoundError(f"{folder} holds no config.json")
    return folder


def why_not(error):
    """What huggingface_hub raises, in a line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    if isinstance(error, GatedRepoError):
        return ("its owner has not given you access: ask on the model's page, then log in or set "
                "HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return "no model has this name, or only those who log in may see it (HF_TOKEN)"
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_config(file, device):
    """config.json -> Config for that device. Raises ValueError, which names the file."""
    raw = read_json(file)
    try:
        config = Config.from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if torch.device(device).type == "cuda" and config.head_size > 128:
        raise ValueError(f"{file}: the Triton kernels take head sizes up to 128, "
                         f"the model has {config.head_size}")
    return config


def read_tensors(path, config, dtype):
    """{name as in model.tensors(): (file, tensor)}, views of the files in folder `path`, read when
    copied.

    Where config.json says tied and the checkpoint holds a head that differs, the head counts, as
    in transformers; the config then says so. Raises ValueError for a tensor that is there twice,
    and for another number of layers: a model of 10**6 layers must not even be begun."""
    tensors = {}
    for file, name, t in read_safetensors(path):
        name = name.removeprefix("model.")
        if name in tensors:
            raise ValueError(f"{path}: tensor {shown(name)} is there twice")
        if not name.endswith("rotary_emb.inv_freq"):  # old exports store RoPE's table
            tensors[name] = file, t
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) < config.n_layer:
        raise ValueError(f"{path}: config.json says {config.n_layer} num_hidden_layers, "
                         f"the weights have {len(layers)}")
    if config.tied and {"lm_head.weight", "embed_tokens.weight"} <= tensors.keys():
        _, head = tensors["lm_head.weight"]
        _, embedding = tensors["embed_tokens.weight"]
        if torch.equal(head.to(dtype), embedding.to(dtype)):
            del tensors["lm_head.weight"]
        else:
            config.tied = config.raw["tie_word_embeddings"] = False
    return tensors


def check_names(path, model, tensors):
    """Raises ValueError unless the tensors are the model's, by name and shape."""
    want = model.tensors()
    missing, unused = want.keys() - tensors.keys(), tensors.keys() - want.keys()
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} tensor(s), e.g. {min(missing)}")
    if unused:
        raise ValueError(f"{path} has unused {len(unused)} tensor(s), e.g. {shown(min(unused))}")
    for name, t in want.items():
        file, found = tensors[name]
        if found.shape != t.shape:
            raise ValueError(f"{file}: {name} has shape {tuple(found.shape)}, "
                             f"config.json implies {tuple(t.shape)}")


def read_safetensors(path):
    """Yield (file, name, tensor) from model.safetensors or, without it, from the shards that the
    index lists; no stray file is read."""
    from safetensors import SafetensorError, safe_open
    shards = read_index(path) or {"model.safetensors": None}
    for shard, listed in shards.items():
        file = os.path.join(path, shard)
        if not os.path.isfile(file):  # a FIFO would be waited for
            why = ": weights are read from safetensors, no .bin"
            if listed:
                why = ", although model.safetensors.index.json lists it"
            raise FileNotFoundError(f"{file} is missing or no file{why}")
        try:
            with safe_open(file, framework="pt") as f:
                lost = set(listed or ()) - set(f.keys())
                if lost:
                    raise ValueError(f"{file} lacks tensor {shown(min(lost))}, which "
                                     "model.safetensors.index.json lists")
                for name in listed or f.keys():
                    kind = f.get_slice(name).get_dtype()
                    if kind not in DTYPES:
                        raise ValueError(f"{file}: tensor {shown(name)} has dtype {kind}, "
                                         f"this code reads {', '.join(DTYPES)}")
                    yield file, name, f.get_tensor(name)
        # TypeError: a tensor without elements whose other sizes are absurd
        except (SafetensorError, TypeError) as e:
            why = " ".join(str(e).split())[:200]
            raise ValueError(f"{file} is truncated or not a safetensors file: {why}") from None


def read_index(path):
    """{shard: its tensors} of a checkpoint in shards, None of one in a single file. Raises
    ValueError, which names the file; a shard outside the folder is refused."""
    index = os.path.join(path, "model.safetensors.index.json")
    # as in transformers: a checkpoint saved over a sharded one leaves the old index behind
    if os.path.exists(os.path.join(path, "model.safetensors")) or not os.path.exists(index):
        return None
    shards = {}
    try:
        for name, shard in entry(read_json(index), "weight_map", dict).items():
            if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
                raise ValueError(f"{shown(name)} is in {shown(shard)}, which is no name of a "
                                 ".safetensors file in this folder")
            shards.setdefault(shard, []).append(name)
        if not shards:
            raise ValueError("weight_map lists no tensor")
    except ValueError as e:
        raise ValueError(f"{index} is not a valid index of shards: {e}") from None
    return dict(sorted(shards.items()))
