"""bench.py at tiny sizes on the CPU: every part runs, its numbers hang together, and its comparisons really compare."""
import json
import math

import pytest
import torch

from experiments import bench
import grpo
import rollout

pytestmark = pytest.mark.skipif(bench.CUDA, reason="these are the CPU shapes; on a GPU run python bench.py all")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `python bench.py all` writes and prints."""
    out = tmp_path_factory.mktemp("bench")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench.main(["all", "--quick", f"--out={out}"])
    torch.set_num_threads(threads)
    return {part: json.loads((out / f"bench-{part}-cpu.json").read_text()) for part in bench.requests(True)}


def rows(result, table=0):
    return {row["name"]: row for row in result["tables"][table]["rows"]}


def test_every_part_writes_its_numbers(results):
    for part, r in results.items():
        assert r["part"] == part and r["card"] == "CPU" and r["dtype"] == "float32" and r["torch"] == torch.__version__
        assert r["copy_gb_s"] > 0 and r["matmul_tflops"] > 0
        for table in r["tables"]:
            base = table["rows"][0].get("ms")
            for row in table["rows"]:
                assert ("ms" in row and row["ms"] > 0) or row.get("note") or "kv_bytes" in row or "error" in row, row
                if "ms" in row and base:
                    assert row["ratio"] == pytest.approx(row["ms"] / base) and min(row.get("times_ms", [1])) > 0
                if "share" in row:
                    top = r["matmul_tflops"] * 1e9 if row["limit"] == "matmul" else r["copy_gb_s"] * 1e6
                    assert row["share"] == pytest.approx(row["work"] / row["step_ms" if "step_ms" in row else "ms"] / top)


def test_attn_compares_outputs(results):
    r = rows(results["attn"])
    assert all(r[name]["error"] < 1e-5 for name in ("FlexAttention, mask made before", "FlexAttention, mask included", "SDPA, mask as a matrix"))
    assert r["SDPA cuDNN, causal"]["note"] == "needs CUDA"


def test_attn_notices_another_mask(monkeypatch):
    real = bench.packed_rivals
    monkeypatch.setattr(bench, "packed_rivals", lambda until, nh: real(until.clamp(max=until.shape[1] - 1), nh))  # last row sees nothing
    with pytest.raises(AssertionError, match="out of FlexAttention"):
        bench.attn(4, 2, 16, 64, 2, 8, 48, 1)


def test_visible_pairs_by_counting():
    until = bench.group_until(20, 2, 5, 6, 2)
    row = torch.arange(until.shape[1])
    visible = (row[:, None] >= row) & (row[:, None] < until[:, None])
    assert bench.visible_pairs(until, 3) == 3 * visible.sum().item()
    assert bench.visible_pairs(torch.full((2, 10), 10), 2) == 4 * 55


def test_rival_is_the_same_model(monkeypatch):
    assert bench.rival("tiny")[1] < 1e-4
    real, seen = bench.ours, []

    def other(name, *dtype):
        model = real(name, *dtype)
        seen.append(model)
        tensors = model.tensors
        model.tensors = lambda: {k: x * (1.01 if k.startswith("layers.0.mlp.down") else 1) for k, x in tensors().items()}
        return model
    monkeypatch.setattr(bench, "ours", other)
    with pytest.raises(AssertionError, match="logits of the two models"):
        bench.rival("tiny")
    assert seen


def test_decode_rows(results):
    r = rows(results["decode"])
    assert len(r) == 3 and all("note" not in row for row in r.values()), r
    for row in r.values():
        assert row["tokens_s"] == pytest.approx(1e3 * 2 * 2 * 6 / row["ms"])
        assert row["step_ms"] == pytest.approx((row["ms"] - row["ms_few"]) / (6 - 2))
    # tiny: every parameter once, 48 of 64 keys for 2 prompts, at steps 2..5 3.5 response keys on average for 4 samples
    per_key, weights = 2 * 2 * 2 * 8 * 4, sum(p.numel() for p in bench.ours("tiny").parameters()) * 4
    assert bench.step_bytes("tiny", 2 * 48, 4, 3.5) == weights + (96 + 14) * per_key
    assert r["transformers, dynamic cache, dense"]["work"] == weights + (256 + 14) * per_key


def test_learner_computes_the_same_gradients(monkeypatch):
    """Our dense policy on the packed row and the rival on unpacked sequences: one loss, one gradient."""
    model, (theirs, error) = bench.ours("tiny"), bench.training_rival("tiny")
    r, adv = bench.made_rollout(model, 40, 2, 6, 44), torch.tensor([[1.0, -1.0]])
    out = grpo.replay(model, r, ("dense",))
    grpo.policy_loss(out["dense"], None, adv, r.mask)[0].backward()
    want = model.layers[0].mlp.down_proj.weight.grad
    for micro in (2, 1):
        theirs.zero_grad(set_to_none=True)
        bench.their_pass(theirs, r, adv, micro)
        assert bench.check_same("gradients", theirs.model.layers[0].mlp.down_proj.weight.grad, want, 1e-4) > 0
    theirs.zero_grad(set_to_none=True)
    bench.their_pass(theirs, r, adv, 1, only=1)  # control: half of the loss
    with pytest.raises(AssertionError, match="gradients"):
        bench.check_same("gradients", theirs.model.layers[0].mlp.down_proj.weight.grad, want, 1e-4)


def test_learner_rows(results):
    r = rows(results["learner"])
    assert len(r) == 4 and all("note" not in row for row in r.values()), r
    assert r["ours, checkpointing"]["work"] > r["ours, all activations kept"]["work"]


def test_made_rollout_keeps_sinks_and_window():
    r = bench.made_rollout(bench.ours("tiny"), 64, 2, 6, 48)
    kept = r.kept[0]
    assert kept.shape == (2, 2, 48) and (kept[:, :, :4] == torch.arange(4)).all() and (kept[:, :, -32:] == torch.arange(32, 64)).all()
    assert (kept.diff(dim=2) > 0).all()


def test_step_rows(results):
    r = rows(results["step"])
    assert r["ours"]["ms"] > 0 and r["ours"]["rollout_s"] > 0 and r["ours"]["learn_s"] > 0
    try:
        import trl  # noqa: F401
    except ImportError:
        for name in ("TRL, float32 (its default)", "TRL, bfloat16 (no fp32 masters)"):
            assert "pip install trl" in r[name]["note"] and "ms" not in r[name]


def test_kv_bytes_are_the_formula(results, monkeypatch):
    for row in rows(results["memory"]).values():
        P = row["prompt"]
        assert row["kv_bytes"] == row["kv_formula"] == (2 * min(P, 48) + 2 * 2 * 3) * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(bench, "rollout_kv", lambda *_: 1)
    with pytest.raises(AssertionError, match="the formula says 1"):
        bench.memory_by_length("tiny", [40], 2, 2, 4, 6, 48)


def test_longest_finds_the_edge():
    for edge, noise in ((50_000, 1.0), (50_000, 1.3), (50_000, 0.7), (4_200, 1.0)):
        P, gb, tried = bench.longest(lambda P: None if P > edge else P * 1e-3, room=noise * edge * 1e-3, a=2048, b=4096)
        assert edge / 1.05 <= P <= edge and gb == P * 1e-3 and len(tried) < 14
    assert bench.longest(lambda P: 1 + P * 1e-6, room=100, a=8, b=16, cap=1000)[0] == 1000
    assert bench.longest(lambda P: None, room=1, a=8, b=16)[0] is None


def test_short_lives_only_shorten(monkeypatch):
    monkeypatch.setattr(bench, "SHORT", 10)
    r, real = bench.made_rollout(bench.ours("tiny"), 64, 2, 6, 48), (grpo.pack, rollout.prepare)
    whole = grpo.pack(r)
    with bench.short_lives():
        short = grpo.pack(r)
    row = torch.arange(len(whole.ids))
    assert torch.equal(short.until, torch.minimum(whole.until, (row + 10).int())) and not torch.equal(short.until, whole.until)
    assert (grpo.pack, rollout.prepare) == real and torch.equal(short.ids, whole.ids)


def test_attempt_keeps_assertions_and_explains_the_rest():
    def fails(e):
        def f():
            raise e
        return f
    assert bench.attempt(fails(torch.OutOfMemoryError("CUDA out of memory. Tried"))) == dict(note="out of memory")
    assert bench.attempt(fails(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"))) == dict(note="out of memory")
    assert bench.attempt(fails(RuntimeError("No available kernel.\nAborting"))) == dict(note="RuntimeError: No available kernel. Aborting")
    with pytest.raises(AssertionError):
        bench.attempt(fails(AssertionError("differs")))
    with pytest.raises(AssertionError):
        bench.check_same("x", torch.tensor([math.nan]), torch.ones(1), 1.0)


def test_refuses_what_it_cannot_do(tmp_path, capsys):
    """A shape that a part has no table of, and a folder that cannot be written: one line, before anything is measured."""
    (tmp_path / "file").write_text("")
    for args in (["attn", "--shape=tiny"], ["learner", "--quick", "--shape=qwen2.5-1.5b"], ["attn", "--quick", f"--out={tmp_path / 'file'}"],
                 ["attn", "--quick", "--out=/proc"], ["attn", "--quick", "--out="]):
        with pytest.raises(SystemExit, match="^error: "):
            bench.main(args)
    assert capsys.readouterr().out == ""
