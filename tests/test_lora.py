"""support/lora.py: the gradients of A and B, the merged weights, the files, a run with LoRA."""
import json
import os
import shutil
from statistics import fmean
from types import SimpleNamespace

import kills
import pytest
import torch
from safetensors.torch import load_file

import fast.head
import train
from conftest import (
    EVICTION,
    ROOT,
    STOP,
    TINY,
    copy_of,
    gap,
    learn,
    logged,
    prompts,
    read_checkpoint,
    read_log,
    rel,
    share_of_digits,
    some_rewards,
    toy,
    train_here,
)
from experiments import adapters, bench, logs
from grpo import replay
from model import Transformer
from rollout import generate
from support.checkpoint import write_checkpoint
from support.lora import TARGETS, LoRA, frozen_base, targeted
from support.optimizer import Masters
from support.run import step_of

BEST = [f"{folder}/{name}" for folder in ("best", "adapter-best")
        for name in ("run.json", "model.safetensors", "adapter_model.safetensors")]
LORA = ["--lora_rank=4", "--lr=1e-2", "--warmup=0"]


def with_lora(net, base=None, **changes):
    """What `learn` needs, as a run makes it: settings, objective, LoRA."""
    c = train.settings([f"--{key}={value}" for key, value in dict(lora_rank=4, **changes).items()])
    base = base or frozen_base(net, c)
    objective = train.OBJECTIVES[c.objective](net, c, lambda: base)
    return c, objective, LoRA(net, c, objective.value, base=base)


def randomise(opt):
    """A and B as after some training."""
    rng = torch.Generator().manual_seed(1)
    for x in opt.masters:
        x.data.normal_(0, 0.1, generator=rng)
    opt.copy_down()


def steps(net, parts, n=3):
    """n updates, each of a rollout of its own. -> the rollouts, the logs"""
    c, objective, opt = parts
    done = []
    for i in range(n):
        r = generate(net, prompts(61, 40), 4, 8, stop_ids=STOP, seed=i, eviction=EVICTION)
        log = learn(net, opt, objective, r, rewards=some_rewards(2, 4), c=c, lr=1e-2)
        done.append((r, log))
    return done


# policies and gradients

def test_sampler_and_learner_are_one_policy():
    """After some steps too. Controls: the model without what was learned, and before it was."""
    net = toy()
    parts = with_lora(net)
    done = steps(net, parts)
    assert all(log["gap_max"] <= 1e-4 for _, log in done)
    assert all(adapter.B.abs().max() > 1e-3 for adapter in parts[2].adapters.values())
    r = generate(net, prompts(61, 40), 4, 8, seed=9, eviction=EVICTION)
    assert gap(net, r) <= 1e-4
    assert gap(toy(), r) > 1e-2 and gap(net, done[0][0]) > 1e-2


class Replayed(torch.nn.Module):
    """A loss over both policies and their KL, for torch.func.functional_call."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, r, checkpointing=False):
        out = replay(self.net, r, distill_to="dense", checkpointing=checkpointing)
        return (out["shadow"] * some_rewards(*r.mask.shape)).sum() + 0.3 * out["kl"].sum()


def plain_gradients(net, opt, r, scale=None):
    """Those of A and B by autograd, through W0 + s B A written out."""
    parts, leaves, joined = net.parts(), {}, {}
    for name, w0 in toy(dtype=net.dtype).tensors().items():
        w = w0
        if name in opt.adapters:
            adapter = opt.adapters[name]
            a, b = (x.detach().clone().requires_grad_() for x in (adapter.A, adapter.B))
            leaves[name] = a, b
            w = w0 + (scale or adapter.scale) * b @ a
        joined.setdefault(id(parts[name][0]), []).append(w)
    weights = {f"net.{name}": torch.cat(joined[id(p)]) for name, p in net.named_parameters()}
    torch.func.functional_call(Replayed(net), weights, (r,)).backward()
    return [x.grad for name in opt.adapters for x in leaves[name]]


@pytest.mark.parametrize("targets", ["all", "q_proj,up_proj"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.double, 1e-10)])
def test_gradients_by_plain_autograd(dtype, bound, targets):
    """Two micro-batches, one of them with checkpointing. Controls: another scale; A's and B's
    gradients where the other's should be."""
    net = toy(dtype=dtype)
    _, _, opt = with_lora(net, lora_alpha=6, lora_targets=targets)
    randomise(opt)
    assert opt.masters[0].dtype == dtype
    r = logged()
    for checkpointing in (False, True):
        Replayed(net)(r, checkpointing).backward()
    assert all(p.grad is None for p in net.parameters())
    got, want = [x.grad / 2 for x in opt.masters], plain_gradients(net, opt, r)
    assert len(got) == 2 * 3 * (7 if targets == "all" else 2)
    assert max(map(rel, got, want)) < bound
    assert min(map(rel, got, plain_gradients(net, opt, r, scale=1.0))) > 0.1
    squares = [(a, b) for a, b in zip(got[::2], want[1::2]) if a.shape == b.t().shape]
    assert squares and all(rel(a, b.t()) > 0.1 for a, b in squares)


def test_no_gradient_that_is_not_needed(monkeypatch):
    """One weight's gradient exists at a time, and none of the output matrix is computed. The
    control trains all weights."""
    products = []
    real = fast.head.add_matmul32
    monkeypatch.setattr(fast.head, "add_matmul32", lambda *x: (products.append(1), real(*x)))
    there, collect = [], LoRA.collect

    def counted(parts, p):
        there.append(sum(q.grad is not None for q in net.parameters()))
        collect(parts, p)

    monkeypatch.setattr(LoRA, "collect", staticmethod(counted))
    net = toy()
    parts = with_lora(net)
    Replayed(net)(logged()).backward()
    assert there == [1] * 3 * 4 and not products  # qkv, o, gate_up, down of three layers
    del parts  # its hooks go with it
    net = toy()
    Replayed(net)(logged()).backward()
    assert all(p.grad is not None for p in net.parameters()) and products


def test_weights_are_rounded_once():
    """A step below bf16's spacing is lost in W and kept in B."""
    net = toy(dtype=torch.bfloat16)
    c, _, opt = with_lora(net)
    before = {name: w.clone() for name, w in net.tensors().items()}
    adapter = opt.adapters["layers.0.mlp.down_proj.weight"]
    assert adapter.A.dtype == adapter.B.dtype == torch.float32
    for i in range(1, 257):
        adapter.B.data.add_(1e-5)
        opt.copy_down()
        if i == 1:
            same = (adapter.w == adapter.w0).float().mean()
            assert same > 0.95
    want = adapter.w0.float() + 8 * adapter.B @ adapter.A
    assert torch.equal(adapter.w, want.bfloat16())
    assert (adapter.w == adapter.w0).float().mean() < same - 0.2
    changed = [name for name, w in net.tensors().items() if not torch.equal(w, before[name])]
    assert changed == ["layers.0.mlp.down_proj.weight"]


def test_start():
    """A is peft's start, from the seed, B is 0: before the first step the model is as loaded, and
    what is frozen stays."""
    net = toy()
    parts = with_lora(net, seed=3)
    opt = parts[2]
    for adapter in opt.adapters.values():
        edge = adapter.A.shape[1] ** -0.5
        assert not adapter.B.any() and 0.9 * edge < adapter.A.abs().max() <= edge
    opt.copy_down()
    start = toy().tensors()
    assert all(torch.equal(w, start[name]) for name, w in net.tensors().items())
    assert torch.equal(with_lora(toy(), seed=3)[2].masters[0], opt.masters[0])
    assert not torch.equal(with_lora(toy(), seed=4)[2].masters[0], opt.masters[0])
    steps(net, parts, n=1)
    changed = {name for name, w in net.tensors().items() if not torch.equal(w, start[name])}
    assert changed == opt.adapters.keys() and len(changed) == 3 * 7


# objectives

def test_the_initial_model_shares_what_is_frozen():
    """DPO's reference: the weights before training, of which only the targets are copies."""
    net = toy()
    parts = with_lora(net, objective="dpo", lora_targets="qkvo")
    reference = parts[1].reference
    own = {name for name, w in reference.tensors().items()
           if w.data_ptr() != net.tensors()[name].data_ptr()}
    assert own == {name for name in net.tensors() if "_proj.weight" in name and "attn" in name}
    steps(net, parts, n=2)
    start = toy().tensors()
    assert all(torch.equal(w, start[name]) for name, w in reference.tensors().items())
    assert not any(torch.equal(net.tensors()[name], start[name]) for name in own)
    assert not any(p.requires_grad for p in reference.parameters())


def test_values_are_trained_whole():
    net = toy()
    parts = with_lora(net, objective="ppo")
    steps(net, parts, n=1)
    head = list(parts[1].value.parameters())
    assert all(x is y for x, y in zip(parts[2].masters[-2:], head))
    assert all(x.abs().max() > 1e-3 for x in head)
    assert parts[2].trained == sum(x.numel() for x in parts[2].masters[:-2])


# a run

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with LoRA, not to be changed."""
    out = str(tmp_path_factory.mktemp("lora") / "out")
    train_here(*LORA, f"--out_dir={out}")
    return out


def test_what_a_run_saves(whole):
    """model/ is the checkpoint that it began with plus adapter/, in the targets alone; ckpt.pt
    holds no weight of the model."""
    for folders in (("model", "adapter"), ("best", "adapter-best")):
        model, adapter = (os.path.join(whole, folder) for folder in folders)
        config = json.load(open(os.path.join(adapter, "adapter_config.json")))
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
        assert config["target_modules"] == list(TARGETS)
        assert config["base_model_name_or_path"] == TINY
        added = load_file(os.path.join(adapter, "adapter_model.safetensors"))
        got, base = Transformer.from_pretrained(model), Transformer.from_pretrained(TINY).tensors()
        assert len(added) == 2 * 7 * got.config.n_layer
        for name, w in got.tensors().items():
            stem = f"base_model.model.model.{name.removesuffix('weight')}lora_"
            if stem + "A.weight" in added:
                product = added[stem + "B.weight"] @ added[stem + "A.weight"]
                assert (w - base[name] - 8 * product).abs().max() < 1e-5
                if folders[0] == "model":
                    assert (w - base[name]).abs().max() > 1e-3
            else:
                assert torch.equal(w, base[name])
    saved = read_checkpoint(whole)["learner"]["masters"]
    assert sorted(x.shape for x in saved) == sorted(x.shape for x in added.values())
    assert all(r["gap_max"] <= 1e-4 for r in read_log(whole)[1])


def test_published_adapters(tmp_path):
    """Added to a model's weights they are what training merged; and they are small."""
    net = toy()
    opt = with_lora(net, lora_alpha=8)[2]
    randomise(opt)
    opt.save_pretrained(str(tmp_path))
    other = toy()
    assert any(not torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))
    adapters.add(other, str(tmp_path))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    files = [os.path.join(adapters.FOLDER, arm, "adapter_model.safetensors")
             for arm in adapters.ARMS]
    assert sum(map(os.path.getsize, files)) < 10e6
    assert {x.dtype for file in files for x in load_file(file).values()} == {torch.float16}


def test_peft_reads_the_adapters(whole):
    """The same logits by peft on transformers' model, as by the merged model. Control: without."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(os.path.join(whole, "model"),
                                                  dtype=torch.float32)
    ids = torch.tensor(prompts(40))
    with torch.no_grad():
        want, without = merged(ids).logits, base(ids).logits
        got = peft.PeftModel.from_pretrained(base, os.path.join(whole, "adapter"))(ids).logits
    assert rel(got, want) < 1e-5 < rel(without, want)


@pytest.mark.parametrize("objective", ["ppo", "dpo"])
def test_resume_is_bitwise(objective, tmp_path, monkeypatch):
    """2 steps equal 1 step and 1 more: steps, models, adapters, moments. The control resumes with
    another B."""
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    ask = [*LORA, f"--objective={objective}", "--eval_every=99", "--eval_final=1",
           "--temperature=3", "--steps=2"]  # so hot that dpo's pairs differ
    out, halves, wrong = (str(tmp_path / x) for x in ("out", "halves", "wrong"))
    train_here(*ask, f"--out_dir={out}")
    train_here(*ask, "--steps=1", f"--out_dir={halves}")
    shutil.copytree(halves, wrong)
    train_here(*ask, "--resume=True", f"--out_dir={halves}")
    # a run of 1 step has samples and an evaluation of its own at its end
    assert set(kills.differences(out, halves)) <= {"samples.txt", "log.jsonl", "ckpt.pt", *BEST}
    assert read_log(out)[1] == read_log(halves)[1]
    a, b = (kills.state_of(read_checkpoint(x)["learner"]) for x in (out, halves))
    assert a == b
    if objective == "ppo":
        state = read_checkpoint(wrong)
        assert state["learner"]["masters"][1].abs().max() > 1e-3
        state["learner"]["masters"][1].zero_()
        write_checkpoint(os.path.join(wrong, "ckpt.pt"), state)
        train_here(*ask, "--resume=True", f"--out_dir={wrong}")
        assert {"adapter/adapter_model.safetensors", "model/model.safetensors"} <= set(
            kills.differences(out, wrong))


@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_while_adapters_are_written(whole, tmp_path, monkeypatch, call):
    """The best ones of step 0; those of the last step."""
    out, calls, save = str(tmp_path / "out"), [], LoRA.save_pretrained

    def stopped(self, path):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(LoRA, "save_pretrained", stopped)
        with pytest.raises(SystemExit):
            train_here(*LORA, f"--out_dir={out}")
    assert kills.differences(whole, out)
    train_here(*LORA, "--resume=True", f"--out_dir={out}")
    assert kills.differences(whole, out) == []


def test_best_adapters_that_are_not_there(whole, tmp_path):
    """best/ and adapter-best/ are a pair: where one is not of the best step, both are written anew
    by the next evaluation that is best from there on."""
    pair = ("best", "adapter-best")
    assert step_of(whole, pair) is not None  # the control

    def gone(folder):
        shutil.rmtree(folder)

    def damaged(folder):
        (folder / "adapter_model.safetensors").unlink()

    def other(folder):
        listed = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(dict(listed, step=1)))

    for harm in (gone, damaged, other):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out = copy_of(whole, tmp_path)
        harm(out / "adapter-best")
        assert step_of(out, pair) is None
    train_here(*LORA, "--resume=True", "--steps=6", f"--out_dir={out}")
    assert step_of(out, pair) in (4, 6)


def test_an_adapter_beside_the_weights(whole, tmp_path):
    """As transformers and peft load it: refused, not left out in silence. The control: without."""
    model, out = tmp_path / "M", tmp_path / "out"
    shutil.copytree(TINY, model)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(os.path.join(whole, "adapter", name), model)
    ask = [f"--model={model}", "--steps=1", "--eval_every=9", f"--out_dir={out}"]
    for say in ask, [f"--model={whole}/adapter", f"--out_dir={out}"]:
        with pytest.raises(SystemExit, match=r"^error: .* holds an adapter \(adapter_config.json\)"
                                             ", which is not read here: name a folder with merged"):
            train_here(*say)
    assert not out.exists()
    (model / "adapter_config.json").unlink()
    train_here(*ask)
    assert not os.path.exists(out / "model" / "adapter_model.safetensors")


def test_overwrite_clears_what_a_run_made(whole, tmp_path):
    """A run without LoRA leaves no adapters of an old one; what no run made stays, and is not
    written over."""
    out = copy_of(whole, tmp_path)
    (out / "adapter" / "notes.txt").write_text("mine")
    train_here("--steps=1", "--eval_every=9", "--overwrite=True", f"--out_dir={out}")
    assert os.listdir(out / "adapter") == ["notes.txt"] and not os.listdir(out / "adapter-best")
    (out / "adapter" / "adapter_model.safetensors").write_text("mine")
    for where in (out, tmp_path / "other"):
        (where / "adapter").mkdir(parents=True, exist_ok=True)
        (where / "adapter" / "adapter_model.safetensors").write_text("mine")
        with pytest.raises(SystemExit, match="holds adapter/adapter_model.safetensors, which no"):
            train_here(*LORA, "--overwrite=True", f"--out_dir={where}")
        assert (where / "adapter" / "adapter_model.safetensors").read_text() == "mine"


def test_the_base_is_part_of_the_run(whole, finished, tmp_path, capsys):
    """A resumed run needs the weights that it began with. The control, without LoRA, does not."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "full").mkdir()
    model, out = f"--model={tmp_path / 'model'}", copy_of(whole, tmp_path)
    train_here(*LORA, model, "--resume=True", f"--out_dir={out}")  # moved, the same
    said = capsys.readouterr().out
    assert "float32 weights, fp32 LoRA, attention by" in said
    assert f"LoRA of rank 4 on {', '.join(TARGETS)}: 0.04M parameters are trained" in said
    shutil.copy(os.path.join(whole, "model", "model.safetensors"), tmp_path / "model")
    with pytest.raises(SystemExit, match="model .* has other contents now"):
        train_here(*LORA, model, "--resume=True", f"--out_dir={out}")
    full = copy_of(finished[0], tmp_path / "full")
    train_here(model, "--resume=True", f"--out_dir={full}")


@pytest.mark.parametrize("say, args", [
    ("lora_alpha 16.0 does nothing while lora_rank=0: set", ["--lora_alpha=16"]),
    ("lora_targets 'qkvo' does nothing", ["--lora_targets=qkvo"]),
    ("unknown matrix 'q_prj'; the nearest is 'q_proj'",
     ["--lora_rank=4", "--lora_targets=q_prj,v_proj"]),
    ("unknown matrix 'qkv'; the nearest is 'qkvo'", ["--lora_rank=4", "--lora_targets=qkv"]),
    ("unknown matrix ''", ["--lora_rank=4", "--lora_targets="]),
    ("lora_rank must be between 0 and", ["--lora_rank=-1"]),
    ("lora_alpha must be between", ["--lora_rank=4", "--lora_alpha=0"]),
    ("lora_rank 65 is more than layers.0.self_attn.k_proj.weight of 64 x 128 can have: at most 64",
     ["--lora_rank=65"]),
])
def test_refused(tmp_path, say, args):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=f"^error: .*{say}"):
        train_here(*args, f"--out_dir={out}")
    assert not out.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-3), ("bfloat16", 0.2)])
def test_on_a_gpu(tmp_path, dtype, bound):
    """The kernels with frozen weights."""
    out = str(tmp_path / "out")
    train_here(*LORA, "--device=cuda", f"--dtype={dtype}", f"--out_dir={out}")
    steps = read_log(out)[1]
    assert len(steps) == 4 and all(r["grad_norm"] > 0 and r["gap"] <= bound for r in steps)
    assert all(x.any() for x in read_checkpoint(out)["learner"]["masters"])


# memory

def held(net, opt, base=()):
    """Numbers of all tensors that live between two steps, each storage once."""
    tensors = [*net.parameters(), *opt.masters, *base]
    for pair in opt.optimizer.moments():
        tensors += pair
    assert all(p.grad is None for p in tensors if isinstance(p, torch.nn.Parameter))
    return sum({x.data_ptr(): x.numel() for x in tensors if x.dim()}.values())


def test_what_is_held():
    """W, W0 of the targets, and A and B with two moments (and gradients, within a step). Without
    LoRA all weights, here their own masters, have moments."""
    net = toy()
    c = train.settings(["--lora_rank=4"])
    base = frozen_base(net, c)
    parts = with_lora(net, base=base)
    steps(net, parts, n=1)
    weights = sum(p.numel() for p in net.parameters())
    twice = sum(net.tensors()[name].numel() for name in parts[2].adapters)
    added = sum(4 * sum(net.tensors()[name].shape) for name in parts[2].adapters)
    assert parts[2].trained == added
    assert held(net, parts[2], base.parameters()) == weights + twice + 3 * added
    net = toy()
    c = train.settings([])
    objective = train.OBJECTIVES["grpo"](net, c, None)
    opt = Masters(net, c)
    steps(net, (c, objective, opt), n=1)
    assert held(net, opt) == 3 * weights


def test_the_rewards_in_the_docs():
    """The table of docs/lora.md, from its logs."""
    found, checked = logs.load(os.path.join(ROOT, "results", "lora")), 0
    for line in open(os.path.join(ROOT, "docs", "lora.md")):
        what, *said = (cell.strip() for cell in line.strip("|\n").split("|"))
        if what in ("all weights", "LoRA, rank 8") and len(said) == 4:
            rank = "lora_rank=8 " if "LoRA" in what else ""
            arm = found[f"smd {rank}lr={said[0]}"]
            for key, mean in (("eval_compressed", said[2]), ("eval_dense", said[3])):
                values = logs.results(arm, key).values()
                assert (len(values), f"{fmean(values):.3f}") == (int(said[1]), mean), line
            checked += 1
    assert checked == len(found) == 5


def test_the_counts_of_a_7b_model():
    """As docs/lora.md has them: in bytes, of bf16 weights."""
    with torch.device("meta"):
        net = Transformer(bench.config_of("qwen2.5-7b"))
    c = SimpleNamespace(lora_targets="all")
    shapes = [net.tensors()[name].shape for name in targeted(net, c)]
    weights = sum(p.numel() for p in net.parameters())
    twice, added = sum(a * b for a, b in shapes), 16 * sum(a + b for a, b in shapes)
    assert (weights, twice, added) == (7_615_616_512, 6_525_288_448, 40_370_176)
    page = open(os.path.join(ROOT, "docs", "lora.md")).read()
    lora, full = 2 * weights + 2 * twice + 16 * added, 16 * weights
    for number in (2 * weights, 2 * twice, 14 * weights, 16 * added, lora, full):
        assert f"{number / 1e9:.1f}" in page, number
