"""
How fast this code is and how much memory it takes, beside what a user would otherwise run, on the card it stands on.

    python bench.py attn          # the kernel: FlashAttention-2, cuDNN, FlexAttention, SDPA with a dense mask
    python bench.py decode        # sampling: transformers' generate, dynamic and static cache
    python bench.py learner       # forward and backward pass of one group: transformers with gradient checkpointing
    python bench.py step          # a whole training step: TRL's GRPOTrainer
    python bench.py memory        # peak against prompt length, and the longest prompt that fits
    python bench.py all           # --quick: tiny shapes (all that a CPU is good for), --out=FOLDER instead of out-bench

The idea. A ratio needs the same work on both sides and a time needs a ceiling. Models have the shape of a named checkpoint and
random weights; for decode and learner the same on both sides, their fp32 logits compared before anything is timed; attentions
under one mask are compared in output and gradients. "of limit" is the share that the useful bytes or floating-point operations
make of what a plain copy of a large tensor or one large bf16 matrix product reaches in the same process. Rivals that score one
policy say so.

Each part prints its tables and writes out-bench/bench-PART-CARD.json, which holds every number it printed. Left out: several GPUs,
serving engines (a trainer must load its new weights into them at every step), quality of what is learned.
"""
import argparse
import functools
import gc
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, flex_attention as flex, sdpa_kernel

import grpo
import rollout as sampler
from model import Config, Transformer
from shadow_attn import group_until, run, shadow_attention

warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*", category=FutureWarning)  # its new name is too new
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile", category=UserWarning)  # on purpose, on CPU
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
WINDOW, SINKS = 32, 4  # generate's defaults
CAP = 1_000_000        # longest prompt tried, in tokens
SHORT = 2048           # rows a key lives where only memory is measured: attention costs no more than the rest


def shape(model_type, hidden, layers, heads, kv_heads, head, mlp, vocab, theta):
    """config.json of a model; long contexts are allowed, as RoPE needs no table."""
    return dict(model_type=model_type, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=head, intermediate_size=mlp, vocab_size=vocab, rms_norm_eps=1e-6,
                max_position_embeddings=1 << 20, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
                rope_parameters=dict(rope_type="default", rope_theta=theta))


SHAPES = {"smollm2-135m": shape("llama", 576, 30, 9, 3, 64, 1536, 49152, 1e5),
          "qwen2.5-1.5b": shape("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, 1e6),
          "tiny": shape("qwen2", 32, 2, 4, 2, 8, 64, 128, 1e4)}

# ---- measuring ----


def sync():
    if CUDA:
        torch.cuda.synchronize()


def free():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def clock(f, repeat=5, warm=1):
    """Time f(): the first call apart (it compiles), `warm` more calls, then the median of `repeat`. -> first_s, ms, peak_gb

    On CUDA by events, with no wait between calls: what a call does on the host hides behind the card's work, as in a model."""
    start = time.perf_counter()
    f()
    sync()
    first = time.perf_counter() - start
    for _ in range(warm):
        f()
    sync()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) if CUDA else None for _ in range(repeat + 1)]
    for i in range(repeat + 1):
        if i:
            f()
        if CUDA:
            marks[i].record()
        else:
            marks[i] = 1e3 * time.perf_counter()
    sync()
    times = [a.elapsed_time(b) if CUDA else b - a for a, b in zip(marks, marks[1:])]
    return dict(first_s=first, ms=statistics.median(times), times_ms=times, peak_gb=allocated())


def allocated():
    """GB at the peak since the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if CUDA else None


@functools.cache
def ceilings():
    """What this card reaches: copy_gb_s of a large tensor, read and written bytes counted; matmul_tflops of two 8192^2 bf16 matrices."""
    n, size = (8192, 2**30) if CUDA else (256, 2**22)
    x = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    copy = clock(lambda: y.copy_(x), 20)["ms"]
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in "ab")
    product = clock(lambda: a @ b, 20)["ms"]
    return dict(copy_gb_s=2 * size / copy / 1e6, matmul_tflops=2 * n**3 / product / 1e9)


def attempt(f):
    """f(), or a note that says what went wrong: a contender that cannot run must not stop the others. Disagreement does."""
    try:
        return f()
    except AssertionError:
        raise
    except Exception as e:
        text = " ".join(f"{type(e).__name__}: {e}".split())
        # libraries below torch report a full card in their own words
        note = "out of memory" if "out of memory" in text.lower() or "ALLOC_FAILED" in text else text[:160]
    free()  # only here, where the traceback no longer holds the tensors
    return dict(note=note)


def check_same(what, a, b, bound):
    """Relative difference |a - b| / |b|; raises AssertionError above bound, NaN included. -> the difference"""
    error = ((a.float() - b.float()).norm() / b.float().norm()).item()
    if not error < bound:
        raise AssertionError(f"{what}: relative difference {error:.1e}, at most {bound:.0e} was expected")
    return error


# column -> heading, format
COLUMNS = dict(policies=("policies", "8d"), ms=("ms", "11,.2f"), tokens_s=("tokens/s", "11,.0f"), ratio=("x ours", "8.2f"),
               step_ms=("ms/step", "9.2f"), rollout_s=("rollout s", "9.3f"), learn_s=("learn s", "9.3f"), share=("of limit", "8.1%"),
               limit=("limit", "7s"), rollout_gb=("rollout GB", "10.3f"), predicted_gb=("predicted", "10.3f"), over=("ratio", "7.2f"),
               learner_gb=("learner GB", "10.3f"), kv_mb=("kept KV MB", "12,.3f"), tokens=("tokens", "10,d"), peak_gb=("peak GB", "8.2f"),
               first_s=("first s", "8.2f"), error=("differs", "8.1e"))


class Table:
    """Rows are printed as they are measured; `rows` is what the JSON file gets. x ours: time over the first row's."""
    saved = staticmethod(lambda table: None)  # called after each row: a part that is stopped leaves what it has measured

    def __init__(self, title, columns, **facts):
        self.title, self.columns, self.facts, self.rows = title, columns.split(), facts, []
        print(f"\n{title}: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
        print(f"{'':36s}" + " ".join(COLUMNS[c][0].rjust(self.width(c)) for c in self.columns), flush=True)

    @staticmethod
    def width(column):
        return max(len(COLUMNS[column][0]), int(COLUMNS[column][1].split(",")[0].split(".")[0].rstrip("sd")))

    def add(self, name, row):
        self.rows.append(dict(row, name=name))
        if row.get("ms") and self.rows[0].get("ms"):
            self.rows[-1]["ratio"] = row["ms"] / self.rows[0]["ms"]
        cell = lambda c, x: ("-" if x is None else format(x, COLUMNS[c][1])).rjust(self.width(c))
        print(f"{name:36s}" + " ".join(cell(c, self.rows[-1].get(c)) for c in self.columns) + "  " + row.get("note", ""), flush=True)
        self.saved(self)


def share(row, flops=0, nbytes=0, ms="ms"):
    """Add what the useful work makes of the ceiling that limits it."""
    if ms in row:
        top = ceilings()["matmul_tflops"] * 1e9 if flops else ceilings()["copy_gb_s"] * 1e6
        row.update(share=(flops or nbytes) / row[ms] / top, limit="matmul" if flops else "copy", work=flops or nbytes)
    return row


# ---- the same model twice ----

def ours(name, dtype=DTYPE):
    """Our model of a named shape, random weights, always the same."""
    with torch.device("meta"):
        model = Transformer(Config.from_dict(SHAPES[name]))
    model, rng = model.to(dtype).to_empty(device=DEVICE), torch.Generator(DEVICE).manual_seed(0)
    std = 0.02 if model.config.width > 100 else 0.35  # a narrow model needs more, or its layers leave no mark on the logits
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.fill_(1) if "norm" in key else p.normal_(0, std, generator=rng)
    return model


def by_transformers(mine, name, attention, dtype):
    """transformers' model of a named shape with the weights of `mine`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), attn_implementation=attention, dtype=dtype)
    theirs = model.state_dict()
    with torch.no_grad():
        for key, x in mine.tensors().items():
            theirs[key if key.startswith("lm_head.") else "model." + key].copy_(x)
    return model


def rival(name, attention="sdpa"):
    """The same model by transformers, the same weights. -> model, relative difference of its logits from ours

    They are compared in fp32, where nothing but a difference of the models is left: in bf16 28 layers drift 3e-2 apart."""
    mine = ours(name, torch.float32)
    with torch.no_grad():
        ids, row = torch.randint(mine.config.vocab_size, (64,), device=DEVICE), torch.arange(64, device=DEVICE)
        until = torch.full((mine.config.n_kv_head, 64), 64, dtype=torch.int32, device=DEVICE)
        logits = mine.logits(mine(ids, row, lambda layer, q, k, v: shadow_attention(q, k, v, until, impl="ref")))
        theirs = by_transformers(mine, name, "sdpa", torch.float32)
        error = check_same("logits of the two models", theirs(input_ids=ids[None]).logits[0], logits, 1e-4)
    del mine, theirs
    free()
    return by_transformers(ours(name), name, attention, DTYPE), error


def drawn(name, B, P):
    """B prompts of P random tokens."""
    return torch.randint(SHAPES[name]["vocab_size"], (B, P), generator=torch.Generator().manual_seed(1)).tolist()


# ---- attn ----

def visible_pairs(until, group):
    """(query head, query, key) triples that are visible under until (..., N)."""
    row = torch.arange(until.shape[-1], device=until.device)
    return group * (until - row).clamp(min=0).sum().item()


def packed_rivals(until, nh):
    """name -> attention of q (1, nh, N, hs), k, v (1, nkv, N, hs) under until. Each layer has its own mask, so making it counts."""
    group, N = nh // len(until), until.shape[1]
    row = torch.arange(N, device=DEVICE)
    rule = lambda b, h, i, j: (j <= i) & (i < until[h // group, j])
    attention = torch.compile(flex.flex_attention, dynamic=False) if CUDA else flex.flex_attention
    # eager: compiled, as its documentation recommends, it did not get past Triton 3.6 in three minutes at these sizes
    make = lambda: flex.create_block_mask(rule, 1, nh, N, N, device=DEVICE)
    made = make()

    def matrix(q, k, v):  # the memory-efficient backend knows no groups of heads, so keys, values and mask are repeated
        visible = ((row <= row[:, None]) & (row[:, None] < until[:, None])).repeat_interleave(group, 0)[None]  # (1, nh, N, N)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION if CUDA else SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, *(x.repeat_interleave(group, 1) for x in (k, v)), attn_mask=visible)
    return {"FlexAttention, mask made before": lambda q, k, v: attention(q, k, v, block_mask=made, enable_gqa=True),
            "FlexAttention, mask included": lambda q, k, v: attention(q, k, v, block_mask=make(), enable_gqa=True),
            "SDPA, mask as a matrix": matrix}


def causal_rows(table, sizes, sequences, T, repeat):
    """Add SDPA's two fast backends on plain causal sequences of T rows."""
    nh, nkv, hs = sizes

    def go(backend):
        x = [torch.randn(sequences, n, T, hs, device=DEVICE, dtype=DTYPE) for n in (nh, nh, nkv, nkv)]

        def f(q, k, v):
            with sdpa_kernel([backend]):  # raises if it cannot serve the request, where the default would fall back
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return share(dict(clock(lambda: run(f, *x), repeat), policies=1), 14 * hs * nh * sequences * T * (T + 1) // 2)

    for name, backend in (("SDPA FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
        table.add(f"{name}, causal", attempt(lambda: go(backend)) if CUDA else dict(note="needs CUDA"))


def attn(nh, nkv, hs, P, G, R, budget, repeat):
    """Forward and backward pass of one layer's attention over one group, then over one causal sequence."""
    torch.manual_seed(0)
    until, columns = group_until(P, G, R, budget, nkv, DEVICE), "policies ms ratio share limit peak_gb first_s error"
    N, T, group, bound = until.shape[1], P + R - 1, nh // nkv, 1e-2 if DTYPE == torch.bfloat16 else 1e-5
    table = Table("attention of one group, forward + backward", columns, heads=f"{nh}:{nkv} of {hs}", prompt=P, responses=f"{G} x {R}",
                  kept=budget, packed_rows=N, unpacked_rows=G * T, timed=f"median of {repeat}; masks and sorting included")
    x = [torch.randn(N, n, hs, device=DEVICE, dtype=DTYPE) for n in (nh, nh, nkv, nkv)]  # grad, q, k, v
    flat, flops = [a.transpose(0, 1)[None].contiguous() for a in x], 14 * hs * visible_pairs(until, group)  # (1, heads, N, hs)
    f = lambda *x: shadow_attention(*x, until)
    table.add("ours", share(dict(clock(lambda: run(f, *x), repeat), policies=2), flops))
    want = run(f, *x)

    def same_mask(name, f):
        # FlexAttention has no backward pass on CPU: there its output is compared and nothing timed
        go = (lambda: [f(*flat[1:])]) if not CUDA and "Flex" in name else lambda: run(f, *flat)
        error = max(check_same(f"{part} of {name}", a[0].transpose(0, 1), b, bound)
                    for part, a, b in zip(("out", "dq", "dk", "dv"), go(), want))
        return share(dict(clock(go, repeat), policies=2, error=error), flops) if CUDA else dict(error=error, note="timed on CUDA only")

    for name, other in packed_rivals(until, nh).items():
        table.add(name, attempt(lambda: same_mask(name, other)))
        free()
    causal_rows(table, (nh, nkv, hs), G, T, repeat)
    second = Table("one causal sequence, forward + backward", columns, heads=f"{nh}:{nkv} of {hs}", rows=P)
    until, x = torch.full((nkv, P), P, dtype=torch.int32, device=DEVICE), [a[:P] for a in x]
    second.add("ours", share(dict(clock(lambda: run(f, *x), repeat), policies=1), 14 * hs * visible_pairs(until, group)))
    causal_rows(second, (nh, nkv, hs), 1, P, repeat)


# ---- decode ----

def step_bytes(name, prompt_keys, S, keys):
    """Bytes that one decoding step must read: every weight once (of a tied table, as the head), prompt keys, response keys."""
    c = Config.from_dict(SHAPES[name])
    with torch.device("meta"):
        weights = sum(p.numel() for key, p in Transformer(c).named_parameters() if c.tied or "embed_tokens" not in key)
    return weights * DTYPE.itemsize + (prompt_keys + S * keys) * c.kv_bytes_per_token(DTYPE)


def decode(name, B, P, G, R, budget, repeat, rivals):
    """Sampling, prompt included; a decoding step alone is the difference between R tokens and an eighth of R."""
    few, S, prompts = max(2, R // 8), B * G, drawn(name, B, P)
    table = Table("sampling", "tokens_s ms ratio step_ms share limit peak_gb first_s error", model=name, prompts=f"{B} x {G}", prompt=P,
                  new_tokens=R, kept=budget, timed=f"median of {repeat}; step: {R} against {few} tokens")

    def timed(f, prompt_keys, **facts):
        row = dict(clock(lambda: f(R), repeat, warm=0), **facts)
        row["ms_few"] = clock(lambda: f(few), repeat, warm=0)["ms"]
        row.update(tokens_s=1e3 * S * R / row["ms"], step_ms=(row["ms"] - row["ms_few"]) / (R - few))
        return share(row, nbytes=step_bytes(name, prompt_keys, S, (few + R - 1) / 2), ms="step_ms")

    model = ours(name)
    table.add("ours", timed(lambda n: sampler.generate(model, prompts, G, n, budget=budget), B * min(P, budget)))
    del model
    free()

    def theirs(cache):
        model, error = rival(name)
        ids = torch.tensor(prompts, device=DEVICE).repeat_interleave(G, 0)

        def generate(n):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, temperature=1.0, max_new_tokens=n,
                                 min_new_tokens=n, pad_token_id=0, **cache)
            if out.shape != (S, P + n):
                raise AssertionError(f"transformers made {tuple(out.shape)} tokens of {(S, P + n)} asked for")
        return timed(generate, S * P, error=error)

    for kind, cache in dict(dynamic={}, static=dict(cache_implementation="static")).items():
        if kind in rivals:
            table.add(f"transformers, {kind} cache, dense", attempt(lambda: theirs(cache)))
            free()


# ---- learner ----

def made_rollout(model, P, G, R, budget):
    """What a rollout of one prompt leaves, at random: sinks, window and random other keys are kept."""
    c, dev = model.config, model.device
    torch.manual_seed(0)
    score = torch.rand(c.n_layer, c.n_kv_head, P, device=dev)
    score[:, :, :SINKS] = score[:, :, P - WINDOW:] = 2
    kept = score.topk(min(P, budget)).indices.sort(-1).values                        # (L, nkv, K)
    return sampler.Rollout(torch.randint(c.vocab_size, (1, P)).tolist(), torch.randint(c.vocab_size, (1, G, R), device=dev),
                           torch.full((1, G), R, device=dev), torch.zeros(1, G, R, device=dev), 1.0, [kept],
                           torch.full((c.n_layer, c.n_kv_head, 1, G, R), R, dtype=torch.int32, device=dev),
                           torch.zeros(1, G, dtype=torch.bool, device=dev))


def our_pass(model, r, adv, checkpointing):
    """Forward and backward pass over both policies: GRPO on the shadow policy, the dense one distilled from it."""
    model.zero_grad(set_to_none=True)
    out = grpo.replay(model, r, ("dense", "shadow"), distill_to="dense", checkpointing=checkpointing)
    loss = grpo.policy_loss(out["shadow"], None, adv, r.mask)[0] + 0.1 * (grpo.token_scale(r.mask) * out["kl"]).sum()
    loss.backward()


def their_pass(model, r, adv, micro, only=None):
    """Forward and backward pass over one policy, `micro` unpacked sequences at a time (the first `only` of them)."""
    (_, G, R), scale, P = r.tokens.shape, grpo.token_scale(r.mask), len(r.prompts[0])
    ids = torch.cat((torch.tensor(r.prompts, device=DEVICE).expand(G, P), r.tokens[0, :, :-1]), dim=1)  # (G, P + R - 1)
    for i in range(0, only or G, micro):
        part = slice(i, i + micro)
        logits = model(input_ids=ids[part], use_cache=False, logits_to_keep=R).logits                   # (micro, R, V)
        logp = logits.float().log_softmax(-1).gather(-1, r.tokens[0, part, :, None])[None, :, :, 0]     # (1, micro, R)
        del logits
        grpo.policy_loss(logp, None, adv[:, part], r.mask[:, part], scale=scale[:, part])[0].backward()


def training_rival(name, attention="sdpa"):
    model, error = rival(name, attention)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model, error


def learner_flops(c, model_size, rows, pairs, head_rows, again, head_passes):
    """Floating-point operations of a forward and backward pass, counting what is computed `again` in the backward pass."""
    body = model_size - c.vocab_size * c.width
    return ((8 if again else 6) * body * rows + (18 if again else 14) * c.head_size * pairs
            + head_passes * c.vocab_size * c.width * head_rows)


def learner(name, P, G, R, budget, repeat):
    table = Table("learner, one prompt, forward + backward", "policies ms ratio share limit peak_gb first_s error", model=name, prompt=P,
                  responses=f"{G} x {R}", kept=budget, packed_rows=P + 2 * G * (R - 1), unpacked_rows=G * (P + R - 1),
                  timed=f"median of {repeat}; peak with weights and gradients")
    model, adv = ours(name), torch.randn(1, G, device=DEVICE)
    c, size, r = model.config, sum(p.numel() for p in model.parameters()), made_rollout(model, P, G, R, budget)
    until = sampler.pack(r).until
    pairs = visible_pairs(until, c.n_head // c.n_kv_head)
    for again in (True, False):
        go = lambda: share(dict(clock(lambda: our_pass(model, r, adv, again), repeat, warm=0), policies=2),
                           learner_flops(c, size, until.shape[2], pairs, 2 * G * R, again, 8))
        table.add("ours, checkpointing" if again else "ours, all activations kept", go() if again else attempt(go))
    del model, until
    free()
    T = P + R - 1

    def theirs(micro):
        model, error = training_rival(name)

        def f():
            model.zero_grad(set_to_none=True)
            their_pass(model, r, adv, micro)
        row = dict(clock(f, repeat, warm=0), policies=1, error=error)
        return share(row, learner_flops(c, size, G * T, c.n_layer * c.n_head * G * T * (T + 1) // 2, G * R, True, 6))

    for micro in (G, 1):
        table.add(f"transformers, {micro} sequence{'s'[:micro - 1]} at a time", attempt(lambda: theirs(micro)))
        free()


# ---- step ----

def our_step(name, prompts, P, G, R, budget, steps, checkpointing):
    """Sample, reward at random, advantages, update, as train.py does. -> a row of the table"""
    import train
    from support.optimizer import Masters
    c = SimpleNamespace(**{**train.DEFAULTS, **dict(lr=1e-6, temperature=1.0, budget=budget, window=WINDOW, sinks=SINKS,
                                                    checkpointing=checkpointing)})
    model, times = ours(name), []
    opt, ids = Masters(model, c), drawn(name, prompts, P)
    for i in range(steps + 1):
        sync()
        marks = [time.perf_counter()]
        r = sampler.generate(model, ids, G, R, c.temperature, c.evict, budget, WINDOW, SINKS, seed=i)
        rewards = torch.rand(prompts, G, device=DEVICE)
        sync()
        marks.append(time.perf_counter())
        train.learn(model, opt, r, grpo.advantages(rewards, c.norm), c, c.lr)
        sync()
        marks.append(time.perf_counter())
        times.append([marks[2] - marks[0], marks[1] - marks[0], marks[2] - marks[1]])
        if i == 0 and CUDA:
            torch.cuda.reset_peak_memory_stats()
    seconds, rollout_s, learn_s = (statistics.median(x) for x in zip(*times[1:]))
    return dict(ms=1e3 * seconds, rollout_s=rollout_s, learn_s=learn_s, first_s=times[0][0], peak_gb=allocated())


def trl_step(raw, prompts, P, G, R, steps, dtype):
    """TRL's GRPOTrainer on random weights and random prompts: `steps` times one generation and one optimizer update.

    raw: a config.json as dict; a step has `prompts` prompts of exactly P tokens, with G samples of exactly R new tokens. dtype: of
    the parameters; "float32" is what GRPOTrainer loads by default, computing in bf16 autocast on CUDA. It keeps no masters:
    "bfloat16" also makes the optimizer's state bf16. -> seconds of each step, the first of which warms up; the part of each in
    generate; peak GB after the warm-up; versions. Raises ImportError without trl, RuntimeError if TRL did other work."""
    try:
        import datasets
        import transformers
        import trl
    except ImportError as e:
        raise ImportError(f"the comparison with TRL needs trl and datasets (pip install trl): {e}") from None
    from tokenizers import Tokenizer, models, pre_tokenizers
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()

    # text "17 4 99" <-> ids [17, 4, 99]; <eos> lies outside the model's vocabulary, so that no sample ends early, at no cost
    V, draw = raw["vocab_size"], random.Random(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(V)} | {"<eos>": V}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", padding_side="left")
    text = [" ".join(str(draw.randrange(V)) for _ in range(P)) for _ in range(steps * prompts)]
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw), dtype=getattr(torch, dtype))
    seconds, rollout_s, start, generate = [], [], 0.0, model.generate

    def timed(*args, **kwargs):
        sync()
        t0 = time.perf_counter()
        out = generate(*args, **kwargs)
        sync()
        rollout_s.append(time.perf_counter() - t0)
        return out

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            nonlocal start
            sync()
            start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            sync()
            seconds.append(time.perf_counter() - start)
            if CUDA and state.global_step == 1:
                torch.cuda.reset_peak_memory_stats()  # the steps measured are those after the warm-up

    model.generate = timed
    with tempfile.TemporaryDirectory() as out_dir:
        # what is not named is TRL's default; some of what is named is too, because defaults change
        args = trl.GRPOConfig(
            output_dir=out_dir, max_steps=steps, use_cpu=not CUDA, bf16=CUDA, num_generations=G, max_completion_length=R,
            per_device_train_batch_size=G, gradient_accumulation_steps=prompts,
            steps_per_generation=prompts,  # all samples of a step in one call of generate, then one update
            num_iterations=1, beta=0.0, loss_type="dapo", temperature=1.0, top_p=1.0, top_k=0, min_p=None, use_vllm=False,
            gradient_checkpointing=True, optim="adamw_torch_fused", max_grad_norm=1.0, learning_rate=1e-6,
            report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
        trainer = trl.GRPOTrainer(model, lambda completion_ids, **_: [draw.random() for _ in completion_ids], args,
                                  datasets.Dataset.from_dict(dict(prompt=text)), processing_class=tok, callbacks=[Clock()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    done, asked = (len(seconds), len(rollout_s), trainer.state.num_input_tokens_seen), (steps, steps, steps * prompts * G * (P + R))
    if done != asked:  # updates, generations, tokens by TRL's own count, without padding
        raise RuntimeError(f"TRL made {done} updates, generations and tokens, {asked} were asked for")
    peak = allocated()
    # the trainer sits in reference cycles and in accelerate's registry: what comes next would find the memory taken
    trainer.accelerator.free_memory()
    del model.generate
    return seconds, rollout_s, peak, {m.__name__: m.__version__ for m in (trl, transformers, datasets, torch)}


def step(name, prompts, P, G, R, budget, steps, checkpointing):
    table = Table("one training step", "ms ratio rollout_s learn_s peak_gb first_s", model=name, prompts=f"{prompts} x {G}", prompt=P,
                  new_tokens=R, kept=budget, our_checkpointing=checkpointing, TRL_checkpointing=True,
                  timed=f"median of {steps} after a first one, wall clock")
    table.add("ours", attempt(lambda: our_step(name, prompts, P, G, R, budget, steps, checkpointing)))
    free()

    def theirs(dtype):
        try:
            seconds, rollout_s, peak, versions = trl_step(SHAPES[name], prompts, P, G, R, steps + 1, dtype)
        except ImportError as e:
            return dict(note=str(e))
        whole, part = statistics.median(seconds[1:]), statistics.median(rollout_s[1:])
        return dict(ms=1e3 * whole, first_s=seconds[0], rollout_s=part, learn_s=whole - part, peak_gb=peak, versions=versions)
    for dtype, what in (("float32", "its default"), ("bfloat16", "no fp32 masters")):
        table.add(f"TRL, {dtype} ({what})", attempt(lambda: theirs(dtype)))
        free()


# ---- memory ----

@contextmanager
def short_lives():
    """Every key dies at most SHORT rows after its birth: the same tensors of the same sizes, without quadratic time."""
    def cut(until):
        torch.minimum(until, torch.arange(until.shape[-1], device=until.device, dtype=torch.int32) + SHORT, out=until)

    def pack(*args):
        packed = real_pack(*args)
        cut(packed.until)
        return packed

    def prepare(until, **kwargs):
        cut(until)
        return real_prepare(until, **kwargs)

    real_pack, real_prepare = grpo.pack, sampler.prepare
    grpo.pack, sampler.prepare = pack, prepare
    try:
        yield
    finally:
        grpo.pack, sampler.prepare = real_pack, real_prepare


def short_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """The same for transformers: FlashAttention-2 as SDPA calls it, with a sliding window of SHORT rows."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))                       # (B, T, heads, hs)
    T = q.shape[1]
    return torch.ops.aten._flash_attention_forward(q, k, v, None, None, T, T, 0.0, True, False, scale=scaling, window_size_left=SHORT,
                                                   window_size_right=0)[0], None


def peak_gb(f):
    """Largest number of bytes allocated while f() runs, in GB, what was there before included; None on a CPU."""
    free()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    f()
    sync()
    return allocated()


def longest(peak, room, a, b, cap=CAP):
    """Longest P up to cap for which peak(P) is a number and not None (it does not fit), to 5 %. -> P, its peak, lengths tried

    Starts where the line through peaks at a and b reaches `room`."""
    tried = {a: peak(a), b: peak(b)}
    if None in tried.values():
        return (None, None, tried)
    P = int(b + 0.97 * (room - tried[b]) / max(tried[b] - tried[a], 1e-6) * (b - a))
    while True:
        P = min(cap, max(P, b + 1))
        tried[P] = peak(P)
        good, bad = max(p for p in tried if tried[p] is not None), min((p for p in tried if tried[p] is None), default=None)
        if good == cap or (bad and bad <= 1.05 * good):
            return good, tried[good], tried
        # far below the first failure the line was wrong, so come down in larger steps; then halve what is left
        P = int(1.045 * good) if bad is None else int(0.8 * bad) if good < 0.6 * bad else (good + bad) // 2


def rollout_kv(name, P, G, R, budget, B):
    """Bytes of KV that a rollout keeps, by formula."""
    return (B * min(P, budget) + B * G * (R - 1)) * Config.from_dict(SHAPES[name]).kv_bytes_per_token(DTYPE)


def memory_by_length(name, lengths, B, G, R, R_learn, budget):
    """Peak of our rollout and of our learner, each alone on the card, against the prompt's length."""
    table = Table("peak memory against prompt length", "rollout_gb predicted_gb over learner_gb kv_mb", model=name,
                  rollout=f"{B} x {G} x {R}", learner=f"1 x {G} x {R_learn}, checkpointing", kept=budget,
                  predicted="weights + kept KV + one layer's keys and values of the prompts prefilled together + logits of a step")
    model, adv = ours(name), torch.randn(1, G, device=DEVICE)
    c, weights, kv = model.config, sum(p.numel() for p in model.parameters()) * DTYPE.itemsize, {}
    for P in lengths:
        row = dict(prompt=P, kv_formula=rollout_kv(name, P, G, R, budget, B))

        def sample():
            kv["bytes"] = sampler.generate(model, drawn(name, B, P), G, R, budget=budget).kv["kept"]
        model.zero_grad(set_to_none=True)
        row["rollout_gb"] = peak_gb(sample)
        if kv["bytes"] != row["kv_formula"]:
            raise AssertionError(f"the cache holds {kv['bytes']:,} bytes, the formula says {row['kv_formula']:,}")
        together = min(B, max(1, 16384 // P)) * P  # generate's prefill_rows
        predicted = weights + kv["bytes"] + together * c.kv_bytes_per_token(DTYPE) // c.n_layer + 4 * B * G * c.vocab_size
        r = made_rollout(model, P, G, R_learn, budget)
        row.update(kv_bytes=kv["bytes"], kv_mb=kv["bytes"] / 1e6, predicted_gb=predicted / 1e9,
                   learner_gb=peak_gb(lambda: our_pass(model, r, adv, True)))
        row.update(dict(over=row["rollout_gb"] / row["predicted_gb"]) if CUDA else dict(note="peaks need CUDA"))
        table.add(f"prompt {P:,}", row)


def probes(name, B, G, R, R_learn, budget):
    """Contenders for the longest prompt: name -> (make model, run at P, two short lengths for the first guess)."""
    adv = torch.randn(1, G, device=DEVICE)

    def our_rollout(model, P):  # prefill goes one long prompt at a time, so one long prompt needs what B long ones need
        sampler.generate(model, drawn(name, 1, P) + drawn(name, B - 1, budget), G, R, budget=budget)

    def their_learner(micro):
        def f(model, P):
            for p in model.parameters():  # gradients in place, so that the first micro-batch meets what later ones meet
                p.grad = torch.zeros_like(p)
            their_pass(model, made_rollout(SimpleNamespace(config=Config.from_dict(SHAPES[name]), device=DEVICE), P, G, R_learn, budget),
                       adv, micro, only=micro)
        return f

    @torch.no_grad()
    def their_rollout(model, P):
        c = Config.from_dict(SHAPES[name])
        cache = torch.empty(B * G * (P + R - 1) * c.kv_bytes_per_token(DTYPE), dtype=torch.uint8, device=DEVICE)
        model(input_ids=torch.randint(c.vocab_size, (1, P), device=DEVICE), use_cache=False, logits_to_keep=1)
        del cache

    trained, sampled = (lambda: training_rival(name, "short")[0]), (lambda: rival(name, "short")[0])
    run_ours = lambda model, P: our_pass(model, made_rollout(model, P, G, R_learn, budget), adv, True)
    return {"our learner, checkpointing": (lambda: ours(name), run_ours, 8192, 16384),
            f"transformers learner, {G} at a time": (trained, their_learner(G), 2048, 4096),
            "our rollout": (lambda: ours(name), our_rollout, 16384, 32768),
            "dense rollout, each sample its cache": (sampled, their_rollout, 2048, 4096),
            "transformers learner, 1 at a time": (trained, their_learner(1), 8192, 16384)}


def longest_prompts(name, B, G, R, R_learn, budget):
    table = Table("longest prompt that fits", "tokens peak_gb", model=name, rollout=f"{B} x {G} x {R}", learner=f"1 x {G} x {R_learn}",
                  kept=budget, cap=CAP, bisected="to 5 % by running at real size",
                  rollouts="one prompt of that length, the others short, as prefill takes them one by one; dense: its forward pass beside a "
                  "buffer of the cache's size", rivals="one micro-batch, gradients there before",
                  attention=f"keys live {SHORT} rows at most: the same memory without quadratic time")
    if not CUDA:
        table.add("all", dict(note="needs CUDA"))
        return
    from transformers import AttentionInterface
    AttentionInterface.register("short", short_attention)
    for contender, (make, f, a, b) in probes(name, B, G, R, R_learn, budget).items():
        def search():
            model = make()
            free()
            room = (torch.cuda.mem_get_info()[0] + torch.cuda.memory_allocated()) / 1e9

            def peak(P):
                model.zero_grad(set_to_none=True)
                out = attempt(lambda: dict(gb=peak_gb(lambda: f(model, P))))
                if out.get("note", "out of memory") != "out of memory":
                    raise RuntimeError(out["note"])
                print(f"    {contender}: {P:,} tokens {out.get('note') or format(out['gb'], '.1f') + ' GB'}", flush=True)
                return out.get("gb")
            with short_lives():
                P, gb, tried = longest(peak, room, a, b)
            note = "not even the shortest length tried" if P is None else "the cap: longer was not tried" if P == CAP else ""
            return dict(tokens=P, peak_gb=gb, tried=tried, room_gb=room, note=note)
        table.add(contender, attempt(search))
        free()


def memory(name, lengths, B, G, R, R_learn, budget):
    memory_by_length(name, lengths, B, G, R, R_learn, budget)
    free()
    longest_prompts(name, B, G, R, R_learn, budget)


# ---- main ----

def requests(quick):
    """part -> function and list of its arguments."""
    if quick:
        return dict(attn=(attn, [(4, 2, 16, 64, 2, 8, 48, 1)]), decode=(decode, [("tiny", 2, 64, 2, 6, 48, 1, "dynamic static")]),
                    learner=(learner, [("tiny", 64, 2, 6, 48, 1)]), step=(step, [("tiny", 2, 64, 2, 6, 48, 1, True)]),
                    memory=(memory, [("tiny", [40, 64], 2, 2, 4, 6, 48)]))
    return dict(attn=(attn, [(16, 8, 128, 8192, 8, 256, 1024, 10), (14, 2, 64, 8192, 8, 256, 1024, 10)]),
                decode=(decode, [("smollm2-135m", 8, 2048, 8, 128, 256, 3, "dynamic static"),
                                 ("qwen2.5-1.5b", 8, 8192, 8, 128, 1024, 2, "")]),
                learner=(learner, [("qwen2.5-1.5b", 8192, 8, 256, 1024, 3)]),
                step=(step, [("smollm2-135m", 8, 1024, 8, 64, 256, 3, False), ("qwen2.5-1.5b", 8, 8192, 8, 256, 1024, 1, True)]),
                memory=(memory, [("qwen2.5-1.5b", [2**i for i in range(10, 17)], 8, 8, 64, 256, 1024)]))


def facts():
    """Where the numbers come from."""
    def version(name):
        try:
            return __import__(name).__version__
        except ImportError:
            return None
    card = torch.cuda.get_device_name() if CUDA else "CPU"
    slug = next((x for x in ("h100", "h200", "a100", "b200", "cpu") if x in card.lower()), card.lower().replace(" ", "-"))
    how = "CUDA events, calls back to back" if CUDA else f"wall clock, {torch.get_num_threads()} thread(s)"
    return dict(card=card, slug=slug, dtype=str(DTYPE).removeprefix("torch."), torch=torch.__version__, triton=version("triton"),
                transformers=version("transformers"), timed=how + "; first s is the first call, compilation included", **ceilings())


def main(argv=None):
    a = argparse.ArgumentParser(description="benchmarks; see the head of this file")
    a.add_argument("part", choices=("attn", "decode", "learner", "step", "memory", "all"),
                   help="attention; sampling; a learner's forward and backward pass; a whole training step; memory")
    a.add_argument("--quick", action="store_true", default=not CUDA, help="tiny shapes, in seconds; always so without CUDA")
    a.add_argument("--shape", choices=list(SHAPES), help="only the tables of this model (attn has none)")
    a.add_argument("--out", default="out-bench", help="folder for the numbers as JSON (out-bench)")
    a = a.parse_args(argv)
    wanted = {part: (f, [args for args in calls if a.shape is None or a.shape in args])
              for part, (f, calls) in requests(a.quick).items() if a.part in (part, "all")}
    if not any(calls for _, calls in wanted.values()):
        raise SystemExit(f"error: {a.part} has no table of {a.shape}" + " among its tiny shapes" * a.quick)
    try:
        os.makedirs(a.out, exist_ok=True)
        tempfile.TemporaryFile(dir=a.out).close()  # better now than after the first measurement
    except OSError as e:
        raise SystemExit(f"error: cannot write to {a.out!r}: {e}")
    about = facts()
    print("; ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in about.items()))
    for part, (f, calls) in wanted.items():
        tables, start = [], time.time()
        # a run of fewer or smaller tables gets a name of its own
        name = "-".join(["bench", part] + ["quick"] * (a.quick and CUDA) + [a.shape] * bool(a.shape) + [about["slug"]])
        path = os.path.join(a.out, name + ".json")

        def save(table):
            if table not in tables:
                tables.append(table)
            found = [dict(title=t.title, facts=t.facts, rows=t.rows) for t in tables]
            with open(path, "w", encoding="utf-8") as out:
                json.dump(dict(part=part, **about, seconds=time.time() - start, tables=found), out, indent=1)
        Table.saved = staticmethod(save)
        for args in calls:
            f(*args)
        if tables:
            print(f"\n{part}: numbers in {path}")


if __name__ == "__main__":
    main()
