"""
How fast this code is and how much memory it takes, beside what a user would otherwise run, on the
card it stands on.

    python -m experiments.bench attn     # the kernel: FlashAttention-2, cuDNN, FlexAttention, SDPA
    python -m experiments.bench decode   # sampling: transformers, dynamic, static, paged cache
    python -m experiments.bench learner  # a group forward and backward: transformers, checkpointing
    python -m experiments.bench step     # a whole training step: TRL's GRPOTrainer
    python -m experiments.bench lora     # the same with LoRA: all weights, TRL with peft
    python -m experiments.bench cards    # a step of one card, to compare with that of two:
    torchrun --standalone --nproc_per_node=2 -m experiments.bench cards
    python -m experiments.bench memory   # peak against prompt length, the longest prompt that fits
    python -m experiments.bench fit      # a step on a card of 16 or 24 GB: memory is capped
    python -m experiments.bench evict    # sampling by length: a dense cache, an evicted one
    python -m experiments.bench dtype    # gap of float16, bfloat16, float32 (--model=FOLDER)
    python -m experiments.bench all      # --quick: tiny shapes (all that a CPU is good for),
                                         # --out=FOLDER instead of out-bench

The idea. A ratio needs the same work on both sides and a time needs a ceiling. Models have the
shape of a named checkpoint and random weights; for decode and learner the same on both sides, their
fp32 logits compared before anything is timed; attentions under one mask are compared in output and
gradients. "of limit" is the share that the useful bytes or floating-point operations make of what a
plain copy of a large tensor or one large bf16 matrix product reaches in the same process. Rivals
that score one policy say so.

Each part prints its tables and writes out-bench/bench-PART-CARD.json, which holds every number it
printed. Left out: several cards of a rival, serving engines, quality of what is learned.

Letters: B prompts of P tokens, G samples of R tokens for each; nh query and nkv KV heads of size
hs; N rows of a packed group, T of an unpacked sequence, V token ids.
"""
import functools
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import grpo
import rollout as sampler
import train
from data.tokenizer import Tokenizer
from experiments.attention import CUDA, DEVICE, allocated, clock, group_until, run, sync
from fast.launch import kernels
from kvcache import Eviction, KVCache
from model import Config, Transformer, find_checkpoint
from run.learn import replay_all, size_logits
from shadow_attn import shadow_attention
from support import parallel
from support.configurator import Arguments, make_folder
from support.lora import LoRA, targets_of
from support.memory import ran_out, release
from support.optimizer import Masters
from support.run import choose_device, write_text
from support.screen import one_line_errors, tell

# the new name of what this warns of is too new
warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*",
                        category=FutureWarning)
# on purpose, on a CPU
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile",
                        category=UserWarning)
DTYPE = torch.bfloat16 if CUDA else torch.float32
WINDOW, SINKS = 32, 4  # Eviction's defaults
CAP = 1_000_000        # longest prompt tried, in tokens
SHORT = 2048           # rows a key lives where only memory is measured
CONTEXT = 0.8          # GB of a card that CUDA itself should take; cuda_gb: it took


@dataclass(frozen=True)
class Work:
    """B prompts of P tokens, G samples of R new tokens for each; `budget` prompt keys are kept."""
    B: int
    P: int
    G: int
    R: int
    budget: int

    @property
    def eviction(self):
        return Eviction("snapkv", budget=self.budget, window=WINDOW, sinks=SINKS)

    @property
    def facts(self):
        return dict(prompts=f"{self.B} x {self.G}", prompt=self.P, new_tokens=self.R,
                    kept=self.budget)

    @property
    def few(self):
        """Tokens of a short response, beside which R tells what a step takes."""
        return max(2, self.R // 8)

    @property
    def at_once(self):
        """Prompts in one prefill pass of generate's."""
        return min(self.B, max(1, 16384 // self.P))


SHAPES = {  # values of SIZES
    "smollm2-135m": ("llama", 576, 30, 9, 3, 64, 1536, 49152, 1e5, True),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, 1e6, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, 1e6, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 1e6, False),
    "tiny": ("qwen2", 32, 2, 4, 2, 8, 64, 128, 1e4, True),
}
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
         "rope_theta", "tie_word_embeddings")


def raw_config(name):
    """config.json of a shape; long contexts are allowed, as RoPE needs no table."""
    raw = dict(zip(SIZES, SHAPES[name], strict=True))
    rope = dict(rope_type="default", rope_theta=raw.pop("rope_theta"))
    return dict(raw, rms_norm_eps=1e-6, max_position_embeddings=1 << 20,
                bos_token_id=None, eos_token_id=None, rope_parameters=rope)


def config_of(name):
    return Config.from_dict(raw_config(name))


def on_meta(name):
    """A model of this shape without memory, to count its parameters."""
    with torch.device("meta"):
        return Transformer(config_of(name))


# measuring

def peak_gb(f):
    """Largest number of bytes allocated while f() runs, in GB, what was there before included; None
    on a CPU."""
    release()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    f()
    sync()
    return allocated()


@functools.cache
def ceilings():
    """What this card reaches: copy_gb_s of a large tensor, read and written bytes counted;
    matmul_tflops of two 8192^2 bf16 matrices."""
    n, size = (8192, 2**30) if CUDA else (256, 2**22)
    x = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    copy = clock(lambda: y.copy_(x), 20)["ms"]
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    product = clock(lambda: a @ b, 20)["ms"]
    return dict(copy_gb_s=2 * size / copy / 1e6, matmul_tflops=2 * n**3 / product / 1e9)


def share(row, flops=0, nbytes=0, ms="ms"):
    """Add what the useful work makes of the ceiling that limits it."""
    work, limit, top = nbytes, "copy", ceilings()["copy_gb_s"] * 1e6
    if flops:
        work, limit, top = flops, "matmul", ceilings()["matmul_tflops"] * 1e9
    return dict(row, share=work / row[ms] / top, limit=limit, work=work)


def attempt(f, *args, **kwargs):
    """f(...), or a note that says what went wrong: a contender that cannot run must not stop the
    others. Disagreement does. What it held is free afterwards."""
    try:
        found = f(*args, **kwargs)
    except AssertionError:
        raise
    except Exception as e:
        note = " ".join(f"{type(e).__name__}: {e}".split())
        if ran_out(e):
            note = "out of memory"
        found = dict(note=note[:160])
    release()  # only here, where no traceback holds the tensors
    return found


def check_same(what, a, b, bound):
    """Relative difference |a - b| / |b|; raises AssertionError above bound, NaN included. -> the
    difference"""
    error = ((a.float() - b.float()).norm() / b.float().norm()).item()
    if not error < bound:
        raise AssertionError(f"{what}: relative difference {error:.1e}, "
                             f"at most {bound:.0e} was expected")
    return error


# column -> heading, format
COLUMNS = dict(
    policies=("policies", "8d"), ms=("ms", "11,.2f"), tokens_s=("tokens/s", "11,.0f"),
    ratio=("x ours", "8.2f"), step_ms=("ms/step", "9.2f"),
    trained=("trained M", "9.2f"), rollout_s=("rollout s", "9.3f"),
    learn_s=("learn s", "9.3f"), samples_s=("samples/s", "9.2f"),
    share=("of limit", "8.1%"), limit=("limit", "7s"),
    rollout_gb=("rollout GB", "10.3f"), predicted_gb=("predicted", "10.3f"),
    over=("ratio", "7.2f"), learner_gb=("learner GB", "10.3f"),
    kv_mb=("kept KV MB", "12,.3f"), tokens=("tokens", "10,d"),
    keys=("keys", "8,d"), prefill_s=("prefill s", "9.3f"), card_gb=("card GB", "7d"),
    gap=("gap", "9.1e"), gap_max=("largest", "9.1e"), dense_gap=("dense gap", "9.1e"),
    dense_max=("largest", "9.1e"), peak_gb=("peak GB", "8.2f"),
    first_s=("first s", "8.2f"), error=("differs", "8.1e"), cuda_gb=("CUDA GB", "8.2f"))


class Report:
    """The tables of one part, printed and, with a path, saved after each row: a part that is
    stopped leaves what it has measured. about: what stands beside the tables in the file."""

    def __init__(self, path=None, **about):
        self.path, self.about, self.tables = path, about, []
        self.start = time.time()

    def table(self, title, columns, **facts):
        """Begin a table, to which rows are added as they are measured."""
        self.columns = columns.split()
        self.tables.append(dict(title=title, facts=facts, rows=[]))
        tell(f"\n{title}: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
        self.print("", {c: COLUMNS[c][0] for c in self.columns})

    def add(self, name, row):
        """x ours: time over the first row's."""
        row, rows = dict(row, name=name), self.tables[-1]["rows"]
        rows.append(row)
        if row.get("ms") and rows[0].get("ms"):
            row["ratio"] = row["ms"] / rows[0]["ms"]
        self.print(name, {c: format(row[c], COLUMNS[c][1]) for c in self.columns
                          if row.get(c) is not None}, row.get("note", ""))
        if self.path is not None and parallel.rank() == 0:
            seconds = time.time() - self.start
            content = dict(self.about, seconds=seconds, tables=self.tables)
            write_text(self.path, json.dumps(content, indent=1))

    def print(self, name, cells, note=""):
        """cells: {column: text}, "-" where there is none"""
        texts = []
        for c in self.columns:
            heading, form = COLUMNS[c]
            digits = form.split(",")[0].split(".")[0].rstrip("sd")
            texts.append(cells.get(c, "-").rjust(max(len(heading), int(digits))))
        tell(f"{name:36s}" + " ".join(texts) + f"  {note}")


# the same model twice

def ours(name, dtype=DTYPE):
    """Our model of a named shape, random weights, always the same."""
    model = on_meta(name).to(dtype).to_empty(device=DEVICE)
    rng = torch.Generator(DEVICE).manual_seed(0)
    # a narrow model needs more, or its layers leave no mark on the logits
    std = 0.02 if model.config.width > 100 else 0.35
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.fill_(1)
            else:
                p.normal_(0, std, generator=rng)
    return model


def by_transformers(mine, name, attention, dtype):
    """transformers' model of a named shape with the weights of `mine`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(**raw_config(name))
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention,
                                                 dtype=dtype)
    theirs = model.state_dict()
    with torch.no_grad():
        for key, x in mine.tensors().items():
            theirs[key if key.startswith("lm_head.") else "model." + key].copy_(x)
    return model


def rival(name, attention="sdpa"):
    """The same model by transformers, the same weights.
    -> model, relative difference of its logits from ours

    They are compared in fp32, where nothing but a difference of the models is left: in bf16 28
    layers drift 3e-2 apart."""
    mine = ours(name, torch.float32)
    n = 64
    until = torch.full((mine.config.n_kv_head, n), n, dtype=torch.int32, device=DEVICE)

    def attend(layer, q, k, v):
        return shadow_attention(q, k, v, until, impl="ref")

    with torch.no_grad():
        ids = torch.randint(mine.config.vocab_size, (n,), device=DEVICE)
        pos = torch.arange(n, device=DEVICE)
        logits = mine.logits(mine(ids, pos, attend))            # (n, V)
        theirs = by_transformers(mine, name, "sdpa", torch.float32)
        error = check_same("logits of the two models",
                           theirs(input_ids=ids[None]).logits[0], logits, 1e-4)
    del mine, theirs
    release()
    return by_transformers(ours(name), name, attention, DTYPE), error


def training_rival(name, attention="sdpa"):
    model, error = rival(name, attention)
    model.train().gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model, error


def drawn(name, B, P):
    """B prompts of P random tokens."""
    rng = torch.Generator().manual_seed(1)
    return torch.randint(config_of(name).vocab_size, (B, P), generator=rng).tolist()


# attn

# columns of a forward and backward pass
PASSES = "policies ms ratio share limit peak_gb first_s error"


def attn(report, nh, nkv, hs, work, repeat):
    """Forward and backward pass of one layer's attention over one group, then over one causal
    sequence."""
    P, G, R = work.P, work.G, work.R
    torch.manual_seed(0)
    until = group_until(P, G, R, work.budget, nkv=nkv, device=DEVICE)
    N, T, heads = until.shape[1], P + R - 1, f"{nh}:{nkv} of {hs}"
    report.table(
        "attention of one group, forward + backward", PASSES, heads=heads, prompt=P,
        responses=f"{G} x {R}", kept=work.budget, packed_rows=N, unpacked_rows=G * T,
        timed=f"median of {repeat}; masks and sorting included")
    # grad, q, k, v
    inputs = [torch.randn(N, n, hs, device=DEVICE, dtype=DTYPE)
              for n in (nh, nh, nkv, nkv)]
    flops = attention_flops(until, nh, hs)
    row, want = our_attention(until, inputs, flops, repeat=repeat)
    report.add("ours", dict(row, policies=2))
    flat = [x.transpose(0, 1)[None].contiguous() for x in inputs]  # (1, heads, N, hs)
    for name, other in packed_rivals(until, nh).items():
        report.add(name, attempt(same_mask, name, other, flat, want, flops=flops,
                                repeat=repeat))
    causal_rows(report, G, T, sizes=(nh, nkv, hs), repeat=repeat)

    report.table("one causal sequence, forward + backward", PASSES, heads=heads, rows=P)
    until = torch.full((nkv, P), P, dtype=torch.int32, device=DEVICE)
    flops = attention_flops(until, nh, hs)
    row, _ = our_attention(until, [x[:P] for x in inputs], flops, repeat=repeat)
    report.add("ours", dict(row, policies=1))
    causal_rows(report, 1, P, sizes=(nh, nkv, hs), repeat=repeat)


def visible_pairs(until, group):
    """(query head, query, key) triples that are visible under until (..., N)."""
    row = torch.arange(until.shape[-1], device=until.device)
    return group * (until - row).clamp(min=0).sum().item()


def attention_flops(until, nh, hs):
    """Forward and backward: 14 per visible (query head, query, key) and channel."""
    return 14 * hs * visible_pairs(until, nh // len(until))


def our_attention(until, inputs, flops, repeat):
    """-> row, [out, dq, dk, dv]"""
    def attend(q, k, v):
        return shadow_attention(q, k, v, until)

    row = clock(lambda: run(attend, *inputs), repeat)
    return share(row, flops), run(attend, *inputs)


def same_mask(name, attend, flat, want, flops, repeat):
    """A rival under the same mask: compared in output and gradients, then timed. -> row"""
    def go():
        # FlexAttention has no backward pass on a CPU: there its output alone is compared
        if not CUDA and "Flex" in name:
            return [attend(*flat[1:])]
        return run(attend, *flat)

    bound = 1e-2 if CUDA else 1e-5
    error = max(check_same(f"{part} of {name}", a[0].transpose(0, 1), b, bound)
                for part, a, b in zip(("out", "dq", "dk", "dv"), go(), want))
    if not CUDA:
        return dict(error=error, note="timed on CUDA only")
    return share(dict(clock(go, repeat), policies=2, error=error), flops)


def packed_rivals(until, nh):
    """name -> attention of q (1, nh, N, hs), k, v (1, nkv, N, hs) under until. Each layer has its
    own mask, so making it counts."""
    group, N = nh // len(until), until.shape[1]
    row = torch.arange(N, device=DEVICE)
    attention, compiled = flex.flex_attention, flex.create_block_mask
    if CUDA:
        attention = torch.compile(attention, dynamic=False)
        # so it calls torch's sort: its own took Triton minutes to compile
        options = {"triton.persistent_reductions": False}
        compiled = torch.compile(compiled, options=options)

    def rule(b, h, i, j):
        return (j <= i) & (i < until[h // group, j])

    def block_mask(make=flex.create_block_mask):
        return make(rule, B=1, H=nh, Q_LEN=N, KV_LEN=N, device=DEVICE)

    made = block_mask()

    def mask_before(q, k, v):
        return attention(q, k, v, block_mask=made, enable_gqa=True)

    def mask_included(q, k, v):
        return attention(q, k, v, block_mask=block_mask(), enable_gqa=True)

    def mask_compiled(q, k, v):
        return attention(q, k, v, block_mask=block_mask(compiled), enable_gqa=True)

    def flash(q, k, v):
        import flash_attn.cute  # noqa: F401  its absence is the reason that the row gives
        return attention(q, k, v, block_mask=made, enable_gqa=True,
                         kernel_options=dict(BACKEND="FLASH"))

    def matrix(q, k, v):
        # the memory-efficient backend knows no groups of heads: keys, values and mask are
        # repeated
        seen = (row <= row[:, None]) & (row[:, None] < until[:, None])  # (nkv, N, N)
        seen = seen.repeat_interleave(group, 0)[None]           # (1, nh, N, N)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION if CUDA else SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return {"FlexAttention, mask made before": mask_before,
            "FlexAttention, mask included": mask_included,
            "FlexAttention, mask compiled": mask_compiled,
            "FlexAttention, FLASH, mask before": flash,
            "SDPA, mask as a matrix": matrix}


def causal_rows(report, sequences, T, sizes, repeat):
    """Add SDPA's two fast backends on plain causal sequences of T rows. sizes: nh, nkv, hs"""
    nh, nkv, hs = sizes

    def row(backend):
        inputs = [torch.randn(sequences, n, T, hs, device=DEVICE, dtype=DTYPE)
                  for n in (nh, nh, nkv, nkv)]

        def attend(q, k, v):
            with sdpa_kernel([backend]):  # raises where the default would fall back
                return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                      enable_gqa=True)

        return share(dict(clock(lambda: run(attend, *inputs), repeat), policies=1),
                     14 * hs * nh * sequences * T * (T + 1) // 2)

    for name, backend in (("FlashAttention-2", SDPBackend.FLASH_ATTENTION),
                          ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        report.add(f"SDPA {name}, causal",
                  attempt(row, backend) if CUDA else dict(note="needs CUDA"))


# decode

def decode(report, name, work, repeat, rivals):
    """Sampling, prompt included; a decoding step alone is the difference between R tokens and an
    eighth of R. rivals: kinds of cache"""
    report.table(
        "sampling", "tokens_s ms ratio step_ms share limit peak_gb first_s error",
        model=name, **work.facts,
        timed=f"median of {repeat}; step: {work.R} against {work.few} tokens")
    prompts = drawn(name, work.B, work.P)
    report.add("ours", our_sampling(name, work, prompts, repeat))
    release()
    for kind in rivals:
        report.add(f"transformers, {kind} cache, dense",
                  attempt(transformers_sampling, name, work, prompts, kind=kind,
                          repeat=repeat))


def timed_sampling(f, name, work, prompt_keys, repeat):
    """f(n) samples n tokens. prompt_keys: held for all prompts. -> row"""
    S, R, n = work.B * work.G, work.R, work.few
    row = clock(lambda: f(R), repeat, warm=0)
    row["ms_few"] = clock(lambda: f(n), repeat, warm=0)["ms"]
    row.update(tokens_s=1e3 * S * R / row["ms"],
               step_ms=(row["ms"] - row["ms_few"]) / (R - n))
    nbytes = step_bytes(name, prompt_keys, S, keys=(n + R - 1) / 2)
    return share(row, nbytes=nbytes, ms="step_ms")


def step_bytes(name, prompt_keys, S, keys):
    """Bytes that one decoding step must read: every weight once (of a tied table, as the head),
    prompt keys, response keys."""
    model = on_meta(name)
    c = model.config
    weights = sum(p.numel() for key, p in model.named_parameters()
                  if c.tied or "embed_tokens" not in key)
    return (weights * DTYPE.itemsize
            + (prompt_keys + S * keys) * c.kv_bytes_per_token(DTYPE))


def our_sampling(name, work, prompts, repeat):
    generate = functools.partial(
        sampler.generate, ours(name), prompts, work.G, eviction=work.eviction)
    return timed_sampling(generate, name, work, repeat=repeat,
                          prompt_keys=work.B * min(work.P, work.budget))


def transformers_sampling(name, work, prompts, kind, repeat):
    model, error = rival(name)
    S = work.B * work.G
    if kind == "paged":
        generate = functools.partial(continuous_batching, model, work, prompts)
        row = timed_sampling(generate, name, work, S * work.P, repeat=repeat)
        return dict(row, error=error)
    ids = torch.tensor(prompts, device=DEVICE).repeat_interleave(work.G, 0)  # (S, P)
    cache = {"dynamic": {}, "static": dict(cache_implementation="static")}[kind]

    def generate(n):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            temperature=1.0, max_new_tokens=n, min_new_tokens=n, pad_token_id=0,
            **cache)
        if out.shape != (S, work.P + n):
            raise AssertionError(f"transformers made {tuple(out.shape)} tokens of "
                                 f"{(S, work.P + n)} asked for")

    row = timed_sampling(generate, name, work, prompt_keys=S * work.P, repeat=repeat)
    return dict(row, error=error)


def continuous_batching(model, work, prompts, n):
    """Sample n tokens with transformers' scheduler and its paged cache, which reads a prompt once
    for all its samples."""
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig
    # on a CPU it asks for psutil each time
    level = logging.ERROR if CUDA else logging.CRITICAL
    logging.getLogger("ContinuousBatchingLogger").setLevel(level)
    S = work.B * work.G
    blocks = S * (1 + -(-(work.P + work.R) // 256))  # of 256 keys, enough for all at once
    out = model.generate_batch(
        prompts, progress_bar=False,
        generation_config=GenerationConfig(
            do_sample=True, top_k=0, temperature=1.0, max_new_tokens=n, pad_token_id=0,
            num_return_sequences=work.G, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=max(256, min(8192, work.B * work.P))))
    made = [len(one.generated_tokens) for one in out.values()]
    # some versions hand back the first sample of a prompt alone
    if set(made) != {n} or len(made) not in (work.B, S):
        raise RuntimeError(f"transformers made responses of {made} tokens, "
                           f"{S} of {n} were asked for")


# learner

def learner(report, name, work, repeat):
    """Forward and backward pass over both policies of one group, against one policy of unpacked
    sequences."""
    P, G, R = work.P, work.G, work.R
    report.table(
        "learner, one prompt, forward + backward", PASSES, model=name, prompt=P,
        responses=f"{G} x {R}", kept=work.budget, packed_rows=P + 2 * G * (R - 1),
        unpacked_rows=G * (P + R - 1),
        timed=f"median of {repeat}; peak with weights and gradients")
    model, adv = ours(name), torch.randn(1, G, device=DEVICE)
    r = made_rollout(model.config, work)
    report.add("ours, checkpointing",
              our_learner(model, r, adv, checkpointing=True, repeat=repeat))
    report.add("ours, all activations kept",
              attempt(our_learner, model, r, adv, checkpointing=False, repeat=repeat))
    del model
    release()
    for micro in (G, 1):
        plural = "s" if micro > 1 else ""
        row = attempt(transformers_learner, name, r, adv, micro=micro, repeat=repeat)
        report.add(f"transformers, {micro} sequence{plural} at a time", row)


def made_rollout(config, work):
    """What a rollout of one prompt leaves, at random: sinks, window and random other keys stay."""
    L, nkv, P, G, R = config.n_layer, config.n_kv_head, work.P, work.G, work.R
    torch.manual_seed(0)
    score = torch.rand(L, nkv, P, device=DEVICE)
    score[:, :, :SINKS] = 2
    score[:, :, P - WINDOW:] = 2
    kept = score.topk(min(P, work.budget)).indices.sort(-1).values  # (L, nkv, K)
    return sampler.Rollout(
        prompts=torch.randint(config.vocab_size, (1, P)).tolist(),
        tokens=torch.randint(config.vocab_size, (1, G, R), device=DEVICE),
        lengths=torch.full((1, G), R, device=DEVICE),
        logp_roll=torch.zeros(1, G, R, device=DEVICE), temperature=1.0, kept=[kept],
        until=torch.full((L, nkv, 1, G, R), R, dtype=torch.int32, device=DEVICE),
        stopped=torch.zeros(1, G, dtype=torch.bool, device=DEVICE))


def our_pass(model, r, adv, checkpointing):
    """Forward and backward pass over both policies: GRPO on the shadow policy, the dense one
    distilled from it."""
    model.zero_grad(set_to_none=True)
    out = grpo.replay(model, r, ("dense", "shadow"), distill_to="dense",
                      checkpointing=checkpointing)
    loss, _ = grpo.policy_loss(out["shadow"], None, adv, r.mask)
    loss = loss + 0.1 * (grpo.token_scale(r.mask) * out["kl"]).sum()
    loss.backward()


def our_learner(model, r, adv, checkpointing, repeat):
    c, (_, G, R) = model.config, r.tokens.shape
    until = grpo.pack(r).until                                  # (L, nkv, N)
    row = clock(lambda: our_pass(model, r, adv, checkpointing), repeat, warm=0)
    pairs = visible_pairs(until, c.n_head // c.n_kv_head)
    flops = learner_flops(model, rows=until.shape[2], pairs=pairs, head_rows=2 * G * R,
                          again=checkpointing, head_passes=8)
    return share(dict(row, policies=2), flops)


def learner_flops(model, rows, pairs, head_rows, again, head_passes):
    """Floating-point operations of a forward and backward pass of our model, counting what is
    computed `again` in the backward pass."""
    c = model.config
    body = sum(p.numel() for p in model.parameters()) - c.vocab_size * c.width
    per_weight, per_pair = (8, 18) if again else (6, 14)
    return (per_weight * body * rows + per_pair * c.head_size * pairs
            + head_passes * c.vocab_size * c.width * head_rows)


def their_pass(model, r, adv, micro, only=None):
    """Forward and backward pass over one policy, `micro` unpacked sequences at a time (the first
    `only` of them)."""
    (_, G, R), P, scale = r.tokens.shape, len(r.prompts[0]), grpo.token_scale(r.mask)
    prompt = torch.tensor(r.prompts, device=DEVICE).expand(G, P)
    ids = torch.cat((prompt, r.tokens[0, :, :-1]), dim=1)       # (G, P + R - 1)
    for i in range(0, only or G, micro):
        part = slice(i, i + micro)
        logits = model(input_ids=ids[part], use_cache=False, logits_to_keep=R).logits
        logp = logits.float().log_softmax(-1)                   # (micro, R, V)
        logp = logp.gather(-1, r.tokens[0, part, :, None])
        del logits
        logp = logp[None, :, :, 0]                              # (1, micro, R)
        loss, _ = grpo.policy_loss(logp, None, adv[:, part], r.mask[:, part],
                                   scale=scale[:, part])
        loss.backward()


def transformers_learner(name, r, adv, micro, repeat):
    model, error = training_rival(name)
    (_, G, R), c = r.tokens.shape, config_of(name)
    T = len(r.prompts[0]) + R - 1

    def f():
        model.zero_grad(set_to_none=True)
        their_pass(model, r, adv, micro)

    row = dict(clock(f, repeat, warm=0), policies=1, error=error)
    pairs = c.n_layer * c.n_head * G * T * (T + 1) // 2
    flops = learner_flops(on_meta(name), rows=G * T, pairs=pairs, head_rows=G * R,
                          again=True, head_passes=6)
    return share(row, flops)


# step, lora, cards, fit

def timed_steps(steps):
    return f"median of {steps} after the warm-up, wall clock"


def step(report, name, work, steps, checkpointing, micro_rows, rivals):
    """A whole training step: sample, reward at random, update. rivals: ways of TRL"""
    report.table("one training step", "ms ratio rollout_s learn_s peak_gb first_s",
                 model=name, **work.facts, our_checkpointing=checkpointing,
                 our_micro_rows=micro_rows, TRL_checkpointing=True,
                 timed=timed_steps(steps))
    report.add("ours",
               attempt(our_step, name, work, steps, checkpointing=checkpointing,
                       micro_rows=micro_rows))
    for what, settings in rivals.items():
        row = attempt(trl_row, name, work, steps, **settings)
        report.add(f"TRL, {what}", row)
        if "learn_s" in row:  # no faster sampler could make it less
            alone = row["learn_s"]
            report.add("  were its sampling free", dict(ms=1e3 * alone, learn_s=alone))


def lora(report, name, work, steps, rank):
    """A whole training step with LoRA beside all seven matrices of a layer."""
    report.table("one training step, LoRA",
                 "trained ms ratio rollout_s learn_s peak_gb first_s", model=name,
                 rank=rank, **work.facts, checkpointing=True, timed=timed_steps(steps))
    mine = functools.partial(our_step, name, work, steps, checkpointing=True)
    report.add("ours, LoRA", attempt(mine, lora_rank=rank))
    report.add("TRL with peft, bfloat16",
              attempt(trl_row, name, work, steps, dtype="bfloat16", rank=rank))
    report.add("ours, all weights", attempt(mine))


def cards(report, name, work, steps):
    """A whole training step on one card or, under torchrun, on several: B prompts for each, one
    update for all."""
    report.table("one training step, B prompts a card",
                 "samples_s ms rollout_s learn_s peak_gb first_s", model=name,
                 cards=parallel.size(), **work.facts, checkpointing=True,
                 timed=timed_steps(steps))
    mine = functools.partial(our_step, name, work, steps, checkpointing=True)
    # a rank that went on without the others would wait for them
    report.add("ours", mine() if parallel.size() > 1 else attempt(mine))
    release()


def fit(report, name, work, gb, steps):
    """A training step within gb GB: settings one after the other, from those that cost no time,
    until one fits; where none does, what the last of them takes."""
    report.table("a step on a smaller card", "peak_gb cuda_gb ms rollout_s learn_s",
                 model=name, card=f"{gb} GB, {CONTEXT} of them for CUDA", **work.facts,
                 timed=timed_steps(steps))
    limit = gb - CONTEXT
    for i, settings in enumerate((*FRUGAL, FRUGAL[-1])):
        said = " ".join(f"{k}={v}" for k, v in settings.items()) or "defaults"
        if i == len(FRUGAL):
            limit, said = None, f"{said}, no limit"
        with capped(limit):
            row = attempt(our_step, name, work, steps,
                          **dict(checkpointing=False) | settings)
            if CUDA:  # what is on the card and not torch's
                there, whole = torch.cuda.mem_get_info()
                row["cuda_gb"] = (whole - there - torch.cuda.memory_reserved()) / 1e9
        report.add(said, row)
        if "note" not in row:
            return


# settings that take less and less memory, and more time; the last trains fewer weights instead
FRUGAL = (dict(), dict(micro_rows=8192), dict(checkpointing=True),
          dict(checkpointing=True, micro_rows=4096),
          dict(checkpointing=True, micro_rows=4096, logit_mb=64),
          dict(checkpointing=True, micro_rows=4096, logit_mb=64, moments="bfloat16"),
          dict(checkpointing=True, lora_rank=16))


@contextmanager
def capped(gb):
    """Let torch allocate no more than so many GB of this card; None: all. Nothing on a CPU."""
    if not CUDA or gb is None:
        yield
        return
    release()
    whole = torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
    torch.cuda.set_per_process_memory_fraction(min(1.0, gb / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def our_step(name, work, steps, checkpointing, **more):
    """As train.py does, at its defaults but for `more`, on each rank work.B prompts. -> row; times:
    seconds of each step, of its sampling, of its learning"""
    c = SimpleNamespace(**train.DEFAULTS | more)
    c.lr, c.checkpointing = 1e-6, checkpointing
    size_logits(c)
    model, ids = ours(name), drawn(name, work.B * parallel.size(), work.P)
    mine = parallel.share(len(ids))
    opt = LoRA(model, c) if c.lora_rank else Masters(model, c)
    objective = grpo.GRPO(model, c, None)
    times = []
    for i in range(steps + 2):  # the first compiles, in the second the learner is recorded
        start = now()
        r = sampler.generate(model, ids[mine.start:mine.stop], work.G, work.R,
                             temperature=c.temperature, eviction=work.eviction, seed=i,
                             part=(mine.start, len(ids)))
        rewards = torch.rand(work.B, work.G, device=DEVICE)
        rollouts, rewards = zip(*parallel.gather((r, rewards)))
        r = replace(sampler.join(rollouts), rewards=torch.cat(rewards))
        middle = now()
        again = functools.partial(replay_all, model, objective, c)
        r, batch, _ = objective.prepare(r, r.rewards, again)
        train.update(model, opt, objective, r, batch=batch, config=c, lr=c.lr)
        end = now()
        times.append((end - start, middle - start, end - middle))
        if i == 1 and CUDA:
            torch.cuda.reset_peak_memory_stats()
    seconds, rollout_s, learn_s = (statistics.median(x) for x in zip(*times[2:]))
    peak = max(parallel.gather(allocated()), key=lambda gb: gb or 0)
    return dict(ms=1e3 * seconds, rollout_s=rollout_s, learn_s=learn_s,
                first_s=times[0][0], peak_gb=peak, times=times,
                trained=sum(m.numel() for m in opt.masters) / 1e6,
                samples_s=len(ids) * work.G / seconds)


def now():
    """Seconds, when all that was asked of the card is done."""
    sync()
    return time.perf_counter()


def trl_row(name, work, steps, dtype, rank=0, paged=False):
    try:
        return trl_step(raw_config(name), work, steps + 1, dtype,
                        peft=peft_config(rank), paged=paged)
    except ImportError as e:
        return dict(note=f"pip install trl, for LoRA also peft: {e}")


def peft_config(rank):
    """What TRL is to hand to peft, None without LoRA. Raises ImportError without peft."""
    if not rank:
        return None
    from peft import LoraConfig
    c = SimpleNamespace(**train.DEFAULTS)
    return LoraConfig(r=rank, lora_alpha=c.lora_alpha, target_modules=targets_of(c),
                      task_type="CAUSAL_LM")


def trl_step(raw, work, steps, dtype, peft=None, paged=False):
    """TRL's GRPOTrainer on random weights and random prompts: `steps` times one generation and one
    optimizer update, the first of which warms up. -> row, with versions

    raw: a config.json as dict; prompts have exactly P tokens, samples exactly R new ones. dtype: of
    the parameters; "float32" is what GRPOTrainer loads by default, computing in bf16 autocast on
    CUDA. It keeps no masters: "bfloat16" also makes the optimizer's state bf16. peft: a LoraConfig,
    then only its matrices are trained. paged: sample by transformers' continuous batching. Raises
    ImportError without trl, RuntimeError if TRL did other work."""
    import datasets
    import transformers
    import trl
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    draw = random.Random(0)
    texts = []
    for _ in range(steps * work.B):
        words = [str(draw.randrange(raw["vocab_size"])) for _ in range(work.P)]
        texts.append(" ".join(words))
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype))
    sampler_name = "generate_batch" if paged else "generate"
    seconds, rollout_s = [], time_calls(model, sampler_name)

    def reward(completion_ids, **_):
        return [draw.random() for _ in completion_ids]

    with tempfile.TemporaryDirectory() as out_dir:
        trainer = trl.GRPOTrainer(
            model, reward, trl_config(trl, out_dir, work, steps, paged=paged),
            peft_config=peft,
            train_dataset=datasets.Dataset.from_dict(dict(prompt=texts)),
            processing_class=word_tokenizer(raw["vocab_size"]),
            callbacks=[step_clock(seconds)])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    # updates, generations, tokens by TRL's own count, without padding
    done = len(seconds), len(rollout_s), trainer.state.num_input_tokens_seen
    asked = steps, steps, steps * work.B * work.G * (work.P + work.R)
    if done != asked:
        raise RuntimeError(f"TRL made {done} updates, generations and tokens, {asked} "
                           "were asked for")
    peak = allocated()
    # the trainer sits in reference cycles and in accelerate's registry: what comes next
    # would find the memory taken
    trainer.accelerator.free_memory()
    delattr(model, sampler_name)
    versions = {m.__name__: m.__version__ for m in (trl, transformers, datasets, torch)}
    whole, part = statistics.median(seconds[1:]), statistics.median(rollout_s[1:])
    return dict(ms=1e3 * whole, first_s=seconds[0], rollout_s=part,
                learn_s=whole - part, peak_gb=peak, versions=versions)


def word_tokenizer(V):
    """Text "17 4 99" <-> ids [17, 4, 99]; <eos> lies outside the model's vocabulary, so that no
    sample ends early, at no cost."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocab = {str(i): i for i in range(V)} | {"<eos>": V}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>",
                                   pad_token="<eos>", padding_side="left")


def time_calls(model, name):
    """Time the model's method of this name from now on. -> list that gets the seconds of each
    call"""
    generate, seconds = getattr(model, name), []

    def timed(*args, **kwargs):
        start = now()
        out = generate(*args, **kwargs)
        seconds.append(now() - start)
        return out

    setattr(model, name, timed)
    return seconds


def step_clock(seconds):
    """A callback of transformers' trainer that adds the time of each step to a list."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = now()

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append(now() - self.start)
            if CUDA and state.global_step == 1:
                # the steps measured are those after the warm-up
                torch.cuda.reset_peak_memory_stats()

    return Clock()


def trl_config(trl, out_dir, work, steps, paged):
    """What is not named is TRL's default; some of what is named is too, because defaults change."""
    return trl.GRPOConfig(
        output_dir=out_dir, max_steps=steps, use_cpu=not CUDA, bf16=CUDA,
        num_generations=work.G, max_completion_length=work.R,
        per_device_train_batch_size=work.G, gradient_accumulation_steps=work.B,
        steps_per_generation=work.B,  # all samples of a step in one call, one update
        num_iterations=1, beta=0.0, loss_type="dapo", temperature=1.0, top_p=1.0,
        top_k=0, min_p=None, use_vllm=False, gradient_checkpointing=True,
        use_transformers_continuous_batching=paged,
        optim="adamw_torch_fused", max_grad_norm=1.0, learning_rate=1e-6,
        report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)


# memory

def memory(report, name, lengths, sampled, learnt):
    """Peak of our rollout and of our learner, each alone on the card, against prompt length; then
    the longest prompts. sampled: what is rolled out; learnt: what is learnt from, one prompt."""
    report.table(
        "peak memory against prompt length",
        "rollout_gb predicted_gb over learner_gb kv_mb", model=name,
        rollout=f"{sampled.B} x {sampled.G} x {sampled.R}",
        learner=f"1 x {learnt.G} x {learnt.R}, checkpointing", kept=sampled.budget,
        predicted="weights + kept KV + one layer's keys and values of the prompts "
        "prefilled together + logits of a step")
    model, adv = ours(name), torch.randn(1, learnt.G, device=DEVICE)
    for P in lengths:
        row = rollout_memory(model, name, replace(sampled, P=P))
        r = made_rollout(model.config, replace(learnt, P=P))
        row["learner_gb"] = peak_gb(lambda: our_pass(model, r, adv, True))
        if CUDA:
            row["over"] = row["rollout_gb"] / row["predicted_gb"]
        else:
            row["note"] = "peaks need CUDA"
        report.add(f"prompt {P:,}", row)
    model = None  # its room is for longer prompts
    release()
    longest_prompts(report, name, sampled, learnt)


def rollout_memory(model, name, work):
    """-> row: peak of a rollout, what was to be expected, bytes of its cache. Raises AssertionError
    if those are not the formula's."""
    prompts, kv, c = drawn(name, work.B, work.P), {}, model.config

    def sample():
        kv.update(sampler.generate(
            model, prompts, work.G, work.R, eviction=work.eviction).kv)

    model.zero_grad(set_to_none=True)
    peak = peak_gb(sample)
    kept, formula = kv["kept"], rollout_kv(c, work)
    if kept != formula:
        raise AssertionError(
            f"the cache holds {kept:,} bytes, the formula says {formula:,}")
    weights = sum(p.numel() for p in model.parameters()) * DTYPE.itemsize
    together = work.at_once * work.P * c.kv_bytes_per_token(DTYPE) // c.n_layer
    predicted = weights + kept + together + 4 * work.B * work.G * c.vocab_size
    return dict(prompt=work.P, kv_formula=formula, rollout_gb=peak, kv_bytes=kept,
                kv_mb=kept / 1e6, predicted_gb=predicted / 1e9)


def rollout_kv(config, work):
    """Bytes of KV that a rollout keeps, by formula."""
    keys = work.B * min(work.P, work.budget) + work.B * work.G * (work.R - 1)
    return keys * config.kv_bytes_per_token(DTYPE)


def longest_prompts(report, name, sampled, learnt):
    report.table(
        "longest prompt that fits", "tokens peak_gb", model=name,
        rollout=f"{sampled.B} x {sampled.G} x {sampled.R}",
        learner=f"1 x {learnt.G} x {learnt.R}", kept=sampled.budget, cap=CAP,
        bisected="to 5 % by running at real size",
        rollouts="one prompt of that length, the others short, as prefill takes them "
        "one by one; dense: its forward pass beside a buffer of the cache's size",
        rivals="one micro-batch, gradients there before",
        attention=f"keys live {SHORT} rows at most: the same memory without quadratic "
        "time")
    if not CUDA:
        report.add("all", dict(note="needs CUDA"))
        return
    from transformers import AttentionInterface
    AttentionInterface.register("short", short_attention)
    for contender, probe in probes(name, sampled, learnt).items():
        report.add(contender, attempt(search, contender, *probe))


def search(contender, make, f, a, b):
    """The longest prompt of a contender. make() -> model; f(model, P) runs; a, b: two short lengths
    for the first guess. -> row"""
    model = make()
    release()
    room = (torch.cuda.mem_get_info()[0] + torch.cuda.memory_allocated()) / 1e9

    def run_it(P):
        try:
            f(model, P)
        finally:
            model.zero_grad(set_to_none=True)

    with short_lives():
        row = longest_that_runs(run_it, room, a, b, contender=contender)
    return dict(row, room_gb=room)


def longest_that_runs(f, room, a, b, contender=None):
    """The most tokens n for which f(n) has memory, see `longest`; says what it tries if the
    contender has a name. -> row"""
    def peak(n):
        out = attempt(lambda: dict(gb=peak_gb(lambda: f(n))))
        if out.get("note", "out of memory") != "out of memory":
            raise RuntimeError(out["note"])
        if contender:
            said = out["note"] if "note" in out else f"{out['gb']:.1f} GB"
            tell(f"    {contender}: {n:,} tokens {said}")
        return out.get("gb")

    n, gb, tried = longest(peak, room, a, b)
    notes = {None: "not even the shortest length tried",
             CAP: "the cap: longer was not tried"}
    return dict(tokens=n, peak_gb=gb, tried=tried, note=notes.get(n, ""))


def longest(peak, room, a, b, cap=CAP):
    """Longest P up to cap for which peak(P) is a number and not None (it does not fit), to 5 %.
    -> P, its peak, lengths tried

    Starts where the line through peaks at a and b reaches `room`."""
    tried = {a: peak(a), b: peak(b)}
    if None in tried.values():
        return None, None, tried
    P = int(b + 0.97 * (room - tried[b]) / max(tried[b] - tried[a], 1e-6) * (b - a))
    while True:
        P = min(cap, max(P, b + 1))
        tried[P] = peak(P)
        good = max(p for p in tried if tried[p] is not None)
        bad = min((p for p in tried if tried[p] is None), default=None)
        if good == cap or (bad and bad <= 1.05 * good):
            return good, tried[good], tried
        # far below the first failure the line was wrong, so come down in larger steps; then
        # halve what is left
        if bad is None:
            P = int(1.045 * good)
        elif good < 0.6 * bad:
            P = int(0.8 * bad)
        else:
            P = (good + bad) // 2


def probes(name, sampled, learnt):
    """Contenders for the longest prompt: name -> the arguments of `search`."""
    adv = torch.randn(1, learnt.G, device=DEVICE)
    B, G, R, c = sampled.B, sampled.G, sampled.R, config_of(name)

    def learns(model, P):
        our_pass(model, made_rollout(c, replace(learnt, P=P)), adv, True)

    def samples(model, P):
        # prefill goes one long prompt at a time: one long prompt needs what B long ones need
        prompts = drawn(name, 1, P) + drawn(name, B - 1, sampled.budget)
        sampler.generate(model, prompts, G, R, eviction=sampled.eviction)

    def they_learn(micro):
        def f(model, P):
            # gradients in place, so that the first micro-batch meets what later ones meet
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            r = made_rollout(c, replace(learnt, P=P))
            their_pass(model, r, adv, micro, only=micro)
        return f

    @torch.no_grad()
    def they_sample(model, P):
        size = B * G * (P + R - 1) * c.kv_bytes_per_token(DTYPE)
        cache = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        ids = torch.randint(c.vocab_size, (1, P), device=DEVICE)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
        del cache

    def mine():
        return ours(name)

    def trained():
        return training_rival(name, "short")[0]

    return {
        "our learner, checkpointing": (mine, learns, 8192, 16384),
        f"transformers learner, {learnt.G} at a time":
            (trained, they_learn(learnt.G), 2048, 4096),
        "our rollout": (mine, samples, 16384, 32768),
        "dense rollout, each sample its cache":
            (lambda: rival(name, "short")[0], they_sample, 2048, 4096),
        "transformers learner, 1 at a time": (trained, they_learn(1), 8192, 16384)}


@contextmanager
def short_lives():
    """Every key dies at most SHORT rows after its birth: the same tensors of the same sizes,
    without quadratic time."""
    def cut(until):
        born = torch.arange(until.shape[-1], device=until.device, dtype=torch.int32)
        torch.minimum(until, born + SHORT, out=until)

    def pack(*args, **kwargs):
        packed = real_pack(*args, **kwargs)
        cut(packed.until)
        return packed

    def make_plan(until, **kwargs):
        cut(until)
        return real_plan(until, **kwargs)

    real_pack, real_plan = grpo.pack, sampler.make_plan
    grpo.pack, sampler.make_plan = pack, make_plan
    try:
        yield
    finally:
        grpo.pack, sampler.make_plan = real_pack, real_plan


def short_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """The same for transformers: FlashAttention-2 as SDPA calls it, with a sliding window of SHORT
    rows."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, T, h, hs)
    T = q.shape[1]
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cum_seq_q=None, cum_seq_k=None, max_q=T, max_k=T, dropout_p=0.0,
        is_causal=True, return_debug_mask=False, scale=scaling, window_size_left=SHORT,
        window_size_right=0)
    return out[0], None


# evict

def evict(report, name, work, lengths, budgets, steps, cards):
    """Sampling with caches that evict prompt and response keys and with a dense one, in which the
    samples of a prompt share it; then the longest responses that they have room for. lengths:
    tokens of prompt and response of each table. cards: GB, None: this one."""
    model = ours(name)
    arms = {}
    for n in budgets:
        arms[f"kept {n:,}, of the response too"] = Eviction(
            "snapkv", budget=n, window=WINDOW, sinks=SINKS, response_budget=n)
    arms["dense, prompts shared"] = Eviction("none")
    P, R = lengths[0]
    for eviction in arms.values():  # compiles
        attempt(stretch, model, name, replace(work, P=P, R=R), eviction, steps=steps)
    for P, R in lengths:
        report.table(
            "sampling by what the cache keeps",
            "keys tokens_s rollout_s ratio step_ms prefill_s share peak_gb kv_mb",
            model=name, prompts=f"{work.B} x {work.G}", prompt=P, new_tokens=R,
            timed=f"one prefill pass; {steps} steps amid the response, with "
            "random keys in the cache, median of 3; tokens/s follows from both")
        for arm, eviction in arms.items():
            report.add(arm, attempt(
                stretch, model, name, replace(work, P=P, R=R), eviction, steps=steps))
    P = lengths[0][0]
    report.table(
        "longest response that fits", "card_gb tokens peak_gb", model=name,
        prompts=f"{work.B} x {work.G}", prompt=P, cap=CAP, bisected="to 5 %",
        allocated="weights, cache, its log, a pass over the prompts, logits of a step")
    if not CUDA:
        report.add("all", dict(note="needs CUDA"))
        return
    for gb in cards:
        for arm, eviction in arms.items():
            report.add(arm, attempt(
                longest_response, model, name, replace(work, P=P), eviction, gb=gb))


@torch.no_grad()
def stretch(model, name, work, eviction, steps):
    """Some decoding steps in the middle of responses, where the cache is as long as it is on
    average. -> row; ms: of a whole rollout, were all steps like these"""
    S = work.B * work.G
    release()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    cache = allocate(model, work, eviction)
    stores = *cache.prompt_k, *cache.prompt_v, cache.response_k, cache.response_v
    for store in stores:
        store.normal_()
    together = work.at_once
    began = now()
    sampler.prefill_pack(model, cache, drawn(name, together, work.P), 0)
    prefill_s = (now() - began) * work.B / together
    new = torch.zeros(S, dtype=torch.int64, device=DEVICE)

    def step():  # as generate's
        hidden = model(new, work.P + cache.t.expand(S), cache.attend)  # (S, C)
        cache.advance()
        logits = model.logits(hidden)                           # (S, V)
        if kernels(logits):
            new.copy_(sampler.sample_triton(logits, 1.0, 0, cache.t)[0])
        else:
            new.copy_(sampler.draw_token(logits, 1.0, None)[0])

    first = (work.R - steps) // 2
    go_to(cache, first)
    step()
    go_on = sampler.record(step, model.device) if CUDA else step
    times = []
    for _ in range(4):
        go_to(cache, first)
        filled = cache.response_filled.item()
        began = now()
        for t in range(first + 1, first + steps + 1):
            go_on()
            cache.evict_responses(t)
        times.append((now() - began) / steps)
        filled = (filled + cache.response_filled.item()) / 2
    step_s = statistics.median(times[1:])  # the first pass compiles what evicts
    seconds = prefill_s + (work.R - 1) * step_s
    kept = cache.slots[0][0]
    row = dict(
        ms=1e3 * seconds, rollout_s=seconds, prefill_s=prefill_s, step_ms=1e3 * step_s,
        tokens_s=S * work.R / seconds, keys=round(kept + filled), first_step=first,
        kv_mb=cache.nbytes() / 1e6, peak_gb=allocated())
    nbytes = step_bytes(name, work.B * kept, S, keys=filled)
    return share(row, nbytes=nbytes, ms="step_ms")


def allocate(model, work, eviction):
    return KVCache(model.config, [work.P] * work.B, group=work.G, max_new_tokens=work.R,
                   eviction=eviction, device=DEVICE, dtype=model.dtype)


def go_to(cache, t):
    """Let the cache be where it is when t tokens of the responses were fed. Which keys were born
    when does not change what is computed, so the last ones stay."""
    cache.t.fill_(t)
    cache.response_filled.fill_(t)
    budget, period = cache.eviction.response_budget, cache.eviction.period
    if budget is None:
        return
    last = t - t % period  # when keys were evicted
    held = min(last, budget)
    L, S, nkv, _ = cache.until.shape
    born = torch.arange(last - held, last, device=cache.t.device).expand(S, nkv, -1)
    cache.born = [born] * L
    cache.response_filled.fill_(held + t - last)


def longest_response(model, name, work, eviction, gb):
    """The longest response that such a card has room for. gb: None: this card's. -> row"""
    prompts = drawn(name, work.at_once, work.P)

    @torch.no_grad()
    def allocated_at(R):
        cache = allocate(model, replace(work, R=R), eviction)
        S = work.B * work.G
        tokens = torch.empty(S, R, 12, dtype=torch.uint8, device=DEVICE)  # log-probs too
        sampler.prefill_pack(model, cache, prompts, 0)
        logits = torch.empty(S, model.config.vocab_size, device=DEVICE)
        return cache, tokens, logits

    with capped(gb and gb - CONTEXT):
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_allocated()
        row = longest_that_runs(allocated_at, gb or free / 1e9, 1024, 4096)
    whole = torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
    return dict(row, card_gb=round(gb or whole))


# dtype

def dtype(report, name, work, lengths, model=""):
    """How far the learner's log-probs lie from the sampler's, over the first tokens of the same
    responses, under replay and under the dense policy. model: a checkpoint, given prompts from the
    documents here; "": a named shape with random weights and tokens."""
    folder = model and find_checkpoint(model)
    report.table(
        "learner against sampler, mean and largest |log-prob| difference of a token",
        "tokens gap gap_max dense_gap dense_max", model=model or name, **work.facts,
        tokens="of each response; stop tokens end none")
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        found = attempt(gaps, folder, name, work, lengths=lengths, kind=kind)
        for row in found.get("rows", [found]):  # found: a note
            report.add(str(kind).removeprefix("torch."), row)


def gaps(folder, name, work, lengths, kind):
    """-> rows=[a row for each length]"""
    if folder:
        tok = Tokenizer(folder)
        net = Transformer.from_pretrained(folder, device=DEVICE, dtype=kind)
        net.use_tokens(len(tok), tok.absent)
        prompts = documents(tok, work.B, work.P)
    else:
        net, prompts = ours(name, kind), drawn(name, work.B, work.P)
    r = sampler.generate(net, prompts, work.G, work.R, eviction=work.eviction)
    with torch.no_grad():
        out = grpo.replay(net, r, ("dense", "shadow"))
    rows = []
    for n in lengths:
        row = dict(tokens=n)
        for policy, mean, largest in (("shadow", "gap", "gap_max"),
                                      ("dense", "dense_gap", "dense_max")):
            apart = (out[policy] - r.logp_roll)[..., :n].abs()  # (B, G, n)
            row[mean], row[largest] = apart.mean().item(), apart.max().item()
        rows.append(row)
    return dict(rows=rows)


def documents(tok, B, P):
    """B prompts of P tokens, one after the other, of the documents of this repository."""
    ids = []
    for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")):
        if len(ids) < B * P:
            ids += tok.encode(path.read_text(encoding="utf-8"))
    return [ids[b * P:(b + 1) * P] for b in range(B)]


# the command line

LONG = Work(B=8, P=8192, G=8, R=256, budget=1024)
GROUP = replace(LONG, B=1)
TINY = Work(B=2, P=64, G=2, R=6, budget=48)
SMOLLM, SMALL, QWEN, LARGE, _ = SHAPES
ALL = attn, decode, learner, step, lora, cards, memory, fit, evict, dtype
PARTS = {part.__name__: part for part in ALL}
CACHES = ("dynamic", "static", "paged")
TRL = {"float32 (its default)": dict(dtype="float32"),
       "bfloat16 (no fp32 masters)": dict(dtype="bfloat16")}
# without the package flash-attn its sampler computes all pairs of a batch's tokens and cached
# keys: not for long prompts
BATCHING = {"bfloat16, continuous batching": dict(dtype="bfloat16", paged=True)}
REQUESTS = dict(  # part -> arguments of each of its tables
    attn=[dict(nh=16, nkv=8, hs=128, work=GROUP, repeat=10),
          dict(nh=14, nkv=2, hs=64, work=GROUP, repeat=10)],
    decode=[dict(name=SMOLLM, work=Work(B=8, P=2048, G=8, R=128, budget=256), repeat=3,
                 rivals=CACHES),
            dict(name=QWEN, work=replace(LONG, R=128), repeat=2, rivals=())],
    learner=[dict(name=QWEN, work=GROUP, repeat=3)],
    step=[dict(name=SMOLLM, work=Work(B=8, P=1024, G=8, R=64, budget=256), steps=3,
               checkpointing=True, micro_rows=16384,  # as in config/smollm2.py
               rivals=TRL | BATCHING),
          dict(name=QWEN, work=LONG, steps=1, checkpointing=True, micro_rows=16384,
               rivals=TRL)],
    lora=[dict(name=name, work=replace(LONG, B=4), steps=1, rank=16)
          for name in (QWEN, LARGE)],
    cards=[dict(name=SMALL, work=replace(LONG, P=2048, budget=512), steps=5),
           dict(name=SMALL, work=LONG, steps=5), dict(name=QWEN, work=LONG, steps=3)],
    memory=[dict(name=QWEN, lengths=[2**i for i in range(10, 17)],
                 sampled=replace(LONG, P=0, R=64), learnt=replace(GROUP, P=0))],
    fit=[dict(name=name, work=Work(B=4, P=P, G=8, R=R, budget=budget), gb=gb, steps=3)
         for gb, name, P, R, budget in (
             (8, SMOLLM, 1000, 64, 128), (8, SMALL, 4000, 64, 512),
             (16, SMOLLM, 1000, 64, 128), (16, SMOLLM, 4000, 256, 512),
             (16, SMALL, 300, 256, 1024), (16, SMALL, 4000, 64, 512),
             (24, SMALL, 8000, 256, 1024), (24, QWEN, 1000, 64, 128),
             (24, QWEN, 300, 256, 1024), (24, QWEN, 4096, 64, 512))],
    evict=[dict(name=name, work=Work(B=8, P=0, G=8, R=0, budget=0), steps=128,
                lengths=[(1024, 512), (1024, 2048), (1024, 8192), (1024, 32768),
                         (4096, 512), (16384, 512), (65536, 512)],
                budgets=(1024, 2048), cards=(24, 80, None))
           for name in (SMALL, QWEN)],
    dtype=[dict(name=SMALL, work=Work(B=4, P=1024, G=4, R=512, budget=256),
                lengths=(64, 256, 512))])
QUICK = dict(
    attn=[dict(nh=4, nkv=2, hs=16, work=replace(TINY, R=8), repeat=1)],
    decode=[dict(name="tiny", work=TINY, repeat=1, rivals=CACHES)],
    learner=[dict(name="tiny", work=TINY, repeat=1)],
    step=[dict(name="tiny", work=TINY, steps=1, checkpointing=True, micro_rows=64,
               rivals=TRL | BATCHING)],
    lora=[dict(name="tiny", work=TINY, steps=1, rank=2)],
    cards=[dict(name="tiny", work=TINY, steps=1)],
    memory=[dict(name="tiny", lengths=[40, 64], sampled=replace(TINY, R=4),
                 learnt=TINY)],
    fit=[dict(name="tiny", work=TINY, gb=1, steps=1)],
    evict=[dict(name="tiny", work=TINY, lengths=[(64, 60), (96, 20)], steps=4,
                budgets=(48,), cards=(1,))],
    dtype=[dict(name="tiny", work=TINY, lengths=(2, 6))])


def version(name):
    try:
        return __import__(name).__version__
    except ImportError:
        return None


def facts():
    """Where the numbers come from."""
    card = torch.cuda.get_device_name() if CUDA else "CPU"
    known = [x for x in ("h100", "h200", "a100", "b200", "cpu") if x in card.lower()]
    slug = known[0] if known else card.lower().replace(" ", "-")
    how = "CUDA events, calls back to back"
    if not CUDA:
        how = f"wall clock, {torch.get_num_threads()} thread(s)"
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return dict(card=card, slug=slug, dtype=str(DTYPE).removeprefix("torch."),
                timed=how + "; first s is the first call, compilation included",
                **versions, **ceilings())


def arguments(argv=None):
    a = Arguments(prog="bench", description="measure time and memory (docs/speed.md)")
    a.add_argument("part", choices=(*PARTS, "all"),
                   help="attention; sampling; a learner's forward and backward pass; a "
                   "whole training step, also with LoRA, also on several cards; "
                   "memory; what fits a smaller card; sampling by length; rounding")
    a.add_argument("--quick", action="store_true", default=not CUDA,
                   help="tiny shapes, in seconds; always so without CUDA")
    a.add_argument("--shape", choices=list(SHAPES),
                   help="only the tables of this model (attn has none)")
    a.add_argument("--model", default="",
                   help="for dtype: a folder or a hub name; else random weights")
    a.add_argument("--out", default="out-bench", type=os.path.expanduser,
                   help="folder for the numbers as JSON")
    return a.parse_args(argv)


def request(a):
    """-> {part: arguments of its tables}; makes the folder. Raises ValueError, OSError."""
    wanted = {}
    for part, tables in (QUICK if a.quick else REQUESTS).items():
        tables = [t for t in tables if a.shape in (None, t.get("name"))]
        if a.part in (part, "all") and tables:
            wanted[part] = tables
    if not wanted:
        among = " among its tiny shapes" if a.quick else ""
        raise ValueError(f"{a.part} has no table of {a.shape}{among}")
    if parallel.size() > 1 and list(wanted) != ["cards"]:
        raise ValueError(
            f"{a.part} measures one card: run it without torchrun")
    if a.model and list(wanted) != ["dtype"]:
        raise ValueError(f"{a.part} does not use --model, which only dtype does")
    if a.model:
        find_checkpoint(a.model)
        wanted["dtype"] = [dict(table, model=a.model) for table in wanted["dtype"]]
    make_folder(a.out)  # better now than after the first measurement
    return wanted


def main(argv=None):
    a = arguments(argv)
    with one_line_errors(ValueError, OSError):
        choose_device(SimpleNamespace(device="auto"))  # each rank its own card
        wanted = request(a)
    about = facts()
    tell("; ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v}"
                   for k, v in about.items()))
    with one_line_errors(OSError):  # a full disk
        for part, tables in wanted.items():
            # a run of fewer or smaller tables, or with more cards, gets a name of its own
            name = ["bench", part, "quick" if a.quick and CUDA else "", a.shape or "",
                    f"x{parallel.size()}" if parallel.size() > 1 else "", about["slug"]]
            path = os.path.join(a.out, "-".join(filter(None, name)) + ".json")
            report = Report(path, part=part, **about)
            for table in tables:
                PARTS[part](report, **table)
            tell(f"\n{part}: numbers in {path}")


if __name__ == "__main__":
    with parallel.ranks():
        main()
