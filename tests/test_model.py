"""
model.py against transformers: every checkpoint layout of tiny Llama, Qwen2 and Qwen3 models whose
parameters are all random (transformers leaves norms at 1 and biases at 0, which hides a loader that
drops them). With SMD_REAL_WEIGHTS=folder holding smollm2/ and qwen/, real checkpoints too.
"""
import json
import math
import os
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import model as model_file
from fast import residual
from model import Config, RMSNorm, Transformer, find_checkpoint
from support.checkpoint import UNFINISHED

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

transformers.utils.logging.disable_progress_bar()
REAL = os.environ.get("SMD_REAL_WEIGHTS")
N = 150  # tokens; the llama3 models' original context is 48
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=48)
SMALL = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=101, max_position_embeddings=512,
    bos_token_id=None, eos_token_id=None)
MODELS = {
    "llama": (transformers.LlamaConfig, dict(rms_norm_eps=1e-5)),
    "llama-mha": (transformers.LlamaConfig, dict(num_key_value_heads=4)),
    "llama-bias": (transformers.LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama3": (transformers.LlamaConfig, dict(rope_parameters=LLAMA3)),
    "qwen2": (
        transformers.Qwen2Config, dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=32)),
    "qwen3-bias": (
        transformers.Qwen3Config, dict(head_dim=32, attention_bias=True, rope_parameters=LLAMA3)),
    "mistral": (transformers.MistralConfig, dict(head_dim=32, sliding_window=None)),
}


def attend(layer, q, k, v):
    """Causal attention: q (N, nh, hs), k and v (N, nkv, hs) -> (N, nh, hs)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (heads, N, hs)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))  # (nh, N, hs)
    y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return y.transpose(0, 1)


def logits(model, ids):
    return model.logits(model(ids, torch.arange(len(ids)), attend))


def hf_logits(model, ids):
    return model(ids[None]).logits[0]


def make(folder, name, tied=False, seed=0, **save):
    """A random transformers model of that name, saved into `folder` -> the model."""
    torch.manual_seed(seed)
    kind, keys = MODELS[name]
    config = kind(**{**SMALL, **keys}, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for key, p in model.named_parameters():
        if "norm" in key:
            p.data.normal_(1, 0.3)
        else:
            p.data.normal_(0, 0.5 if p.dim() == 1 else 0.2)
    model.save_pretrained(folder, **save)
    return model


def edit(folder, change):
    """Apply change(config dict) to folder/config.json."""
    file = os.path.join(folder, "config.json")
    with open(file) as f:
        raw = json.load(f)
    change(raw)
    with open(file, "w") as f:
        json.dump(raw, f)


def old_layout(raw):
    """As transformers 4 wrote it: rope_theta at the top, rope_scaling or null beside it,
    torch_dtype."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    raw["torch_dtype"] = raw.pop("dtype")


def older_layout(raw):
    """The same with "type" for "rope_type", and nothing that could be left out."""
    old_layout(raw)
    if raw["rope_scaling"]:
        raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if not raw.get(key):
            raw.pop(key, None)
    for key in ("layer_types", "hidden_act"):
        raw.pop(key, None)
    if raw.get("head_dim") == 12:  # width / heads
        raw.pop("head_dim")


def loaded(folder, dtype=torch.float32):
    """The checkpoint as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


IDS = torch.randint(0, 101, (N,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers_in_every_layout(tmp_path, name, tied):
    hf = make(tmp_path / "new", name, tied)
    make(tmp_path / "shards", name, tied, max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    for layout in (old_layout, older_layout):
        shutil.copytree(tmp_path / "new", tmp_path / layout.__name__)
        edit(tmp_path / layout.__name__, layout)
    with torch.no_grad():
        ref, worst = hf_logits(hf, IDS), 0
        assert ref.std() > 0.5
        for folder in ("new", "shards", "old_layout", "older_layout"):
            model = Transformer.from_pretrained(tmp_path / folder)
            assert model.config.tied == tied and model.dtype == torch.float32
            worst = max(worst, (logits(model, IDS) - ref).abs().max().item())
        print(f"{name}: logits std {ref.std():.2f}, largest difference {worst:.1e}")
        assert worst <= 1e-4
        # and back: transformers reads what we save
        model.save_pretrained(tmp_path / "saved")
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", output_loading_info=True)
        for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not report[keys]
        assert (hf_logits(again, IDS) - ref).abs().max() <= 1e-4
        ours = Transformer.from_pretrained(tmp_path / "saved")
        assert torch.equal(logits(ours, IDS), logits(model, IDS))
    F.cross_entropy(logits(model, IDS[:-1]), IDS[1:]).backward()
    F.cross_entropy(hf_logits(hf, IDS[:-1]), IDS[1:]).backward()
    theirs = {k.removeprefix("model."): p.grad for k, p in hf.named_parameters()}
    for p in model.parameters():
        p.data = p.grad
    ours = model.tensors()  # the gradients, by the names of the checkpoint
    assert ours.keys() == theirs.keys() and ("lm_head.weight" in ours) == (not tied)
    for key, grad in theirs.items():
        assert (ours[key] - grad).norm() <= 1e-4 * grad.norm(), key


@pytest.mark.parametrize("change", (0.0, 1e-3), ids=("equal head", "another head"))
def test_tied_checkpoint_that_carries_a_head(tmp_path, change):
    """As in transformers: an equal head is tied, another one is kept, and kept when saved."""
    make(tmp_path / "a", "qwen2", tied=True)
    file = tmp_path / "a" / "model.safetensors"
    tensors = safetensors.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7] += change
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    model = Transformer.from_pretrained(tmp_path / "a")
    shared = model.head.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert shared == model.config.tied == (change == 0)
    model.save_pretrained(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert saved["tie_word_embeddings"] == (change == 0)
    with torch.no_grad():
        ours = logits(model, IDS)
        for folder in (tmp_path / "a", tmp_path / "b"):
            assert (hf_logits(loaded(folder), IDS) - ours).abs().max() <= 1e-4
        assert torch.equal(logits(Transformer.from_pretrained(tmp_path / "b"), IDS), ours)
        # the control: the embedding as head differs in this one token, where there is a difference
        tied = F.linear(model(IDS, torch.arange(N), attend), model.embed_tokens.weight)
    gap = (tied - ours).abs().amax(0)
    assert (gap[7] > 1e-3) == (change > 0) and gap[:7].max() <= 1e-4
    # a head that the dtype cannot tell from the embedding is equal, there too
    half = Transformer.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    with torch.no_grad():
        gap = hf_logits(loaded(tmp_path / "a", torch.bfloat16), IDS).float() - logits(half, IDS)
        assert gap.norm() <= 2e-2 * ours.norm()


def filled(key, value):
    return lambda model: model.tensors()[key].fill_(value)


def plain_rope(model):
    """RoPE of theta 10000 without scaling, for heads of 12"""
    model.rope_freq = 10000.0 ** -(torch.arange(0, 12, 2) / 12)


BROKEN = {  # what a careless loader gets wrong -> model, and what it then does
    "q bias dropped": ("qwen2", filled("layers.0.self_attn.q_proj.bias", 0)),
    "v bias dropped": ("qwen2", filled("layers.1.self_attn.v_proj.bias", 0)),
    "o bias dropped": ("llama-bias", filled("layers.0.self_attn.o_proj.bias", 0)),
    "mlp bias dropped": ("llama-bias", filled("layers.0.mlp.gate_proj.bias", 0)),
    "q_norm left at 1": ("qwen3", filled("layers.0.self_attn.q_norm.weight", 1)),
    "k_norm left at 1": ("qwen3", filled("layers.0.self_attn.k_norm.weight", 1)),
    "last norm left at 1": ("llama", filled("norm.weight", 1)),
    "llama3 scaling skipped": ("llama3", plain_rope),
    "other rope_theta": ("qwen2", plain_rope),
}


@pytest.mark.parametrize("what", BROKEN)
def test_negative_controls(tmp_path, what):
    name, harm = BROKEN[what]
    hf = make(tmp_path, name)
    model = Transformer.from_pretrained(tmp_path)
    with torch.no_grad():
        ref = hf_logits(hf, IDS)
        assert (logits(model, IDS) - ref).abs().max() <= 1e-4
        harm(model)
        gap = (logits(model, IDS) - ref).abs().max().item()
    print(f"{what}: {gap:.2f}")
    assert gap > 1e-2


def raw_config(**keys):
    return {**transformers.LlamaConfig(**SMALL).to_dict(), **keys}


def test_bf16_leaves_the_rope_table_alone(tmp_path):
    make(tmp_path, "llama3")
    model = Transformer.from_pretrained(tmp_path)
    exact, pos = model.rope_freq.clone(), torch.arange(1024.0)[:, None]
    want = (pos.double() * exact.double()).cos()
    casts = (model.bfloat16(), model.to(torch.bfloat16),
             Transformer.from_pretrained(tmp_path, dtype=torch.bfloat16))
    for cast in casts:
        assert cast.dtype == torch.bfloat16
        assert cast.rope_freq.dtype == torch.float32 and torch.equal(cast.rope_freq, exact)
        assert ((pos * cast.rope_freq).cos() - want).abs().max() < 4e-3
    assert ((pos * exact.bfloat16().float()).cos() - want).abs().max() > 0.1


def test_norm_casts_before_it_scales():
    torch.manual_seed(0)
    norm, x = RMSNorm(64, 1e-6), torch.randn(8, 64).bfloat16()
    norm.weight.data.normal_(1, 0.3)
    norm.bfloat16()
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), norm.weight * y.bfloat16())
    assert not torch.equal(norm(x), (norm.weight.float() * y).bfloat16())


@pytest.mark.parametrize("name", ("llama-bias", "llama3", "qwen2", "qwen3"))
def test_bf16_is_as_close_to_fp32_as_transformers(tmp_path, name):
    hf = make(tmp_path, name)
    with torch.no_grad():
        ref = hf_logits(hf, IDS)
        hf = loaded(tmp_path, torch.bfloat16)  # .bfloat16() would round its RoPE
        theirs = hf_logits(hf, IDS).float()
        ours = logits(Transformer.from_pretrained(tmp_path, dtype=torch.bfloat16), IDS)
    assert ours.dtype == torch.float32

    def gap(x, y):
        return ((x - y).norm() / ref.norm()).item()

    a, b, c = gap(ours, ref), gap(theirs, ref), gap(ours, theirs)
    print(f"{name}: relative distance from fp32 {a:.4f} (transformers {b:.4f}), "
          f"from each other {c:.4f}")
    assert a <= 1.1 * b and c <= 2e-2


def test_saved_bf16_checkpoint(tmp_path):
    """The dtype is written under its old and its new name, and transformers 5 loads bf16 as bf16
    when asked for "auto"."""
    hf = make(tmp_path / "a", "qwen3")
    ours = Transformer.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    ours.save_pretrained(tmp_path / "b")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
    again = loaded(tmp_path / "b", "auto")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    wide = loaded(tmp_path / "b")
    with torch.no_grad():
        ours = logits(Transformer.from_pretrained(tmp_path / "b"), IDS)
        assert (hf_logits(wide, IDS) - ours).abs().max() <= 1e-4
        assert (hf_logits(hf, IDS) - ours).abs().max() > 1e-3  # the weights really were rounded
    make(tmp_path / "c", "llama")
    Transformer.from_pretrained(tmp_path / "c").save_pretrained(tmp_path / "c")  # in place
    assert loaded(tmp_path / "c", "auto").dtype == torch.float32


@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_padded_vocabulary_leaves_the_support(tmp_path, tied):
    hf = make(tmp_path / "a", "qwen2", tied)
    model = Transformer.from_pretrained(tmp_path / "a")
    model.vocab_used = 90
    ids = IDS[IDS < 90]
    out = logits(model, ids)
    assert out.shape[1] == 90 and (out - hf_logits(hf, ids)[:, :90]).abs().max() <= 1e-4
    out.logsumexp(-1).sum().backward()
    grad = (model.embed_tokens if tied else model.lm_head).weight.grad
    assert (grad[90:] == 0).all() and (grad[:90].abs().sum(1) > 0).all()
    # the padding is saved, or other readers would see a wrong shape
    model.save_pretrained(tmp_path / "b")
    a, b = (Transformer.from_pretrained(tmp_path / name) for name in "ab")
    assert torch.equal(a.head, b.head)


def test_files_that_are_not_read(tmp_path):
    """A stray file beside shards; shards and their index where a later model was saved over them,
    in transformers too."""
    hf = make(tmp_path, "llama", max_shard_size="20KB")
    stray = {"model.norm.weight": torch.zeros(48)}
    safetensors.save_file(stray, tmp_path / "zz-stray.safetensors")
    model = Transformer.from_pretrained(tmp_path)
    assert torch.equal(model.norm.weight, hf.model.norm.weight)
    model.norm.weight.data.fill_(3)
    model.save_pretrained(tmp_path)
    for again in (Transformer.from_pretrained(tmp_path), loaded(tmp_path).model):
        assert (again.norm.weight == 3).all()


CONFIG_ERRORS = {
    "unknown architecture model_type='gemma'": dict(model_type="gemma"),
    "rope_type 'yarn' is not supported": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)),
    "rope_type 'linear' is not supported": dict(
        rope_parameters=None, rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.0)),
    "^factor is missing": dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=1e4, low_freq_factor=1.0,
        original_max_position_embeddings=64)),
    "no rope_theta": dict(rope_parameters=None),
    "hidden_act='gelu'": dict(hidden_act="gelu"),
    "use_sliding_window=true": dict(use_sliding_window=True),
    "layer_types: 'sliding_attention'": dict(layer_types=["full_attention", "sliding_attention"]),
    "quantization_config": dict(quantization_config=dict(bits=4)),
    "4 query heads do not divide into 3": dict(num_key_value_heads=3),
    "partial_rotary_factor": dict(partial_rotary_factor=0.5),
    "rope_parameters and rope_scaling differ": dict(
        rope_scaling=dict(rope_type="yarn", factor=4.0)),
    "'full_attention' of rope_parameters": dict(
        rope_theta=1e4, rope_parameters=dict(full_attention=dict(rope_type="yarn"))),
    "'mrope_section' of rope_parameters": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[16, 24, 24])),
    "architectures: 'LlamaForSequenceClassification'": dict(
        architectures=["LlamaForSequenceClassification"]),
    "auto_map": dict(auto_map=dict(AutoModelForCausalLM="modeling_mine.Mine")),
    "is_causal=false": dict(is_causal=False),
    "layer_types has 3 entries, num_hidden_layers is 2": dict(layer_types=["full_attention"] * 3),
}
# keys of other families and values that change something; {key: a value that does not}
CHANGES = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0156,
    logits_scaling=8.0, logit_scale=0.0625, scale_emb=12, scale_depth=1.4, clip_qkv=8.0,
    final_logit_softcapping=30.0, attn_logit_softcapping=50.0, query_pre_attn_scalar=256,
    no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, rope_interleaved=True,
    attention_chunk_size=8192, sliding_window_pattern=6, num_local_experts=8, num_experts=128,
    use_mrope=True, use_qk_norm=True, attn_temperature_tuning=True, rope_local_base_freq=1e4,
    use_bidirectional_attention=True, use_mup=True, use_rope=False, norm_type="layer_norm",
    position_embedding_type="alibi", rotary_pct=0.25, rope_pct=0.5, rotary_dim=64, rope_ratio=2.0,
    hidden_activation="gelu", activation_function="relu", attn_output_gate=True,
    use_parallel_residual=True, zero_centered_gamma=True, post_norm=True, num_kv_shared_layers=8,
    lm_head_bias=True, attention_k_eq_v=True, compression_config=dict(bits=4),
    pruned_heads={"0": [1]}, is_encoder_decoder=True, add_cross_attention=True, num_sink_tokens=4)
HARMLESS = dict(
    embedding_multiplier=1.0, residual_multiplier=1, final_logit_softcapping=None, num_experts=0,
    rope_interleaved=False, use_mrope=False, no_rope_layers=[], sliding_window=4096,
    max_window_layers=21, chunk_size_feed_forward=0, is_llama_config=True, pretraining_tp=1,
    is_causal=True, auto_map=None, use_rope=True, position_embedding_type="rope", rotary_pct=1.0,
    rope_pct=1, rotary_dim=None, rope_ratio=1.0, hidden_activation=None, norm_type="rms_norm",
    activation_function="silu", attn_output_gate=False, use_parallel_residual=False,
    num_kv_shared_layers=0, lm_head_bias=False, compression_config=None, pruned_heads={},
    is_encoder_decoder=False, partial_rotary_factor=1.0, layer_types=["full_attention"] * 2)


def test_refuses_what_other_families_compute():
    """A config that names a known family, with a key by which another computes something else."""
    Config.from_dict(raw_config(**HARMLESS))  # the control
    for key, value in CHANGES.items():
        refused(raw_config(**{key: value}), f"{key}=.* is not supported", read=Config.from_dict)


def test_mistral_has_a_window_unless_it_says_null():
    raw = raw_config(model_type="mistral", architectures=["MistralForCausalLM"])
    assert "sliding_window" not in raw
    for size, window in ((4096, {}), (32768, dict(sliding_window=32768))):
        says = rf"sliding-window attention \(sliding_window={size}\)"
        refused(raw | window, says, read=Config.from_dict)
    assert Config.from_dict({**raw, "sliding_window": None}).arch == "mistral"


# config.json of checkpoints on the hub, as far as this code reads it, and their parameters
SHAPES = """
    name arch width MLP layers heads KV vocabulary positions theta tied head parameters
    Llama-3.2-1B llama 2048 8192 16 32 8 128256 131072 5e5 tied 64 1_235_814_400
    Llama-3.2-3B llama 3072 8192 28 24 8 128256 131072 5e5 tied 128 3_212_749_824
    SmolLM2-135M llama 576 1536 30 9 3 49152 8192 1e5 tied - 134_515_008
    SmolLM2-360M llama 960 2560 32 15 5 49152 8192 1e5 tied - 361_821_120
    SmolLM2-1.7B llama 2048 8192 24 32 32 49152 8192 13e4 tied - 1_711_376_384
    TinyLlama-1.1B llama 2048 5632 22 32 4 32000 2048 1e4 - - 1_100_048_384
    Falcon3-1B llama 2048 8192 18 8 4 131072 8192 1000042 - 256 1_669_408_768
    Qwen2.5-0.5B qwen2 896 4864 24 14 2 151936 32768 1e6 tied - 494_032_768
    Qwen2.5-1.5B qwen2 1536 8960 28 12 2 151936 32768 1e6 tied - 1_543_714_304
    Qwen2.5-3B qwen2 2048 11008 36 16 2 151936 32768 1e6 tied - 3_085_938_688
    Qwen2.5-Math-1.5B qwen2 1536 8960 28 12 2 151936 4096 1e4 tied - 1_543_714_304
    DeepSeek-R1-Distill-Qwen-1.5B qwen2 1536 8960 28 12 2 151936 131072 1e4 - - 1_777_088_000
    Qwen3-0.6B qwen3 1024 3072 28 16 8 151936 40960 1e6 tied 128 596_049_920
    Qwen3-1.7B qwen3 2048 6144 28 16 8 151936 40960 1e6 tied 128 1_720_574_976
    Qwen3-4B qwen3 2560 9728 36 32 8 151936 40960 1e6 tied 128 4_022_468_096
    Mistral-7B-v0.3 mistral 4096 14336 32 32 8 32768 32768 1e6 - - 7_248_023_552
""".split("\n")[2:-1]
FAMILIES = {line.split()[0]: line.split()[1:] for line in SHAPES}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "max_position_embeddings")
LLAMA32 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192)
ALSO = {  # by the beginning of a name: what else stands there
    "Llama-3.2": dict(rope_scaling=LLAMA32), "SmolLM2": dict(rope_interleaved=False),
    "Falcon3": dict(activation="swiglu"), "Mistral": dict(sliding_window=None),
    "SmolLM2-135M": dict(is_llama_config=True), "DeepSeek": dict(use_mrope=False)}


def family(name):
    """-> config.json, parameters"""
    arch, *sizes, theta, tied, head, parameters = FAMILIES[name]
    raw = dict(zip(SIZES, map(int, sizes)), model_type=arch, rope_theta=float(theta),
               rms_norm_eps=1e-6, tie_word_embeddings=tied == "tied", hidden_act="silu")
    if head != "-":
        raw["head_dim"] = int(head)
    if arch == "qwen2":
        raw |= dict(use_sliding_window=False, sliding_window=int(sizes[-1]), max_window_layers=21)
    for start, keys in ALSO.items():
        if name.startswith(start):
            raw |= keys
    return raw, int(parameters)


def test_families_have_as_many_parameters_as_they_say():
    for name in FAMILIES:
        raw, parameters = family(name)
        assert count(raw) == parameters, name
    raw |= dict(tie_word_embeddings=not raw["tie_word_embeddings"])
    assert count(raw) != parameters  # the control


def count(raw):
    """Parameters of the model that config.json describes."""
    with torch.device("meta"):
        net = Transformer(Config.from_dict(raw))
    return sum(p.numel() for p in net.parameters())


UNREAD = ("smollm3 olmo2 gemma3_text phi3 granite granitemoehybrid qwen3_moe qwen3_5 qwen3_next "
          "lfm2 ministral ministral3").split()


def test_families_that_are_refused_by_name():
    for arch in UNREAD:
        refused(raw_config(model_type=arch), f"unknown architecture model_type='{arch}': this code",
                read=Config.from_dict)


def llama3(**keys):
    return dict(rope_parameters={**LLAMA3, **keys})


NUMBERS = {  # of config.json: where they stand, and what is refused beside NaN, infinity and 0
    "hidden_size": (dict, (-48, 10**9, 48.0, "48", True, [48])),
    "num_attention_heads": (dict, (-4, 10**9, "4")),
    "num_key_value_heads": (dict, (-2, [], "")),
    "num_hidden_layers": (dict, (-1, 10**9, 2.0, False)),
    "head_dim": (dict, (-12, 13, 10**7 - 2, {})),
    "vocab_size": (dict, (-101, 10**12)),
    "intermediate_size": (dict, (-64, None)),
    "max_position_embeddings": (dict, (-1, 2.5)),
    "rms_norm_eps": (dict, (-1e-6, 2, "1e-6", True, None)),
    "rope_theta": (llama3, (-1e4, 0.5, 1e300, "1e4", True)),
    "factor": (llama3, (-8.0, 0.5, "8")),
    "low_freq_factor": (llama3, (-1.0, 4.0, 5.0, None)),
    "high_freq_factor": (llama3, (-4.0, [4.0])),
    "original_max_position_embeddings": (llama3, (-48, "48")),
}
TYPES = {  # of the others
    "tie_word_embeddings": ("false", 0, []), "attention_bias": ("true", 1), "mlp_bias": ("no",),
    "use_sliding_window": ("false", 1), "model_type": (None, 7, ["llama"], {}),
    "hidden_act": (3, ["silu"]), "layer_types": ("full_attention", [None], {}),
    "rope_parameters": ([], "llama3", True, dict(rope_theta=1e4, rope_type=[])),
    "rope_scaling": (1e4,), "partial_rotary_factor": ("1", True, 0),
}


@pytest.mark.parametrize("key", [*NUMBERS, *TYPES])
def test_refuses_what_config_json_cannot_mean(key):
    """Every number that is not finite, positive and in its range, every value of another type, in
    one line that names the key."""
    place, values = NUMBERS.get(key, (dict, TYPES.get(key)))
    if key in NUMBERS:
        values = (*values, 0, math.nan, math.inf, -math.inf)
    raw = raw_config(**llama3())
    Config.from_dict(raw)  # the control
    if key == "rope_scaling":
        raw.pop("rope_parameters")
    for value in values:
        refused(raw | place(**{key: value}), key.removesuffix("parameters"), read=Config.from_dict)


def test_null_in_config_json_is_the_default():
    null = dict.fromkeys(("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias",
                          "tie_word_embeddings", "layer_types", "use_sliding_window"))
    c = Config.from_dict(raw_config(**null))
    assert (c.n_kv_head, c.head_size) == (4, 12)
    assert not (c.qkv_bias or c.o_bias or c.mlp_bias or c.tied)
    # Qwen3's default does not depend on the width
    qwen3 = raw_config(**null, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert Config.from_dict(qwen3).head_size == 128
    given = dict(num_key_value_heads=2, head_dim=8, attention_bias=True, tie_word_embeddings=True)
    c = Config.from_dict(raw_config(**given))  # the control
    assert (c.n_kv_head, c.head_size, c.qkv_bias, c.tied) == (2, 8, True, True)


def test_absurd_sizes_are_refused_before_anything_is_allocated(tmp_path):
    """Within the range of a size, but not what the weights are: compared on paper."""
    make(tmp_path, "llama")
    for keys in (dict(hidden_size=9_999_992), dict(intermediate_size=9_999_999),
                 dict(vocab_size=9_999_999)):
        edit(tmp_path, lambda raw: raw.update(SMALL | keys))
        refused(tmp_path, "has shape")
    edit(tmp_path, lambda raw: raw.update(SMALL | dict(num_hidden_layers=9_999)))
    refused(tmp_path, "says 9999 num_hidden_layers, the weights have 2")
    edit(tmp_path, lambda raw: raw.update(SMALL))
    Transformer.from_pretrained(tmp_path)  # the control


def refused(given, says, error=ValueError, read=Transformer.from_pretrained):
    with pytest.raises(error, match=says) as e:
        read(given)
    assert "\n" not in str(e.value) and len(str(e.value)) < 1000


@pytest.mark.parametrize("says", CONFIG_ERRORS)
def test_refuses_configs_by_name(says):
    raw = raw_config(architectures=["LlamaForCausalLM"])
    refused(raw | CONFIG_ERRORS[says], says, read=Config.from_dict)


def test_refuses_incomplete_configs(tmp_path):
    make(tmp_path, "llama")
    file = tmp_path / "config.json"
    edit(tmp_path, lambda raw: raw.pop("hidden_size"))
    refused(tmp_path, "config.json: hidden_size is missing or null")
    deep = '{"a": ' + "[" * 200 + "]" * 200 + "}"
    for text, why in {
            "[" * 10**5: "is not valid JSON", '{"a": 1e': "not valid", "": "not valid",
            '{"vocab_size": 1, "vocab_size": 2}': "key 'vocab_size' is there twice",
            "null": "must hold a JSON object", "[]": "must hold a JSON object",
            deep: "nested deeper than"}.items():
        file.write_text(text)
        refused(tmp_path, "config.json.*" + why)
    file.write_bytes(b"\xff\xfe")
    refused(tmp_path, "config.json is not text in UTF-8")
    for make_other in (os.remove, os.mkfifo):  # to open the second would be to wait
        make_other(file)
        refused(tmp_path, "holds no config.json", FileNotFoundError)


def test_refuses_damaged_files(tmp_path):
    make(tmp_path, "llama", max_shard_size="20KB")
    shard = sorted(f for f in os.listdir(tmp_path) if f.endswith(".safetensors"))[2]
    whole = (tmp_path / shard).read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 4, 0):
        (tmp_path / shard).write_bytes(whole[:cut])
        refused(tmp_path, f"{shard} is truncated or not a safetensors file")
    os.remove(tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    refused(tmp_path, f"{shard} is missing.*although {index.name} lists it", FileNotFoundError)
    index.write_text("{")
    refused(tmp_path, f"{index.name} is not a valid index of shards")
    os.remove(index)
    refused(tmp_path, "model.safetensors is missing", FileNotFoundError)
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors is missing or not a file", FileNotFoundError)


def test_shards_lie_in_the_folder(tmp_path):
    """An index that points elsewhere, or is none."""
    make(tmp_path / "a", "llama", max_shard_size="20KB")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    index = tmp_path / "a" / "model.safetensors.index.json"
    whole = json.loads(index.read_text())["weight_map"]
    Transformer.from_pretrained(tmp_path / "a")  # the control
    name, shard = min(whole.items())
    elsewhere = [whole | {name: place} for place in (
        f"../b/{shard}", str(tmp_path / "b" / shard), f"./{shard}", "..", "", None, 7, [shard],
        f"{shard}\0", "/dev/stdin", "C:\\b.safetensors")]
    for weight_map in (*elsewhere, [], [name], None, "x", {}):
        index.write_text(json.dumps(dict(weight_map=weight_map)))
        says = f"'{name}' is in" if weight_map in elsewhere else "weight_map"
        refused(tmp_path / "a", f"{index.name} is not a valid index of shards: .*{says}")
    index.write_text(json.dumps(dict(weight_map=whole | {"more": shard})))
    refused(tmp_path / "a", f"{shard} lacks tensor 'more', which {index.name} lists")


HEADERS = {
    "dtype F8_E4M3, this code reads F64, F32": dict(dtype="F8_E4M3", shape=[48], data=48),
    "dtype I32": dict(dtype="I32", shape=[48], data=192),
    "dtype BOOL": dict(dtype="BOOL", shape=[48], data=48),
    r"norm.weight has shape \(0,\)": dict(dtype="F32", shape=[0], data=0),
    r"norm.weight has shape \(\)": dict(dtype="F32", shape=[], data=4),
    "no.* a safetensors file": dict(dtype="F32", shape=[0, 2**64 - 1], data=0),
    "truncated or not": dict(dtype="F32", shape=[2**40, 2**40], data=4),
}


@pytest.mark.parametrize("says", HEADERS)
def test_refuses_tensors_that_are_none(tmp_path, says):
    """One tensor of a dtype or shape that no weight has."""
    make(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    del tensors["model.norm.weight"]
    whole = safetensors.save(tensors)
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:8 + size]), whole[8 + size:]
    new = dict(HEADERS[says])
    more = new.pop("data")
    header["model.norm.weight"] = {**new, "data_offsets": [len(data), len(data) + more]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(more))
    refused(tmp_path, says)
    file.write_bytes((2 << 30).to_bytes(8, "little") + text + data)  # a header of 2 GB
    refused(tmp_path, "truncated or not a safetensors file: .*header too large")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """Also such as only the dtype makes infinite, in a joined matrix, in a shard: by name."""
    make(tmp_path, "qwen2", max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    key = "model.layers.1.self_attn.v_proj.weight"
    file = tmp_path / index["weight_map"][key]
    tensors = safetensors.load_file(file)
    tensors[key] = tensors[key].double()
    for value in (math.nan, math.inf, -math.inf, 1e300):
        tensors[key][3, 5] = value
        safetensors.save_file(tensors, file)
        for dtype in (torch.float32, torch.bfloat16):
            refused(tmp_path, f"{file.name}: tensor {key[6:]} holds NaN",
                    read=partial(Transformer.from_pretrained, dtype=dtype))
    tensors[key][3, 5] = 3e38  # the control: large, but a number
    safetensors.save_file(tensors, file)
    Transformer.from_pretrained(tmp_path)


def test_saved_files_appear_whole(tmp_path):
    """On a disk that is full when config.json is written, then when the weights are."""
    make(tmp_path, "llama")
    model = Transformer.from_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        os.mkdir(tmp_path / f"{name}{UNFINISHED}")  # cannot be written to
        model.norm.weight.data.fill_(3)
        whole = (tmp_path / name).read_bytes()
        refused(tmp_path, f"could not write .*{name}", OSError, model.save_pretrained)
        assert (tmp_path / name).read_bytes() == whole


@pytest.mark.parametrize("name, key", [
    ("llama", "lm_head.weight"), ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
    ("qwen3", "model.layers.0.self_attn.q_norm.weight")])
def test_every_tensor_is_needed_and_used(tmp_path, name, key):
    make(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    short = key.removeprefix("model.")
    safetensors.save_file({k: t for k, t in tensors.items() if k != key}, file)
    refused(tmp_path, f"lacks 1 tensor.*{short}")
    safetensors.save_file({**tensors, key: tensors[key][:-1].clone()}, file)
    refused(tmp_path, f"{short} has shape")
    extra = {"model.layers.0.self_attn.extra.bias": torch.zeros(3)}
    safetensors.save_file({**tensors, **extra}, file)
    refused(tmp_path, "has unused 1 tensor.*layers.0.self_attn.extra.bias")
    edit(tmp_path, lambda raw: raw.update(vocab_size=100))
    safetensors.save_file(tensors, file)
    refused(tmp_path, r"has shape \(101, 48\), config.json implies \(100, 48\)")


def test_missing_folder(monkeypatch, tmp_path):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub = "is no local folder"
    (tmp_path / "file").write_text("")
    for name, says in (("no/such-model", hub), ("", hub), ("x y", hub), ("nul\0", hub),
                       ("x" * 5000, hub), ("é\n!", hub), ("a/b/c/d", "'a/b/c/d': no such folder"),
                       ("~nobody/x", "no such folder"), ("/no/where\n", "no such folder"),
                       ("./no-such-folder", "no such folder"),
                       (tmp_path / "file", "file is a file: name the folder")):
        refused(name, says, FileNotFoundError, read=find_checkpoint)
    # ~ is the home of who asks
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert find_checkpoint("~/m") == str(tmp_path / "m")


@pytest.mark.skipif(not REAL, reason="SMD_REAL_WEIGHTS names no folder")
@pytest.mark.parametrize("name", ("smollm2", "qwen"))
def test_real_weights(name):
    """Logits of a prompt and 32 greedy tokens; one forward over prompt + tokens checks all 32
    choices at once."""
    from data.tokenizer import Tokenizer
    path = os.path.join(REAL, name)
    tok = Tokenizer(path)
    question = "Name three rivers and say where they end."
    prompt = tok.chat([{"role": "user", "content": question}])
    hf = loaded(path).eval()
    with torch.no_grad():
        ids = hf.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=32, min_new_tokens=32)[0]
        theirs = hf_logits(hf, ids)
        del hf
        model = Transformer.from_pretrained(path)
        ours = logits(model, ids)
        gap = (ours - theirs).abs().max().item()
        print(f"{name}: largest logit difference {gap:.1e} of {theirs.abs().max():.0f}; "
              f"{tok.decode(ids[len(prompt):])!r}")
        # SmolLM2's logits reach 39: either fp32 forward is 6e-5 to 8e-5 away from an fp64 one, ours
        # being the nearer
        assert gap <= 2e-4
        ours[:, torch.tensor(tok.stop_ids)] = -math.inf  # as min_new_tokens does
        assert torch.equal(ours[len(prompt) - 1:-1].argmax(-1), ids[len(prompt):])
        assert model.config.vocab_size >= len(tok)


@pytest.mark.parametrize("name", ("llama-bias", "qwen3"))
def test_mlp_in_slices(tmp_path, name, monkeypatch):
    """Prefill's slices, in place, and those of activation checkpointing give what the whole input
    gives, gradients too."""
    make(tmp_path, name)
    model = Transformer.from_pretrained(tmp_path)

    def go(checkpointing=False):
        model.zero_grad(set_to_none=True)
        y = model(IDS, torch.arange(len(IDS)), attend, checkpointing)  # (N, C)
        if y.requires_grad:
            y.pow(2).sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    def same(a, b):
        return len(a) == len(b) and all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(a, b))

    whole = go()
    with torch.no_grad():
        assert same(go(), whole[:1])
        monkeypatch.setattr(residual, "ROWS", 8)
        monkeypatch.setattr(residual, "BYTES", 0)
        assert len(IDS) > 4 * 8 and same(go(), whole[:1])
    # with gradients slices are 8 times as long
    assert same(go(checkpointing=True), whole)
    # the control: an MLP that leaves no mark
    monkeypatch.setattr(model_file.Block, "add_mlp", lambda self, x: x.clone())
    with torch.no_grad():
        assert not same(go(), whole[:1])
    assert not same(go(checkpointing=True), whole)


def test_residual_stream_is_written_in_place_only_without_gradients():
    """what decoding needs, and what the backward pass could not bear"""
    torch.manual_seed(0)
    y = torch.randn(5, 4)
    for bias in (False, True):
        linear = torch.nn.Linear(4, 3, bias=bias)
        x = torch.randn(5, 3)
        before = x.clone()
        loud = x + residual.Product(linear, y)
        torch.testing.assert_close(loud, before + linear(y))
        assert torch.equal(x, before) and loud.requires_grad
        with torch.no_grad():
            quiet = x + residual.Product(linear, y)
        assert torch.equal(quiet, loud) and (quiet.data_ptr() == x.data_ptr()) == (not bias)
        assert torch.equal(x, before) == bias


def test_head_size_beyond_the_kernels(tmp_path):
    """Refused where the model is loaded onto a card, which need not be there for that; a CPU has no
    such limit."""
    make(tmp_path, "llama")
    edit(tmp_path, lambda raw: raw.update(head_dim=256))
    with pytest.raises(ValueError, match="head sizes up to 128, the model has 256"):
        Transformer.from_pretrained(tmp_path, device="cuda")
    with pytest.raises(ValueError, match="q_proj.weight has shape"):
        Transformer.from_pretrained(tmp_path)
