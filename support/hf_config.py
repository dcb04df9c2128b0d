"""
config.json of a Hugging Face checkpoint -> Config, the sizes that model.py builds from.

The idea. A key that this code does not know may change what is computed, and a model that computes
something else still answers. So what is read is checked against its range, and what belongs to
families that are not read is refused by name, in one line.
"""
import re
from dataclasses import dataclass, field

import torch

from support.jsonfile import entry, read_json, shown

# the class of an architecture's language model in transformers, and which tensors it has beyond the
# common ones; None: config.json's attention_bias says
ARCHITECTURES = {
    "llama": dict(name="LlamaForCausalLM", qkv_bias=None, o_bias=None, qk_norm=False),
    "qwen2": dict(name="Qwen2ForCausalLM", qkv_bias=True, o_bias=False, qk_norm=False),
    "qwen3": dict(name="Qwen3ForCausalLM", qkv_bias=None, o_bias=None, qk_norm=True),
    "mistral": dict(
        name="MistralForCausalLM", qkv_bias=False, o_bias=False, qk_norm=False),
}
# keys of config.json that change what is computed, in families that are not read here (Granite,
# Gemma, SmolLM3, MiniCPM, GPT-NeoX, mixtures of experts), quantised weights, code of a model's own:
# one that is not off is refused, whatever its family; but for those that are read below
CHANGES = re.compile(
    "multiplier|scal|soft_?cap|no_?rope|interleav|clip|window|chunk|expert|mrope|mup|"
    "qk_|query_|temperature_tuning|local_|global_|bidirect|alibi|non_causal|rotary|"
    "rope_(pct|ratio)|output_gate|parallel_(residual|attn|block)|zero_centered|"
    "post_norm|kv_shared|head_bias|k_eq_v|compression|pruned|encoder_decoder|"
    "cross_attention|sink|quantization_config|auto_map")
READ = "rope_scaling sliding_window max_window_layers partial_rotary_factor".split()
# keys that say what is computed here too, with the values that say so
SAME_HERE = dict(
    hidden_act=("silu",), hidden_activation=("silu",), activation_function=("silu",),
    is_causal=(True,), use_rope=(True,), position_embedding_type=("rope", "rotary"),
    norm_type=("rmsnorm", "rms_norm", "RMSNorm"))
LLAMA3 = """factor low_freq_factor high_freq_factor
    original_max_position_embeddings""".split()
LARGEST = 10**7  # above every size in config.json
MOST_LAYERS = 10**4  # a million take a gigabyte before the weights are asked for
RANGES = dict(  # what makes sense in config.json, far beyond what is used
    rms_norm_eps=(1e-20, 1), rope_theta=(1, 1e12), factor=(1, 1e6),
    low_freq_factor=(1e-6, 1e6), high_freq_factor=(1e-6, 1e6),
    original_max_position_embeddings=(1, LARGEST))


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
    raw: dict = field(default_factory=dict, repr=False)  # as read, for save_pretrained

    @classmethod
    def from_dict(cls, raw):
        """config.json as a dict -> Config. Raises ValueError for what would be computed wrongly."""
        refuse_unsupported(raw)
        arch = raw["model_type"]
        has = ARCHITECTURES[arch]
        bias = entry(raw, "attention_bias", bool, False)
        width = size(raw, "hidden_size")
        n_head = size(raw, "num_attention_heads")
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
            qkv_bias=bias if has["qkv_bias"] is None else has["qkv_bias"],
            o_bias=bias if has["o_bias"] is None else has["o_bias"],
            mlp_bias=entry(raw, "mlp_bias", bool, False),
            qk_norm=has["qk_norm"],
            raw=raw,
        )
        config.check()
        return config

    def check(self):
        """Raises ValueError for sizes that do not go together."""
        if self.head_size % 2:
            raise ValueError(f"head_dim must be even, got {self.head_size}")
        if self.n_head * self.head_size >= LARGEST:
            raise ValueError(f"num_attention_heads {self.n_head} x head_dim "
                             f"{self.head_size} is more than any model has")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"{self.n_head} query heads do not divide into "
                             f"{self.n_kv_head} KV heads")

    def kv_bytes_per_token(self, dtype):
        """Bytes of one token in a dense KV cache: keys and values of every layer and KV head."""
        return 2 * self.n_layer * self.n_kv_head * self.head_size * dtype.itemsize


def read_config(file, device):
    """config.json -> Config for that device. Raises ValueError, which names the file."""
    raw = read_json(file)
    try:
        config = Config.from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if torch.device(device).type == "cuda" and config.head_size > 128:
        raise ValueError(f"{file}: the Triton kernels take head sizes up to 128, the "
                         f"model has {config.head_size}")
    return config


def size(raw, key, default=None):
    """A positive integer of a size that models have. Raises ValueError."""
    n = entry(raw, key, int, default)
    most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST
    if not 0 < n < most:
        raise ValueError(
            f"{key} must be a positive integer below {most:,}, got {shown(n)}")
    return n


def number(raw, key):
    """A number in its range, which keeps zero, NaN and infinity out. Raises ValueError."""
    value = entry(raw, key, float)
    low, high = RANGES[key]
    if not low <= value <= high:
        raise ValueError(
            f"{key} must be between {low:g} and {high:g}, got {shown(value)}")
    return float(value)


def refuse_unsupported(raw):
    """Raises ValueError, naming what in config.json would be computed wrongly: another model on top
    of these layers, and keys by which others compute something else."""
    arch = entry(raw, "model_type", str)
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture model_type={shown(arch)}: this code "
                         f"reads {', '.join(ARCHITECTURES)}")
    name = ARCHITECTURES[arch]["name"]
    for found in entry(raw, "architectures", list, []):
        if found != name:
            raise ValueError(
                f"architectures: {shown(found)} is not supported ({name} is)")
    for key, known in SAME_HERE.items():
        if raw.get(key) is not None and raw[key] not in known:
            raise ValueError(
                f"{key}={shown(raw[key])} is not supported ({shown(known[0])} is)")
    for key, value in raw.items():
        one = value == 1 and value is not True and not key.startswith("use_")
        if CHANGES.search(key) and key not in READ and value and not one:
            raise ValueError(f"{key[:100]}={shown(value)} is not supported")
    # Qwen2 writes a width that use_sliding_window switches on; Mistral's counts, and has a default
    window = raw.get("sliding_window", 4096) if arch == "mistral" else None
    if window is not None:
        raise ValueError(f"sliding-window attention (sliding_window={shown(window)}) "
                         "is not supported: null is")
    kinds = entry(raw, "layer_types", list, [])
    n_layer = size(raw, "num_hidden_layers")
    if kinds and len(kinds) != n_layer:
        raise ValueError(f"layer_types has {len(kinds)} entries, num_hidden_layers is "
                         f"{n_layer}")
    for kind in kinds:
        if kind != "full_attention":
            raise ValueError(
                f"layer_types: {shown(kind)} is not supported (full_attention is)")


def read_rope(raw):
    """rope_theta, rope_type and what that type needs, as transformers 4 and 5 write them. Raises
    ValueError for a rope_type that is neither "default" nor "llama3"."""
    # transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling (or nothing)
    rope = entry(raw, "rope_parameters", dict, {})
    older = entry(raw, "rope_scaling", dict, {})
    if rope and older and rope != older:
        raise ValueError("rope_parameters and rope_scaling differ: which one counts?")
    rope = rope or older
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA3}
    unknown = rope.keys() - known
    kind = entry(rope, "rope_type", str, entry(rope, "type", str, "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json gives no rope_theta, neither at the top nor in "
                         "rope_parameters")
    for where in (raw, rope):
        if entry(where, "partial_rotary_factor", float, 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"rope_type {shown(kind)} is not supported (default and llama3 are)")
    if unknown:
        raise ValueError(f"{shown(min(unknown))} of rope_parameters is not supported")
    read = dict(rope_type=kind, rope_theta=number(dict(rope_theta=theta), "rope_theta"))
    if kind == "default":
        return read
    read.update({key: number(rope, key) for key in LLAMA3})
    if read["low_freq_factor"] >= read["high_freq_factor"]:
        raise ValueError(f"low_freq_factor {read['low_freq_factor']:g} must be below "
                         f"high_freq_factor {read['high_freq_factor']:g}")
    return read
