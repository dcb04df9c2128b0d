"""experiments/bench.py at tiny sizes on the CPU: every part runs, its numbers hang together, and
its comparisons really compare."""
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import rollout
from conftest import TINY, Ranks
from data.tokenizer import Tokenizer
from experiments import bench
from kvcache import Eviction, KVCache
from support import parallel

pytestmark = pytest.mark.skipif(
    bench.CUDA, reason="the CPU shapes; on a GPU run python -m experiments.bench all")
WORK = bench.Work(B=1, P=64, G=2, R=6, budget=48)


@pytest.fixture(scope="module", autouse=True)
def nothing_to_release():
    """Nothing lies on a card, and to look for garbage takes a fifth of a second each time."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(bench, "release", lambda: None)
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `python -m experiments.bench all` writes."""
    out = tmp_path_factory.mktemp("bench")
    bench.main(["all", "--quick", f"--out={out}"])
    return {part: json.loads((out / f"bench-{part}-cpu.json").read_text()) for part in bench.PARTS}


def rows(result, table=0):
    return {row["name"]: row for row in result["tables"][table]["rows"]}


def test_every_part_writes_its_numbers(results):
    for part, r in results.items():
        assert r["part"] == part and r["card"] == "CPU" and r["dtype"] == "float32"
        assert r["torch"] == torch.__version__
        assert r["copy_gb_s"] > 0 and r["matmul_tflops"] > 0
        for table in r["tables"]:
            base = table["rows"][0].get("ms")
            for row in table["rows"]:
                said = row.get("note") or {"kv_bytes", "error", "gap"} & row.keys()
                assert row.get("ms", 0) > 0 or said, row
                if "ms" in row and base:
                    assert row["ratio"] == pytest.approx(row["ms"] / base)
                    assert min(row.get("times_ms", [1])) > 0
                if "FLASH" in row["name"] and "error" not in row:
                    assert "No module named 'flash_attn" in row["note"]  # the reason
                elif row["name"].startswith(("FlexAttention", "SDPA, mask")):
                    assert row["error"] < 1e-5
                if "share" in row:
                    tops = dict(matmul=r["matmul_tflops"] * 1e9, copy=r["copy_gb_s"] * 1e6)
                    share = row["work"] / row.get("step_ms", row["ms"])
                    assert row["share"] == pytest.approx(share / tops[row["limit"]])


def test_attn_notices_another_mask(monkeypatch):
    real = bench.packed_rivals

    def other_rivals(until, nh):
        # the last row sees nothing
        return real(until.clamp(max=until.shape[1] - 1), nh)

    monkeypatch.setattr(bench, "packed_rivals", other_rivals)
    with pytest.raises(AssertionError, match="out of FlexAttention"):
        bench.attn(bench.Report(), **bench.QUICK["attn"][0])


def test_visible_pairs_by_counting():
    until = bench.group_until(20, 2, 5, budget=6, nkv=2)
    row = torch.arange(until.shape[1])
    visible = (row[:, None] >= row) & (row[:, None] < until[:, None])
    assert bench.visible_pairs(until, 3) == 3 * visible.sum().item()
    assert bench.visible_pairs(torch.full((2, 10), 10), 2) == 4 * 55


def test_rival_is_the_same_model(monkeypatch):
    assert bench.rival("tiny")[1] < 1e-4
    real = bench.ours

    def other(name, *dtype):
        model = real(name, *dtype)
        key, tensors = "layers.0.mlp.down_proj.weight", {**model.tensors()}
        tensors[key] = tensors[key] * 1.01
        model.tensors = lambda: tensors
        return model
    monkeypatch.setattr(bench, "ours", other)
    with pytest.raises(AssertionError, match="logits of the two models"):
        bench.rival("tiny")


def test_decode_rows(results):
    r = rows(results["decode"])
    assert len(r) == 4 and all("note" not in row for row in r.values()), r
    for row in r.values():
        assert row["tokens_s"] == pytest.approx(1e3 * 2 * 2 * 6 / row["ms"])
        assert row["step_ms"] == pytest.approx((row["ms"] - row["ms_few"]) / (6 - 2))
    # tiny: every parameter once, 48 of 64 keys for 2 prompts, at steps 2..5 3.5 response keys on
    # average for 4 samples
    per_key = 2 * 2 * 2 * 8 * 4
    weights = sum(p.numel() for p in bench.ours("tiny").parameters()) * 4
    assert bench.step_bytes("tiny", 2 * 48, 4, 3.5) == weights + (96 + 14) * per_key
    for cache in bench.CACHES:
        dense = r[f"transformers, {cache} cache, dense"]
        assert dense["work"] == weights + (256 + 14) * per_key


def test_continuous_batching_makes_what_was_asked_for():
    """Each call as many tokens as it is asked for; what makes fewer is no row but a note."""
    model, prompts = bench.rival("tiny")[0], bench.drawn("tiny", 2, 64)
    made, generate = [], model.generate_batch

    def seen(*args, **kwargs):
        made.append(generate(*args, **kwargs))
        return made[-1]

    model.generate_batch = seen
    for n in (2, 6):
        bench.continuous_batching(model, bench.TINY, prompts, n)
    for n, out in zip((2, 6), made, strict=True):
        assert {len(one.generated_tokens) for one in out.values()} == {n}
    assert len({tuple(one.generated_tokens) for one in made[1].values()}) > 1
    model.generate_batch = lambda *args, **kwargs: made[0]
    with pytest.raises(RuntimeError, match="4 of 6 were asked for"):
        bench.continuous_batching(model, bench.TINY, prompts, 6)


def test_learner_computes_the_same_gradients():
    """Our dense policy on the packed row and the rival on unpacked sequences: one loss, one
    gradient."""
    model, (theirs, _) = bench.ours("tiny"), bench.training_rival("tiny")
    r = bench.made_rollout(model.config, replace(WORK, P=40, budget=44))
    adv = torch.tensor([[1.0, -1.0]])
    out = grpo.replay(model, r, ("dense",))
    grpo.policy_loss(out["dense"], None, adv, r.mask)[0].backward()
    want = model.layers[0].mlp.down_proj.weight.grad
    weight = theirs.model.layers[0].mlp.down_proj.weight
    for micro in (2, 1):
        theirs.zero_grad(set_to_none=True)
        bench.their_pass(theirs, r, adv, micro)
        assert bench.check_same("gradients", weight.grad, want, 1e-4) > 0
    theirs.zero_grad(set_to_none=True)
    bench.their_pass(theirs, r, adv, 1, only=1)  # control: half of the loss
    with pytest.raises(AssertionError, match="gradients"):
        bench.check_same("gradients", weight.grad, want, 1e-4)


def test_made_rollout_keeps_sinks_and_window():
    kept = bench.made_rollout(bench.config_of("tiny"), WORK).kept[0]
    assert kept.shape == (2, 2, 48)
    assert (kept[:, :, :4] == torch.arange(4)).all()
    assert (kept[:, :, -32:] == torch.arange(32, 64)).all()
    assert (kept.diff(dim=2) > 0).all()


def test_lora_learner_and_step_rows(results):
    r = rows(results["lora"])
    assert list(r) == ["ours, LoRA", "TRL with peft, bfloat16", "ours, all weights"]
    # rank 2 beside q 32x32, k and v 32x16, o 32x32, gate, up, down 32x64, in two layers; norms,
    # biases and the embedding too
    lora = 2 * 2 * (2 * 64 + 2 * 48 + 3 * 96)
    every = sum(p.numel() for p in bench.ours("tiny").parameters())
    assert [r[name].get("trained") for name in r] == [lora / 1e6, None, every / 1e6]
    assert r["ours, LoRA"]["ms"] > 0 and r["ours, LoRA"]["learn_s"] > 0
    r = rows(results["learner"])
    assert len(r) == 4 and all("note" not in row for row in r.values()), r
    assert r["ours, checkpointing"]["work"] > r["ours, all activations kept"]["work"]
    assert min(rows(results["step"])["ours"][name] for name in ("ms", "rollout_s", "learn_s")) > 0


def test_rivals_that_are_not_installed(results):
    try:
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import trl  # noqa: F401
    except ImportError:
        for part, name in (("step", "TRL, float32 (its default)"),
                           ("step", "TRL, bfloat16, continuous batching"),
                           ("lora", "TRL with peft, bfloat16")):
            row = rows(results[part])[name]
            assert "pip install trl" in row["note"] and "ms" not in row


def test_a_rival_whose_sampling_is_free(monkeypatch):
    """Of a step that samples, its learning alone stands below, over our whole step."""
    asked = []

    def trl_row(name, work, steps, **settings):
        asked.append(settings)
        return dict(ms=900.0, rollout_s=0.7, learn_s=0.2)

    monkeypatch.setattr(bench, "trl_row", trl_row)
    monkeypatch.setattr(bench, "our_step", lambda *_, **__: dict(ms=400.0, learn_s=0.3))
    report = bench.Report()
    bench.step(report, **bench.QUICK["step"][0])
    _, *theirs = report.tables[0]["rows"]
    assert [row["ms"] for row in theirs] == 3 * [900.0, 200.0]
    assert [row["ratio"] for row in theirs] == 3 * [2.25, 0.5]
    assert asked == [dict(dtype="float32"), dict(dtype="bfloat16"),
                     dict(dtype="bfloat16", paged=True)]


def test_evict_rows(results):
    """Of both caches at each length; the decoded stretch lies in the middle of the response."""
    tables = results["evict"]["tables"]
    for table, (P, R) in zip(tables, bench.QUICK["evict"][0]["lengths"]):
        kept, dense = table["rows"]
        for row in (kept, dense):
            seconds = row["prefill_s"] + (R - 1) * row["step_ms"] / 1e3
            assert row["rollout_s"] == pytest.approx(seconds) == row["ms"] / 1e3
            assert row["tokens_s"] == pytest.approx(4 * R / seconds)
            assert row["first_step"] == (R - 4) // 2
        assert dense["keys"] == P + R // 2 and kept["keys"] < dense["keys"]
        assert kept["kv_mb"] < dense["kv_mb"]
        # 2 layers x 2 KV heads of 8 in fp32, keys and values: one prompt for 2 samples
        assert dense["kv_mb"] * 1e6 == 256 * (2 * P + 4 * (R - 1))
    assert tables[-1]["rows"][0]["note"] == "needs CUDA" and len(tables) == 3


def test_a_cache_in_the_middle_of_a_response(monkeypatch):
    """Holds as many keys as one that was decoded up to there, and evicts as many, when it does."""
    model, work = bench.ours("tiny"), replace(WORK, R=60)
    eviction = Eviction("snapkv", budget=48, window=8, response_budget=12, period=8)

    def held(cache):
        return cache.t.item(), cache.response_filled.item(), [x.shape for x in cache.born]

    real, seen = KVCache.evict_responses, []

    def evict(cache, t):
        seen.append(held(cache))
        real(cache, t)
        seen.append(held(cache))

    monkeypatch.setattr(KVCache, "evict_responses", evict)
    rollout.generate(model, bench.drawn("tiny", 1, 64), 2, 60, eviction=eviction)
    decoded = [*seen]
    allocate, cache = bench.allocate, None
    monkeypatch.setattr(bench, "allocate", lambda *_: cache)
    for first in (5, 8, 22, 37, 48):  # before anything goes, at an eviction, between two
        seen.clear()
        cache = allocate(model, work, eviction)
        bench.go_to(cache, first)
        assert held(cache) == decoded[2 * first - 1]
        bench.stretch(model, "tiny", replace(work, R=2 * first + 9), eviction, steps=9)
        assert seen == 4 * decoded[2 * first:2 * first + 18]  # of four passes
        assert (cache.until.min() < 60) == (first > 5)  # 8 keys are no more than the budget
    bench.go_to(cache, 21)
    assert held(cache) != decoded[2 * 22 - 1]  # control


def test_dtype_rows(results, tmp_path):
    """Longer responses hold the shorter ones; the dense policy is far from the sampler. With a
    checkpoint, prompts are text."""
    bench.main(["dtype", "--quick", f"--model={TINY}", f"--out={tmp_path}"])
    real = json.loads((tmp_path / "bench-dtype-cpu.json").read_text())
    for result in (results["dtype"], real):
        table = result["tables"][0]
        found = {(row["name"], row["tokens"]): row for row in table["rows"]}
        assert len(found) == 6
        for name in ("float16", "bfloat16", "float32"):
            short, long = found[name, 2], found[name, 6]
            assert 0 < long["gap"] < long["gap_max"] >= short["gap_max"]
            assert long["gap"] < 0.1 * long["dense_gap"]
        gaps = [found[name, 6]["gap"] for name in ("float32", "float16", "bfloat16")]
        assert gaps == sorted(gaps)
    assert table["facts"]["model"] == TINY
    tok = Tokenizer(TINY)
    one, two = bench.documents(tok, 2, 50)
    assert len(one) == len(two) == 50 and one != two and tok.decode(one).strip()


def two_ranks(out):
    torch.set_num_threads(1)
    update, seen = bench.train.update, []

    def watched(model, opt, objective, r, **kwargs):
        seen.append([r, r.rewards])
        return update(model, opt, objective, r, **kwargs)

    generate, parts = bench.sampler.generate, []

    def sampled(*args, part, **kwargs):
        parts.append(part)
        return generate(*args, part=part, **kwargs)

    bench.train.update, bench.sampler.generate = watched, sampled
    bench.main(["cards", "--quick", f"--out={out}"])
    assert parts == [(2 * parallel.rank(), 4)] * 3
    # one update for all: four prompts, all different, two of each rank
    for r, rewards in seen:
        assert len({tuple(p) for p in r.prompts}) == len(r.prompts) == len(rewards) == 4
    mine = [(r.prompts, r.tokens.tolist(), rewards.tolist()) for r, rewards in seen]
    one, other = parallel.gather(mine)
    assert one == other
    with pytest.raises(SystemExit, match="^error: all measures one card: run it without"):
        bench.main(["all", "--quick", f"--out={out}"])


def test_cards(results, tmp_path):
    """On n cards a step has n times the samples, and rank 0 alone says so."""
    codes, printed = Ranks(2, tmp_path, two_ranks, [str(tmp_path)]).wait()
    assert codes == [0, 0], printed
    assert "cards 2, prompts 2 x 2" in printed[0] and printed[1] == ""
    two = json.loads((tmp_path / "bench-cards-x2-cpu.json").read_text())
    for result, samples in ((results["cards"], 4), (two, 8)):
        row = rows(result)["ours"]
        assert row["samples_s"] * row["ms"] == pytest.approx(1e3 * samples)
        assert row["times"][2][0] == row["ms"] / 1e3 and len(row["times"]) == 3


@pytest.mark.parametrize("fits, notes", [
    (lambda limit, ask: ask["checkpointing"],  # the first that fits is the last that is tried
     {"defaults": 1, "micro_rows=8192": 1, "checkpointing=True": 0}),
    (lambda limit, ask: limit is None,  # none fits: the last once more, without a limit
     {"defaults": 1, "micro_rows=8192": 1, "checkpointing=True": 1,
      "checkpointing=True micro_rows=4096": 1, "checkpointing=True micro_rows=4096 logit_mb=64": 1,
      "checkpointing=True micro_rows=4096 logit_mb=64 moments=bfloat16": 1,
      "checkpointing=True lora_rank=16": 1,
      "checkpointing=True lora_rank=16, no limit": 0})])
def test_fit_stops_at_the_first_that_fits(results, monkeypatch, fits, notes):
    assert list(rows(results["fit"])) == ["defaults"]  # memory has no cap here
    limits = []

    @contextmanager
    def capped(gb):
        limits.append(gb)
        yield

    def step(name, work, steps, **settings):
        if not fits(limits[-1], settings):
            raise RuntimeError("CUDA out of memory")
        asked = " ".join(f"{k}={v}" for k, v in settings.items() if v or k == "lora_rank")
        return dict(ms=1.0, peak_gb=28.5, asked=asked)

    monkeypatch.setattr(bench, "capped", capped)
    monkeypatch.setattr(bench, "our_step", step)
    report = bench.Report()
    bench.fit(report, name="tiny", work=bench.TINY, gb=24, steps=1)
    found = report.tables[0]["rows"]
    assert {row["name"]: int(row.get("note") == "out of memory") for row in found} == notes
    assert found[-1]["name"].startswith(found[-1]["asked"]) and found[-1]["peak_gb"] == 28.5
    assert set(limits[:5]) == {24 - bench.CONTEXT}


def test_the_cap_is_a_share_of_the_card(monkeypatch):
    shares = []
    monkeypatch.setattr(bench, "CUDA", True)
    monkeypatch.setattr(bench, "release", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with bench.capped(16):
        assert shares == [0.2]
    with pytest.raises(KeyError), bench.capped(100):
        raise KeyError
    # lifted again, also after an error; never above the card
    assert shares == [0.2, 1, 1, 1]


def test_kv_bytes_are_the_formula(results, monkeypatch):
    for row in rows(results["memory"]).values():
        keys, per_key = 2 * min(row["prompt"], 48) + 2 * 2 * 3, 2 * 2 * 2 * 8 * 4
        assert row["kv_bytes"] == row["kv_formula"] == keys * per_key
    monkeypatch.setattr(bench, "rollout_kv", lambda *_: 1)
    with pytest.raises(AssertionError, match="the formula says 1"):
        bench.memory(bench.Report(), "tiny", [40], replace(WORK, B=2, R=4), learnt=WORK)


def test_longest_finds_the_edge():
    for edge, noise in ((50_000, 1.0), (50_000, 1.3), (50_000, 0.7), (4_200, 1.0)):
        def peak(P):
            return None if P > edge else P * 1e-3

        P, gb, tried = bench.longest(peak, room=noise * edge * 1e-3, a=2048, b=4096)
        assert edge / 1.05 <= P <= edge and gb == P * 1e-3 and len(tried) < 14
    capped = bench.longest(lambda P: 1 + P * 1e-6, room=100, a=8, b=16, cap=1000)
    assert capped[0] == 1000
    assert bench.longest(lambda P: None, room=1, a=8, b=16)[0] is None


def test_short_lives_only_shorten(monkeypatch):
    monkeypatch.setattr(bench, "SHORT", 10)
    r = bench.made_rollout(bench.config_of("tiny"), WORK)
    real = grpo.pack, rollout.make_plan
    whole = grpo.pack(r)
    with bench.short_lives():
        short = grpo.pack(r)
    row = torch.arange(len(whole.ids))
    assert torch.equal(short.until, torch.minimum(whole.until, (row + 10).int()))
    assert not torch.equal(short.until, whole.until)
    assert (grpo.pack, rollout.make_plan) == real and torch.equal(short.ids, whole.ids)


def test_attempt_keeps_assertions_and_explains_the_rest():
    def fail(e):
        raise e

    def note(e):
        return bench.attempt(fail, e)["note"]

    assert bench.attempt(dict, a=1) == dict(a=1)
    assert note(torch.OutOfMemoryError("CUDA out of memory. Tried")) == "out of memory"
    assert note(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when")) == "out of memory"
    assert note(RuntimeError("No\nkernel")) == "RuntimeError: No kernel"
    with pytest.raises(AssertionError):
        bench.attempt(fail, AssertionError("differs"))
    with pytest.raises(AssertionError):
        bench.check_same("x", torch.tensor([math.nan]), torch.ones(1), 1.0)


def test_refuses_what_it_cannot_do(tmp_path, capsys):
    """A shape that a part has no table of, and a folder that cannot be written: one line, before
    anything is measured."""
    file = tmp_path / "file"
    file.write_text("")
    for args in ("attn --shape=tiny", "all --quick --shape=smollm2-135m",
                 f"attn --quick --out={file}", "attn --quick --out=", "attm", "attn --bogus",
                 f"evict --model={TINY}", "dtype --model=./none"):
        with pytest.raises(SystemExit, match="^error: [^\n]*$"):
            bench.main(args.split())
    assert capsys.readouterr().out == ""
