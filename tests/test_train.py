"""train.py and run/: settings and what is wrong with them, the update, the loop as it is run."""
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo
import objectives.ppo
import run.report
import run.start
import support.optimizer
import train
from conftest import (
    EVICTION,
    FAST,
    ROOT,
    STOP,
    TINY,
    at_call,
    contents,
    copy_of,
    learn,
    learner,
    prompts,
    read_checkpoint,
    read_log,
    same_weights,
    share_of_digits,
    some_rewards,
    toy,
    train_here,
    write_problems,
)
from data.tasks import TASKS, Problems, before_stop, prompt_encoder
from data.tokenizer import Tokenizer
from grpo import advantages, replay
from kvcache import EVICT, SPREAD, Eviction, NotFinite
from model import Transformer
from objectives.dpo import DPO
from rollout import generate
from run.evaluate import check_best, evaluate
from run.learn import Metrics, asked, quantile, summary
from run.rewards import cut_at, decode
from run.settings import (
    CHOICES,
    OF_OBJECTIVES,
    RANGES,
    eviction_of,
    identity_of,
    problems_at,
)
from run.start import check_memory, set_up
from support.checkpoint import write_checkpoint

# a whole run

def test_run_leaves_what_it_promises(finished):
    out, printed = finished
    lines = printed.strip().splitlines()
    assert lines[-1].startswith("held-out reward with the compressed cache: ")
    assert "bytes kept" in lines[-8] and "first held-out problem" in lines[-7]
    kinds = "eval step step eval step step eval".split()
    assert [line[:4] for line in lines if line.startswith(("step ", "eval "))] == kinds
    rows = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    assert [(list(r)[0], r["kind"]) for r in rows] == [("kind", kind) for kind in kinds]
    evals, steps = ([r for r in rows if r["kind"] == kind] for kind in ("eval", "step"))
    assert [r["step"] for r in steps] == [0, 1, 2, 3] and [r["step"] for r in evals] == [0, 2, 4]
    for r in steps:
        assert r["length"] == r["tokens"] / 8 and 1 <= r["length"] <= 5
        assert r["tokens_per_s"] == pytest.approx(r["tokens"] / r["rollout_s"])
        assert r["lr"] == pytest.approx(3e-4 * (r["step"] + 1) / 6)  # five steps of warm-up
        assert r["gap_max"] <= 1e-4  # the replay identity, in the loop itself
        assert r["kv_kept"] < r["kv_dense_shared"] < r["kv_dense"]
        assert 0 < r["accept_p05"] <= r["accept"] <= 1 and r["grad_norm"] > 0
    samples = Path(out, "samples.txt").read_text()
    assert samples.count("--- step") == 2 * 3  # two responses of steps 0, 2, 3
    assert samples.count("\nAnswer:\n>>> ") == 2 * 3  # the end of the prompt, as it was encoded
    config = json.loads(Path(out, "config.json").read_text())
    assert config["group"] == 4 and config["budget"] == 24 and config["device"] == "cpu"
    state = read_checkpoint(out)
    assert config == dict(state["config"], identity=state["identity"])
    assert config["identity"].keys() == {"model"}


def test_what_was_saved_loads(finished, tmp_path):
    """Its first evaluation is the last one of the run that saved it."""
    out = tmp_path / "out"
    train_here(f"--model={finished[0]}/model", "--steps=1", f"--out_dir={out}")
    before, after = read_log(finished[0])[0][-1], read_log(out)[0][0]
    for name in ("eval_compressed", "eval_dense", "eval_accept", "eval_accept_p05"):
        assert before[name] == after[name]
    assert read_log(finished[0])[0][0]["eval_accept"] != after["eval_accept"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_default_device_on_a_gpu(tmp_path, capsys):
    """The card is found, and two runs with one seed write equal lines, but for the memory that the
    process holds from before; another seed does not."""
    def rows(name, *more):
        train_here("--device=auto", f"--out_dir={tmp_path / name}", *more)
        assert "Triton kernel" in capsys.readouterr().out
        rows = sum(read_log(tmp_path / name), [])
        return [{key: x for key, x in row.items() if key != "peak_gb"} for row in rows]
    first = rows("a")
    assert first == rows("b") and first != rows("c", "--seed=1") and len(first) == 7


def test_nothing_is_evicted(tmp_path, monkeypatch, capsys):
    """It is said where a budget holds the longest prompt that there is, not the longest that there
    might be, and no response key can go. Of a task of one's own the prompts of the first step,
    which may be far below prompt_tokens, tell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "short_words:task", None)  # forgotten afterwards
    (tmp_path / "short_words.py").write_text(MINE)
    file = write_problems(tmp_path / "p.jsonl", range(10, 30))
    small = ["--window=4", "--sinks=0"]

    def said(*ask, task=file):
        job = set_up([*FAST, "--dry_run=True", f"--task={task}", "--max_new_tokens=17", *ask],
                     train.settings, train.OBJECTIVES, train.update)
        lengths.append(max(map(len, job.problems.get("train", range(2))[1])))
        return [line for line in capsys.readouterr().out.splitlines() if "nothing is evict" in line]

    n, lengths = len(prompt_encoder(Tokenizer(TINY))("The code is 10. What is it?")), []
    line = f"nothing is evicted: the longest prompt has {n} tokens, budget is "
    assert said() == [f"{line}24"] == said("--response_budget=17")
    assert said(*small, f"--budget={n}") == [f"{line}{n}"]
    assert said(*small, f"--budget={n - 1}") == said("--evict=none") == []
    # of 16 keys: chosen from every 8 steps, the second time after the last token that sees one
    assert said(*small, "--response_budget=8", "--period=8") == [f"{line}24"]
    assert said(*small, "--response_budget=7", "--period=8") == []
    assert said("--prompt_tokens=64", "--budget=63", task="kv")[0].startswith(
        "nothing is evicted from the first 2 prompts: ")
    assert said("--prompt_tokens=64", "--budget=64", task="kv") == [
        "nothing is evicted: the longest prompt has 64 tokens, budget is 64"]
    lines = said(*small, "--budget=24", task="short_words:task")
    line = f"nothing is evicted from the first 2 prompts: the longest has {lengths[-1]} tokens, "
    assert lengths[-1] < 24 and lines == [f"{line}budget is 24"]
    assert said(*small, f"--budget={lengths[-1] - 1}", task="short_words:task") == []  # control


# settings

@pytest.mark.parametrize("say, args", [
    ("unknown key 'bugdet'; the nearest is 'budget'", ["--bugdet=32"]),
    (f"evict must be one of {', '.join(EVICT)}, or module:name, got 'snap'", ["--evict=snap"]),
    ("top_p is not offered", ["--top_p=0.9"]),
    ("template must hold a JSON object", ["--template=[1]"]),
    ("out_dir is empty", ["--out_dir="]),
    ("group must be at least 2", ["config/dpo.py", "--group=1"]),
    ("objective must be one of grpo, ppo, dpo", ["--objective=nothing"]),
    ("learner=shadow they are one policy", ["--correction=tis"]),
    ("evict=none, learner=dense they are one policy", ["config/tis.py", "--evict=none"]),
    ("correction=tis and ratio_to=sampler correct", ["config/tis.py", "--ratio_to=sampler"]),
    ("beta=0.2: objective=grpo does not use it; it uses correction, ", ["--beta=0.2"]),
    ("response_budget 16 must be above the window of 16", ["--response_budget=16", "--window=16"]),
    ("eval_evict must be one of auto, snapkv", ["--eval_evict=none"]),
    ("budget 20 must be above window + sinks", ["--budget=20", "--window=16", "--sinks=4"]),
    ("unknown task 'needel'", ["--task=needel"]),
    ("nofile.jsonl", ["--task=nofile.jsonl"]),
    ("task 'mine.json': a file must end in .jsonl", ["--task=mine.json"]),
    ("task kv4 needs at least 163 tokens, got prompt_tokens=128", ["--prompt_tokens=128"]),
    ("'/no/such/path': no such folder", ["--model=/no/such/path"]),
    ("exceed the model's context", ["--prompt_tokens=100000"]),
    ("does not exist", ["--resume=True"]),
    ("is no local folder and could not", ["--model=no/such-model"]),
])
def test_bad_input(say, args, tmp_path, monkeypatch):
    """One line that names the culprit, a non-zero exit, nothing written."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)  # config files
    with pytest.raises(SystemExit) as e:
        train.main([f"--out_dir={tmp_path / 'out'}", *args])
    assert say in str(e.value) and str(e.value).startswith("error: ")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_ranges_and_choices():
    """What is outside is refused by name; the defaults are inside."""
    for key, (low, high) in RANGES.items():
        for x in (low - 1, high + 1):
            with pytest.raises(ValueError, match=f"^{key} must be between {low} and {high}, got "):
                train.settings([f"--{key}={x}"])
    for key, names in CHOICES.items():
        with pytest.raises(ValueError, match=f"{key} must be one of {', '.join(names)}, got 'x'"):
            train.settings([f"--{key}=x"])
    assert vars(train.settings([])) == train.DEFAULTS


def test_config_files(tmp_path):
    """Those of the project are right; what comes later on the command line wins."""
    for name in os.listdir(os.path.join(ROOT, "config")):
        train.settings([os.path.join(ROOT, "config", name)])
    file = tmp_path / "c.py"
    file.write_text("lr = 1\nsteps = 7\n")
    c = train.settings([str(file), "--steps=8"])
    assert c.lr == 1.0 and type(c.lr) is float and c.steps == 8
    assert train.settings(["--steps=8", str(file)]).steps == 7


# one update

def sampled(net):
    """A rollout of four groups, some responses stopped."""
    return generate(net, prompts(61, 40, 97, 20), 4, 12, stop_ids=STOP, seed=1, eviction=EVICTION)


class Gradients:
    """Stands in for the optimizer's step: keeps the gradients, changes nothing."""

    def __init__(self, opt):
        self.opt, self.found = opt, []
        opt.step = self.step

    def step(self, lr, clip):
        self.found = [p.grad.clone() for p in self.opt.masters]
        self.opt.forget()
        return 0.0


def apart(a, b):
    """Largest difference of two lists of gradients, each tensor relative to its own."""
    pairs = zip(a, b)
    return max(((x - y).abs().max() / x.abs().max().clamp(min=1e-3)).item() for x, y in pairs)


def test_micro_batches(model):
    """As many groups as fit into a limit of packed rows, at least one."""
    def micro_batches(*args):
        return [list(range(4))[some] for some in run.learn.micro_batches(*args)]

    r = sampled(model)
    sizes = [len(p) + 2 * int((n - 1).sum()) for p, n in zip(r.prompts, r.lengths)]
    assert micro_batches(r, 2, 10_000) == [[0, 1, 2, 3]]
    assert micro_batches(r, 2, 1) == [[0], [1], [2], [3]]
    two = max(sizes[0] + sizes[1], sizes[2] + sizes[3])
    assert micro_batches(r, 2, two) == [[0, 1], [2, 3]]
    assert micro_batches(r, 2, sizes[0] + sizes[1] - 1)[0] == [0]
    # one copy of each response: more fit
    alone = sizes[0] + sizes[1] - int((r.lengths[:2] - 1).sum())
    assert micro_batches(r, 1, alone)[0] == [0, 1] != micro_batches(r, 2, alone)[0]


def objective_gradients(rows, **changes):
    """Gradients of one update on four groups, `rows` packed rows at a time. -> gradients, log"""
    net = toy()
    c, objective, opt = learner(net, initial=toy(seed=5), micro_rows=rows, **changes)
    if objective.value is not None:
        torch.nn.init.constant_(objective.value.weight, 0.02)
    r, kept = sampled(net), Gradients(opt)
    teacher = toy(seed=5) if c.teacher == "initial" else None
    log = learn(net, opt, objective, r, rewards=some_rewards(4, 4), c=c, lr=1e-3, teacher=teacher)
    return kept.found, log


def one_by_one(f):
    """f(name, logp, ..., mask) or f(x, mask), computed for each group alone."""
    def per_group(*args):
        parts = []
        for b in range(len(args[-1])):
            part = [x[b:b + 1] if isinstance(x, torch.Tensor) else x for x in args]
            parts.append(f(*part))
        return torch.cat(parts)
    return per_group


def loss_of_its_own_pairs(objective, out, part, batch, old, whole, loss=DPO.loss):
    return loss(objective, out, part, batch, old=old, whole=part)


DENSE = dict(learner="dense")
# for each micro-batch by itself, what is normalised over the whole batch
WHITEN = (objectives.ppo, "whiten", one_by_one(objectives.ppo.whiten))
WEIGH = (grpo, "correction", one_by_one(grpo.correction))
PAIRS = (DPO, "loss", loss_of_its_own_pairs)


@pytest.mark.parametrize("changes, control", [
    *((dict(norm=norm), dict(distill=0.2)) for norm in grpo.NORMS),
    (dict(distill_on="reward"), dict(distill_on="all")),
    (dict(distill_on="reward", distill_to="shadow", norm="token"), dict(distill_on="all")),
    (dict(DENSE, distill=0.0, ratio_to="sampler"), dict(ratio_to="learner")),
    (dict(ref_kl=0.5), dict(ref_kl=0.0)),
    (dict(DENSE, objective="ppo", ref_kl=0.5, ratio_to="sampler"), dict(ref_kl=0.0)),
    (dict(teacher="initial"), dict(teacher="other")),
    (dict(teacher="initial", distill_to="shadow"), dict(teacher="other")),
    (dict(DENSE, correction="sparse_rl", distill=0.0), WEIGH), (dict(objective="ppo"), WHITEN),
    (dict(DENSE, objective="ppo", correction="tis"), WHITEN), (dict(objective="dpo"), PAIRS),
    (dict(DENSE, objective="dpo"), PAIRS)])
def test_micro_batches_of_every_term(changes, control, monkeypatch):
    """All groups in one forward pass or one group at a time: the same gradient and the same
    numbers. What is normalised over the whole batch is known before the first backward pass."""
    whole, log = objective_gradients(10_000, **changes)
    parts, log_parts = objective_gradients(1, **changes)
    assert apart(whole, parts) < (1e-5 if "norm" in changes and len(changes) == 1 else 1e-4)
    assert log.keys() == log_parts.keys()
    assert all(log[k] == pytest.approx(log_parts[k], rel=1e-3, abs=1e-5) for k in log)
    assert ("weight" in log) == ("correction" in changes)
    if changes.get("correction") == "sparse_rl":
        assert 0 < log["rejected"] < 1 and 0 < log["weight"] < 1
    if "learner" not in changes:
        assert log["gap_max"] <= 1e-4
    if "teacher" in changes:  # the student alone is replayed where it is the learner
        assert ("accept" in log) == ("distill_to" not in changes)
    if isinstance(control, tuple):
        monkeypatch.setattr(*control)
        control = {}
    assert apart(whole, objective_gradients(1, **{**changes, **control})[0]) > 1e-2


@pytest.mark.parametrize("name", [name for name, objective in train.OBJECTIVES.items()
                                  if "updates" in objective.uses])
def test_several_updates_per_rollout(name):
    """The later ones see a ratio, a value or a margin that has moved. The gap is taken before the
    first update, the clipping at the last."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, seed=1, eviction=EVICTION)
    c, objective, opt = learner(net, initial=toy(), objective=name, updates=3)
    rewards = some_rewards(2, 4)
    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-2)
    assert log["gap_max"] <= 1e-4
    if name == "dpo":
        assert log["pairs"] == 2
        assert abs(log["margin"]) < 1e-3  # of the first update: model and reference are the same
    if "clip" in objective.uses:
        assert log["clip_frac"] > 0
        net = toy()  # control: one update clips nothing
        c, objective, opt = learner(net, objective=name)
        one = learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-2)
        assert one["clip_frac"] == 0


def test_ratios_are_to_the_policy_before_the_first_update():
    """Not to the one before this update."""
    net = toy()
    c, objective, opt = learner(net, updates=3)
    was, now = [], []

    def spy(out, part, batch, old, whole, loss=objective.loss):
        was.append(old)
        now.append(out[c.learner].detach())
        return loss(out, part, batch, old=old, whole=whole)

    objective.loss = spy
    learn(net, opt, objective, sampled(net), rewards=some_rewards(4, 4), c=c, lr=1e-2)
    assert was[0] is None and torch.equal(was[1], now[0]) and torch.equal(was[2], now[0])
    assert not torch.equal(now[1], now[0])


def by_hand(c, out, r, rewards):
    """The objective and the distillation of settings c, written out. -> loss, term"""
    scale = grpo.token_scale(r.mask)
    loss, _ = grpo.policy_loss(out[c.learner], None, advantages(rewards), r.mask)
    if c.distill_on == "reward":
        scale = scale * rewards[:, :, None]
    if c.distill_by == "kl":
        return loss, (scale * out["kl"]).sum()
    behind = out["shadow"].detach() - out["dense"]
    assert abs((scale * behind.abs()).sum() - (scale * behind.relu()).sum()) > 1e-3  # both sides
    return loss, (scale * behind * (behind > 0)).sum()


@pytest.mark.parametrize("changes", [
    *(dict(distill_to=student, distill_on=on) for student in ("dense", "shadow")
      for on in ("all", "reward")),
    *(dict(distill_by="one_sided", distill_on="all", learner=policy)
      for policy in ("shadow", "dense"))])
def test_the_loss_of_an_update_by_hand(model, changes):
    """Objective plus distillation, of one replay. one_sided: where the sampled token is likelier
    under the teacher, the difference; elsewhere nothing."""
    c, objective, opt = learner(model, distill=0.3, **changes)
    r, rewards, params = sampled(model), some_rewards(4, 4), list(model.parameters())
    kept = Gradients(opt)
    log = learn(model, opt, objective, r, rewards=rewards, c=c, lr=1e-3)
    loss, term = by_hand(c, replay(model, r, distill_to=c.distill_to), r, rewards)
    want = torch.autograd.grad(loss + 0.3 * term, params)
    assert apart(want, kept.found) < 1e-5
    assert log["kl"] == pytest.approx(term.item(), rel=1e-5) and term > 0
    assert log["loss"] == pytest.approx((loss + 0.3 * term).item(), rel=1e-4, abs=1e-7)
    other = torch.autograd.grad(replay(model, r)["dense"].sum(), params)
    assert apart(other, kept.found) > 1e-2  # control
    with pytest.raises(ValueError, match="set teacher=other"):
        train.settings(["--distill_by=one_sided", "--teacher=initial"])


def constant_rewards(reward, **changes):
    """Gradients and log of an update in which all responses earned the same: of the KL alone."""
    net = toy()
    c, objective, opt = learner(net, initial=toy(seed=5), **changes)
    kept = Gradients(opt)
    log = learn(net, opt, objective, sampled(net), rewards=torch.full((4, 4), reward), c=c, lr=1e-3)
    return kept.found, log


@pytest.mark.parametrize("student", ["dense", "shadow"])
def test_the_kl_of_rewarded_responses(student):
    """Of full reward or more: all of it, bit for bit. Of none or less: nothing. Between: its share;
    distill_on = "all" does not ask."""
    found, logs = {}, {}
    for x in (-1.0, 0.0, 0.5, 1.0, 7.0):
        found[x], logs[x] = constant_rewards(x, distill_to=student)
    everything, log = constant_rewards(0.0, distill_to=student, distill_on="all")
    assert apart(everything, [torch.zeros_like(g) for g in everything]) > 0.1 and log["kl"] > 0.01
    for x in (1.0, 7.0):
        assert all(map(torch.equal, found[x], everything)) and logs[x]["kl"] == log["kl"]
    for x in (-1.0, 0.0):
        assert all((g == 0).all() for g in found[x]) and logs[x]["kl"] == 0
    assert apart([2 * g for g in found[0.5]], everything) < 1e-5
    assert logs[0.5]["kl"] == pytest.approx(log["kl"] / 2)


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_the_ratio_to_the_sampler_by_hand(objective):
    """exp(dense learner - evicting sampler), clipped, in the first update too."""
    net = toy()
    r, rewards = sampled(net), some_rewards(4, 4)
    logs = {}
    for ratio_to in ("sampler", "learner"):
        c, obj, opt = learner(net, objective=objective, learner="dense", distill=0.0, updates=2,
                              clip=0.3, clip_high=0.4, ratio_to=ratio_to)
        c.value_coef = 0.0  # of ppo
        kept = Gradients(opt)
        logs[ratio_to] = learn(net, opt, obj, r, rewards=rewards, c=c, lr=1e-3)
    out = replay(net, r, ("dense",), value=obj.value)
    batch = obj.prepare(r, rewards, lambda rollout: out)[1]
    adv = batch["adv"].view(4, 4, -1)                           # (B, G, 1 or R)
    ratio = (out["dense"] - r.logp_roll).exp()
    cut = ratio.clamp(0.7, 1.4)
    loss = -(batch["scale"] * torch.minimum(ratio * adv, cut * adv)).sum()
    assert logs["sampler"]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert logs["sampler"]["ratio"] == pytest.approx(ratio[r.mask].mean().item(), rel=1e-4)
    held = ratio * adv > cut * adv
    assert logs["sampler"]["clip_frac"] == pytest.approx(held[r.mask].float().mean().item())
    assert 0 < logs["sampler"]["clip_frac"] < 1
    # the control, whose gradients are in kept; weights stay, so its ratio is 1 in both updates
    assert logs["learner"]["ratio"] == 1 and logs["learner"]["clip_frac"] == 0
    want = torch.autograd.grad(loss, list(net.parameters()))
    c, obj, opt = learner(net, objective=objective, learner="dense", distill=0.0, clip=0.3,
                          clip_high=0.4, ratio_to="sampler")
    c.value_coef = 0.0
    other, kept = kept.found, Gradients(opt)
    learn(net, opt, obj, r, rewards=rewards, c=c, lr=1e-3)
    assert apart(want, kept.found) < 1e-4 and apart(want, other) > 1e-2


@pytest.mark.parametrize("policy", ["dense", "shadow"])
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_the_kl_to_the_initial_model_by_hand(objective, policy):
    """Of the learner's policy, both models under one mask; without advantages it is the loss."""
    without = dict(value_coef=0.0) if objective == "ppo" else {}
    kept, log = constant_rewards(0.0, objective=objective, learner=policy, distill=0.0, ref_kl=0.5,
                                 **without)
    net = toy()
    r, other = sampled(net), {"dense": "shadow", "shadow": "dense"}[policy]
    logp = replay(net, r, (policy,))[policy]
    with torch.no_grad():
        refs = replay(toy(seed=5), r)

    def kl_to(ref):
        d = ref - logp
        k3 = d.exp() - d - 1
        return (grpo.token_scale(r.mask) * (logp - logp.detach()).exp() * k3).sum()

    kl = kl_to(refs[policy])
    assert log["ref_kl"] == pytest.approx(kl.item(), rel=1e-4) and log["ref_kl"] > 0.1
    assert log["loss"] == pytest.approx(0.5 * kl.item(), rel=1e-4)
    assert kl_to(refs[other]).item() != pytest.approx(kl.item(), rel=2e-3)
    want = torch.autograd.grad(0.5 * kl, list(net.parameters()))
    assert apart(want, kept[:len(want)]) < 1e-4  # ppo's value head follows
    none, _ = constant_rewards(0.0, objective=objective, learner=policy, distill=0.0, **without)
    assert all((x == 0).all() for x in none)  # control


@pytest.mark.parametrize("changes, file, counts", [
    ("", "tokenizer.json", True), ("", "../t.jsonl", True), ("", "model.safetensors", False),
    ("--ref_kl=0.5", "model.safetensors", True), ("--objective=dpo", "model.safetensors", True),
    ("--teacher=initial", "model.safetensors", True), ("", "mine.txt", False),
    ("--teacher=initial --distill=0", "model.safetensors", False)])
def test_contents_are_part_of_a_run(changes, file, counts, tmp_path):
    """Those of the task and the tokenizer; of weights that are read again. A run that goes on with
    others is refused, see what a run reads may move."""
    task = write_problems(tmp_path / "t.jsonl", range(20))
    model = shutil.copytree(TINY, tmp_path / "M")
    (model / "mine.txt").touch()
    c = train.settings([*changes.split(), f"--task={task}"])
    before = identity_of(c, model)
    (model / file).write_bytes((model / file).read_bytes() + b" ")
    assert (identity_of(c, model) != before) == counts


def test_numbers_of_several_updates():
    """Of the first update, but for those of the ratio, which are the last one's."""
    done = []
    for clip_frac in (0.0, 0.25):
        m = Metrics()
        m.add(loss=1.0 + clip_frac, clip_frac=clip_frac, ratio=1.0 + clip_frac, kl_old=clip_frac)
        done.append(m)
    first, last = done
    mask = torch.tensor([True, True, False])
    first.collect(mask, gap=torch.tensor([1.0, 3, 9]), entropy=torch.tensor([2.0, 4, 9]))
    want = dict(loss=1.0, clip_frac=0.25, ratio=1.25, kl_old=0.25, gap=2.0, gap_max=3.0,
                entropy=3.0)
    assert summary([asked(first.numbers()), asked(last.numbers())]) == want
    first.collect(mask.nonzero(as_tuple=True), accept=torch.tensor([0.5, 1.0, 9]))
    log = asked(first.numbers())
    assert log["accept"] == 0.75 and log["accept_p05"] == pytest.approx(0.525)


def test_sums_are_asked_for_once():
    """Tensors are added up as Python adds numbers. Control: in fp32 the sum is another."""
    some = torch.rand(99, generator=torch.Generator().manual_seed(0))
    tensors, numbers = Metrics(kl=0.0), Metrics(kl=0.0)
    for x in some.requires_grad_():
        tensors.add(kl=x, skipped=1)
        numbers.add(kl=x.item(), skipped=1)
    assert torch.is_tensor(tensors.sums["kl"]) and not tensors.sums["kl"].requires_grad
    found = asked(tensors.numbers())
    assert found == asked(found) == numbers.sums and isinstance(found["kl"], float)
    assert numbers.sums["kl"] != some.sum().item()


# the optimizer

def with_gradient(net, opt, gradient):
    """Let the gradient of every trained number be this one."""
    opt.backward(sum(p.float().sum() for p in net.parameters() if p.requires_grad) * gradient)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_without_a_gradient_changes_nothing(rank, dtype):
    """Neither weights nor moments, with decay and momentum from steps before; nor the count that
    AdamW corrects its bias by. Control: the smallest gradient moves them."""
    net = toy(dtype=dtype)
    _, _, opt = learner(net, lora_rank=rank, weight_decay=0.1)

    def state():
        moments = [x for each in opt.state()["optimizer"]["state"].values() for x in each.values()]
        return [x.detach().clone() for x in [*net.parameters(), *opt.whole(), *moments]]

    def step(gradient):
        with_gradient(net, opt, gradient)
        return opt.step(1e-2, 1.0)

    for _ in range(2):  # of LoRA the first moves B alone
        assert step(0.5) > 0
    before, good = state(), opt.good
    assert step(0.0) == 0 and all(map(torch.equal, before, state())) and opt.good == good
    assert all(m.grad is None for m in opt.masters)
    assert step(1e-3) > 0 and not any(map(torch.equal, before[-3:], state()[-3:]))


def test_idle_steps_are_counted_and_answers_shown(finished, tmp_path, capsys, monkeypatch):
    """Where nothing is rewarded: said once after many steps in a row, and at the end, which calls
    nothing the best and shows a problem before and after, from both caches."""
    monkeypatch.setattr(run.report, "IDLE", 2)
    monkeypatch.setattr("data.tasks.reward", lambda problem, text: 0.0)
    train_here("--distill_on=reward", f"--out_dir={tmp_path / 'out'}")
    said = capsys.readouterr().out
    assert "in 4 of 4 steps the gradient was exactly 0" in said and "nothing was learned" in said
    assert said.count("2 steps in a row have changed nothing") == 1
    assert "the form that the reward asks for, is the task too hard? For example:\n  >>> " in said
    assert "all earned 0, so it is the first one, of step 0" in said
    assert re.search(r"the first held-out problem: Repeat .*\n  right answer .*\n"
                     r"  before, compressed .*\n  before, dense .*\n"
                     r"  after, compressed .*\n  after, dense  ", said)
    a, b = (Transformer.from_pretrained(x) for x in (TINY, str(tmp_path / "out" / "model")))
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    monkeypatch.setattr("data.tasks.reward", lambda problem, text: 1.0)
    train_here("--distill=0", "--steps=2", f"--out_dir={tmp_path / 'easy'}")
    said = capsys.readouterr().out
    assert "(1.000 on average now); is the task too easy? For example" in said
    assert "all earned 0" not in said
    assert "exactly 0" not in finished[1]  # control


@pytest.mark.parametrize("schedule, want", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 0.84, 0.68, 0.52, 0.36]),
    ("cosine", [0.5, 1, 0.2 + 0.8 * 0.904508, 0.2 + 0.8 * 0.654508, 0.2 + 0.8 * 0.345492,
                0.2 + 0.8 * 0.095492])])
def test_the_learning_rate_of_each_step(schedule, want):
    end = ["--lr_end=0.2"] if schedule != "constant" else []
    c = train.settings([f"--lr_schedule={schedule}", *end, "--steps=6", "--warmup=1", "--lr=0.1"])
    found = [train.learning_rate(c, step) / c.lr for step in range(6)]
    assert found == pytest.approx(want, abs=1e-5)
    if end:  # one step after the last, which trains even where lr_end is 0
        assert train.learning_rate(c, 6) / c.lr == pytest.approx(0.2)
        c.lr_end = 0.0
        assert train.learning_rate(c, 5) > 0 == pytest.approx(train.learning_rate(c, 6))
    with pytest.raises(ValueError, match="lr_end=0.2 does nothing where lr_schedule=constant"):
        train.settings(["--lr_end=0.2"])
    c.steps = 1  # nothing to go down in
    assert train.learning_rate(c, 0) / c.lr == pytest.approx(0.5)


def test_stop_strings(finished, tmp_path, monkeypatch):
    """A response ends with the token that completes one: what stands behind is not rewarded,
    logged or learned from. Control: a run without."""
    seen, out = [], tmp_path / "out"
    monkeypatch.setattr("data.tasks.reward", lambda p, text: seen.append(text) or len(text) / 99)
    train_here("--steps=2", "--eval_every=9", '--stop=["3", "5"]', f"--out_dir={out}")
    assert len(seen) == 32 and not any("3" in text or "5" in text for text in seen)
    cut, whole = ([row["tokens"] for row in read_log(x)[1][:2]] for x in (out, finished[0]))
    assert sum(cut) < sum(whole)


def test_what_a_stop_string_cuts():
    tok = Tokenizer(TINY)
    net = Transformer.from_pretrained(TINY)
    ids = tok.encode("The code for coin is 4768.\nRepeat each word with its code: coin.\nAnswer:")
    r = generate(net, [ids], 2, 5, stop_ids=tok.stop_ids, eviction=Eviction("none"))
    (whole, same), = decode(tok, r, special=False)
    assert whole == " coin 4768"
    cut = cut_at(tok, r, ("in 47",))                      # " coin", " ", "476", "8"
    assert cut.lengths[0, 0] == 3 and cut.stopped.all() and r.tokens[0, 0, 3] != 0
    assert (cut.tokens[0, 0, 3:] == 0).all() and (cut.logp_roll[0, 0, 3:] == 0).all()
    assert decode(tok, cut, special=False)[0][0] == " coin 476"
    assert torch.equal(cut.logp_roll[0, 0, :3], r.logp_roll[0, 0, :3])
    out = replay(net, cut)                                      # and replay is still exact
    assert (out["shadow"] - cut.logp_roll).abs().max() < 1e-5
    # of several strings the first in the text, and what ends there was not cut at the limit
    short = generate(net, [ids], 2, 3, stop_ids=tok.stop_ids, eviction=Eviction("none"))
    first = cut_at(tok, short, ("476", "coin"))
    assert first.lengths.tolist() == [[1, 1]] and first.stopped.all() and not short.stopped.any()
    assert before_stop(whole, ("476", "coin")) == " "
    none = cut_at(tok, r, ("lamp",))                      # control
    assert torch.equal(none.tokens, r.tokens) and torch.equal(none.lengths, r.lengths)
    for wrong in ('[""]', "[1]", "[", '["a", ""]'):
        with pytest.raises(ValueError, match="must be a text, or a JSON list of texts, none empty"):
            train.settings([f"--stop={wrong}"])


def test_quantiles_of_any_number():
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    for q in (0.0, 0.05, 0.333, 1.0):
        assert quantile(x, q).item() == pytest.approx(x.quantile(q).item(), abs=1e-6)
    assert quantile(torch.tensor([3.0]), 0.05) == 3
    many = torch.zeros(1).expand(2**24 + 1)
    assert quantile(many, 0.05) == 0
    with pytest.raises(RuntimeError):  # the control: torch's own
        many.quantile(0.05)


def test_an_objective_says_which_settings_it_uses(monkeypatch):
    """What it does not use is refused, of one's own too; the default is always allowed."""
    class Mine:
        value = None

    monkeypatch.setitem(train.OBJECTIVES, "mine", Mine)
    train.settings(["--objective=mine"])
    for unused in ("--ref_kl=1", "--correction=tis", "--clip=0.1", "--updates=2", "--beta=1"):
        with pytest.raises(ValueError, match="objective=mine does not use it; it uses none of"):
            train.settings(["--objective=mine", unused, "--learner=dense"])
    Mine.uses = ("clip",)
    assert train.settings(["--objective=mine", "--clip=0.1"]).clip == 0.1
    assert {key for objective in train.OBJECTIVES.values() for key in objective.uses} == {
        *OF_OBJECTIVES}


MINE = """
from grpo import GRPO
def knorm(q, k, e, elsewhere=None):
    return -k.float().norm(dim=-1).t()
class Mine(GRPO):
    uses = ("norm",)
class TwoInputs(Mine):
    def __init__(self, model, settings):
        pass
class Positions(Mine):
    def loss(self, out, part, batch):
        pass
class Instance(Mine):
    def check(self, config):
        pass
class NoUses:
    value = None
class NoScale(Mine):
    def prepare(self, rollout, rewards, score):
        rollout, batch, log = super().prepare(rollout, rewards, score)
        return rollout, dict(adv=batch["adv"]), log
    def loss(self, out, part, batch, old, whole):
        return -out["shadow"].sum(), {}
def two(q, k):
    pass
def three(q, k, e):
    return -k.float().norm(dim=-1).t()
def shout(rng):
    word = rng.choice(["coin", "lamp"])
    return [f"The word is {word}."], iter([]), f"Say {word}.", word
task = (shout, lambda text, answer: float(answer in text) + len(text) / 99)
answers_alone = shout, lambda answer: 1.0
three_values = lambda rng: shout(rng)[:3], task[1]
"""
RAISES = """
from grpo import GRPO
def boom(*inputs, **named):
    raise ValueError("boom")
class Mine(GRPO):
    prepare = loss = boom
def method(q, k, e, elsewhere=None):
    boom()
task = boom, boom
"""


def test_what_is_your_own_comes_from_modules(tmp_path, monkeypatch, capsys):
    """A method, an objective and a task in another folder, without an edit; they are part of the
    run: another file is another run. What is none is refused in one line."""
    monkeypatch.chdir(tmp_path)
    for table in (EVICT, TASKS, train.OBJECTIVES):  # forgotten afterwards
        for name in ("knorm", "Mine", "task"):
            monkeypatch.setitem(table, f"own_things:{name}", None)
    (tmp_path / "own_things.py").write_text(MINE)
    args = ["--evict=own_things:knorm", "--eval_evict=own_things:knorm", "--budget=24",
            "--objective=own_things:Mine", "--task=own_things:task", "--steps=2", "--out_dir=out"]
    train_here(*FAST, *args)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["evict"] == "own_things:knorm"
    rows = read_log(tmp_path / "out")[1]
    assert rows[0]["gap"] < 1e-5 and rows[0]["reward"] > 0
    (tmp_path / "own_things.py").write_text(MINE + "# another")
    with pytest.raises(SystemExit, match="own_things:.* has other contents now"):
        train_here(*FAST, *args, "--resume=True", "--steps=3")
    for wrong, says in (("--evict=own_things:nothing", "does not define 'nothing'"),
                        ("--task=own_things:shout", "must be a pair of functions"),
                        ("--task=own_things:answers_alone", r"\(answer\) must take \(text, answer"),
                        ("--task=own_things:task:x", "task:x': one of .*, or module:name"),
                        ("--evict=own_things:Mine", "must be a function, got <class"),
                        ("--evict=own_things:two", r"two\(q, k\) must take \(q, k, eviction\)$"),
                        ("--evict=own_things:three --response_budget=24",
                         r"three\(q, k, e\) must take \(q, k, eviction, elsewhere\)"),
                        ("--objective=own_things:knorm", "must be a class, got <function"),
                        ("--objective=own_things:NoUses", "the class does not define 'uses'"),
                        ("--objective=own_things:TwoInputs",
                         r"TwoInputs\(model, settings\) must take \(model, settings, initial\)"),
                        ("--objective=own_things:Positions",
                         r"loss\(self, out, part, batch\) must take \(self, out, part, batch,"),
                        ("--objective=own_things:Instance",
                         r"check\(self, config\) must take \(config\)"),
                        ("--objective=no_such:Thing", "objective: cannot import no_such")):
        with pytest.raises(ValueError, match=says):
            train.settings(wrong.split())
    train.settings(["--evict=own_things:three"])  # the control: it is told of no other keys
    for wrong, says in (("--task=own_things:three_values", "draws 3 of them, must be four: facts"),
                        ("--objective=own_things:NoScale", "must hold 'scale', .* it has adv;")):
        with pytest.raises(SystemExit, match=f"^error: .*own_things:.*{says}"):
            train_here(wrong, "--out_dir=wrong", "--overwrite=True")
    train_here("--objective=own_things:NoScale", "--distill=0", "--steps=1", "--out_dir=fine")


def test_what_your_own_raises_names_its_place(tmp_path, monkeypatch):
    """As a reward's does; what others raise does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises.py").write_text(RAISES)
    for setting, name in (("evict", "method"), ("objective", "Mine"), ("task", "task")):
        table = dict(evict=EVICT, objective=train.OBJECTIVES, task=TASKS)[setting]
        monkeypatch.setitem(table, f"raises:{name}", None)
        with pytest.raises(SystemExit) as e:
            train_here(f"--{setting}=raises:{name}", "--out_dir=out", "--overwrite=True")
        said = f"error: raises raised ValueError: boom ({tmp_path}/raises.py:4)"
        assert str(e.value).startswith(said), setting
    with pytest.raises(SystemExit) as e:  # the control: not the fault of the module that is named
        train_here("--objective=raises:Mine", "--prompt_tokens=9")
    assert "raised" not in str(e.value) and "raises.py" not in str(e.value)


def test_bf16_weights_and_fp32_masters():
    """An update far below bf16's spacing is kept by the masters and reaches the bf16 weights once
    it adds up; bf16 alone loses it."""
    net = toy().to(torch.bfloat16)
    _, _, opt = learner(net, lr=1e-6)
    before = list(opt.whole())
    for _ in range(3):
        sum(p.sum() for p in net.parameters()).backward()  # every gradient is 1
        assert all(p.grad is None for p in net.parameters())  # the masters have taken it
        opt.step(1e-6, 1.0)
    moved = torch.cat([(m - b).flatten() for m, b in zip(opt.whole(), before)])
    assert (moved + 3e-6).abs().max() < 1e-6
    for p, m in zip(net.parameters(), opt.whole()):
        assert torch.equal(p, m.to(torch.bfloat16))
    plain = torch.tensor([0.1], dtype=torch.bfloat16)
    assert torch.equal(plain - 1e-6 - 1e-6 - 1e-6, plain)  # the control
    # gradients of micro-batches add up in fp32: 256 + 1 is not representable in bf16
    for value in (256.0, 1.0):
        sum(p.sum() for p in net.parameters()).mul(value).backward()
    assert all((m.grad == 257).all() for m in opt.masters)
    a, b = torch.tensor(256.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16)
    assert (a + b).item() == 256


@pytest.mark.parametrize("rank", [0, 4])
def test_float16_skips_what_overflows(rank, monkeypatch):
    """2**16 times a gradient of 1 is infinite in float16: the scale is halved and nothing else
    changes; then the same gradient is clipped and learned from as it is, not as it was scaled."""
    monkeypatch.setattr(support.optimizer, "GOOD_STEPS", 2)
    net = toy(dtype=torch.float16)
    _, _, opt = learner(net, lora_rank=rank)
    assert opt.scale == 2**16
    before = [x.detach().clone() for x in [*net.parameters(), *opt.masters]]
    with_gradient(net, opt, 1.0)
    assert opt.step(1e-2, 1.0) == 0 and not opt.state()["optimizer"]["state"] and not opt.halfway
    assert all(map(torch.equal, before, [*net.parameters(), *opt.masters]))
    assert all(m.grad is None for m in opt.masters)
    assert opt.scaling == dict(loss_scale=2**15, skipped=1) and opt.scale == 2**15

    with_gradient(net, opt, 1.0)
    norm = opt.step(1e-2, 1.0)
    assert opt.scaling == dict(loss_scale=2**15, skipped=0) and opt.good == 1
    assert not any(map(torch.equal, before[-1:], opt.masters[-1:]))
    # the control: float32, whose gradients are neither scaled nor skipped
    exact = toy()
    _, _, other = learner(exact, lora_rank=rank)
    with_gradient(exact, other, 1.0)
    assert other.step(1e-2, 1.0) == pytest.approx(norm, rel=1e-3) and other.scaling == {}
    assert other.scale is None and "scale" not in other.state()
    if not rank:
        assert norm == pytest.approx(sum(p.numel() for p in net.parameters()) ** 0.5)
        moments = opt.optimizer.moments()
        assert all(torch.allclose(x, x.new_tensor(0.1 / norm)) for x, _ in moments)

    with_gradient(net, opt, 0.0)
    opt.step(1e-2, 1.0)
    assert opt.scale == 2**15 and opt.good == 1  # nothing to learn from says nothing of the scale
    with_gradient(net, opt, 0.25)
    opt.step(1e-2, 1.0)
    assert opt.scale == 2**16 and opt.good == 0  # doubled after two good ones


def test_float16_without_a_way_out(monkeypatch):
    """What no scale mends ends in a line that names the other types, and changes nothing."""
    net = toy(dtype=torch.float16)
    _, _, opt = learner(net)
    before = [m.detach().clone() for m in opt.masters]
    with pytest.raises(FloatingPointError, match="loss is nan: activations .*--dtype=bfloat16 or"):
        with_gradient(net, opt, torch.nan)
    opt.scale = 2.0
    with_gradient(net, opt, 1e6)
    assert opt.step(1e-2, 1.0) == 0 and opt.scale == 1
    with_gradient(net, opt, 1e6)
    with pytest.raises(FloatingPointError, match="at a scale of 1: .*=bfloat16 or --dtype=float32"):
        opt.step(1e-2, 1.0)
    assert all(map(torch.equal, before, opt.masters))
    state = opt.state()
    opt.load(state)  # the control
    for wrong in (dict(scale=0.0), dict(scale=None), dict(good=-1), dict(good=True)):
        with pytest.raises(ValueError, match="ckpt.pt: it holds no scale of the loss"):
            opt.load(state | wrong)
    with torch.no_grad():
        opt.masters[0].view(-1)[0] = 1e5  # finite in float32 alone
    opt.copy_down()
    with pytest.raises(FloatingPointError, match="weights are no longer finite"):
        opt.state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.k_norm", "post_attention_layernorm"])
def test_activations_that_overflow(part, dtype):
    """They reach the sampler's and the learner's log-probs, which float16 refuses by name; float32
    holds them. Infinite keys, which score -inf and would be passed over, are made NaN."""
    net = toy(dtype=dtype)
    r = sampled(net)  # the control
    layer = net.layers[1]
    with torch.no_grad():
        layer.get_submodule(part).weight.mul_(2e4)
    c, objective, opt = learner(net)
    if dtype == torch.float32:
        assert sampled(net).logp_roll.isfinite().all()
        assert learn(net, opt, objective, r, rewards=some_rewards(4, 4), c=c, lr=1e-9)["gap"] > 0
        return
    with pytest.raises(NotFinite, match="exceed 65,504, the largest float16.*--dtype=bfloat16"):
        sampled(net)
    with pytest.raises(FloatingPointError, match="above 65,504, the largest float16"):
        learn(net, opt, objective, r, rewards=some_rewards(4, 4), c=c, lr=1e-9)
    if part.endswith("k_norm"):
        angle = torch.full((9, 8), 0.3)
        x = torch.randn(9, 64, dtype=dtype)
        _, k, _ = layer.self_attn(x, angle.cos(), angle.sin())
        assert k.isnan().any() and not k.isinf().any()
        assert layer.self_attn.k_norm(torch.eye(16, dtype=dtype)).isinf().any()  # as they were


def test_a_run_in_float16(tmp_path, capsys, monkeypatch):
    """The scale starts too high: steps are skipped, said and counted, and not called idle. A run
    that was cut goes on with the scale and its count, to the same bits; without the count it would
    not."""
    monkeypatch.setattr(support.optimizer, "FIRST_SCALE", 2.0**17)
    monkeypatch.setattr(support.optimizer, "GOOD_STEPS", 3)
    ask = ["--dtype=float16", "--distill=1", "--lr=1e-2", "--warmup=0", "--eval_every=9"]
    whole, cut, other = (str(tmp_path / name) for name in ("whole", "cut", "other"))
    train_here(*ask, "--steps=8", f"--out_dir={whole}")
    said, steps = capsys.readouterr().out, read_log(whole)[1]
    skipped = [r["step"] for r in steps if r["skipped"]]
    assert "float16 weights, fp32 masters" in said and 0 < len(skipped) < 6
    assert said.count("| skipped 1: gradient beyond float16, loss scale now ") == len(skipped)
    assert f"{len(skipped)} of 8 updates were skipped, as their gradients went" in said
    assert "the gradient was exactly 0" not in said
    assert all((r["grad_norm"] == 0) == bool(r["skipped"]) for r in steps)
    scales = [r["loss_scale"] for r in steps]
    at = next(i for i in range(1, 8) if scales[i] > scales[i - 1])  # after three good ones

    train_here(*ask, f"--steps={at}", f"--out_dir={cut}")
    state = read_checkpoint(cut)
    assert state["learner"]["good"] > 0 and state["learner"]["scale"] == scales[at - 1]
    shutil.copytree(cut, other)
    train_here(*ask, "--steps=8", "--resume=True", f"--out_dir={cut}")
    assert read_log(cut)[1] == steps and same_weights(cut, whole)
    state["learner"]["good"] = 0
    write_checkpoint(f"{other}/ckpt.pt", state)
    train_here(*ask, "--steps=8", "--resume=True", f"--out_dir={other}")
    assert [r["loss_scale"] for r in read_log(other)[1]] != scales


def test_float16_lies_nearer_than_bfloat16():
    """Sampler and learner are one policy but for rounding, of which float16 has an eighth."""
    gaps = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        net = Transformer.from_pretrained(TINY, dtype=dtype)
        rollout = generate(net, prompts(61, 40), 4, 24, seed=1, eviction=EVICTION)
        with torch.no_grad():
            logp = replay(net, rollout, ("shadow",))["shadow"]
        gaps[dtype] = (logp - rollout.logp_roll).abs()[rollout.mask].mean().item()
    assert gaps[torch.float32] < 1e-5
    assert 10 * gaps[torch.float32] < 4 * gaps[torch.float16] < gaps[torch.bfloat16]


def test_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    """The run stops in one line that names the last checkpoint; it and the log are as they were
    before the step."""
    loss, out = grpo.GRPO.loss, tmp_path / "out"
    calls = []

    def overflows(self, *args, **kwargs):
        x, numbers = loss(self, *args, **kwargs)
        calls.append(x)
        if len(calls) == 2:  # the first one is the control
            x = x * float("nan")
        return x, numbers

    monkeypatch.setattr(grpo.GRPO, "loss", overflows)
    with pytest.raises(SystemExit, match="^error: the gradient's norm is nan[^\n]*; "
                       f"{out}/ckpt.pt holds step 1$"):
        train_here("--save_every=1", "--eval_every=9", f"--out_dir={out}")
    assert len(read_log(out)[1]) == 1 == read_checkpoint(out)["step"]


def test_what_is_not_finite_is_not_kept(tmp_path, monkeypatch):
    """Weights, numbers of the log. The control: after an update weights are kept."""
    net = toy()
    c, objective, opt = learner(net)
    learn(net, opt, objective, sampled(net), rewards=some_rewards(4, 4), c=c, lr=1e-9)
    opt.state()
    with torch.no_grad():
        opt.masters[-1][0] = torch.inf
    with pytest.raises(FloatingPointError, match="weights are no longer finite"):
        opt.state()
    wrong = dict(reward=float("nan"), tokens=1, truncated=0, equal=0)
    monkeypatch.setattr(train, "facts", lambda *_: wrong)
    with pytest.raises(SystemExit, match="reward is nan in step 0"):
        train_here(f"--out_dir={tmp_path / 'out'}")
    assert [len(rows) for rows in read_log(tmp_path / "out")] == [1, 0]


# what fits

def test_memory(tmp_path, monkeypatch):
    """Refused with the number that would fit, which then fits; of a machine with room for 40
    samples of the embedded model."""
    net = Transformer.from_pretrained(TINY)
    heads = net.config.n_layer * net.config.n_kv_head
    size = 4 * net.config.kv_bytes_per_token(net.dtype) + 5 * 4 * (3 + heads) + 4 * net.vocab_used
    monkeypatch.setattr(run.start, "memory_of", lambda device: 40.5 * size)
    for ask, say in (
            (["--prompts=11"], "prompts 11 is too much: 44 samples .* prompts 10 might fit"),
            (["--prompts=1", "--group=41"], "group 41 is too much: 41 .* group 40 might fit"),
            (["--eval_problems=50", "--eval_batch=41"], "eval_batch 41 .* eval_batch 40 might"),
            (["--eval_final=50", "--eval_batch=41"], "eval_batch 41 .* eval_batch 40 might")):
        with pytest.raises(ValueError, match=say):
            check_memory(train.settings([*FAST, *ask]), net)
    for ask in (["--prompts=10"], ["--prompts=1", "--group=40"], ["--eval_batch=40"],
                ["--eval_batch=9999"]):  # four problems
        check_memory(train.settings([*FAST, *ask]), net)


# evaluation

def test_which_cache_judges_an_arm_without_eviction(tmp_path, monkeypatch):
    """SnapKV with the settings' numbers, or the one that it is told: before training it is judged
    like the arm that evicts so, to the last digit; with another cache it is not."""
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    asked = ["--response_budget=12", "--period=4", "--window=8", "--max_new_tokens=17",
             "--steps=1", "--eval_every=9"]
    evals, kept = {}, {}
    for name, more in dict(snapkv=["--evict=snapkv"], none=["--evict=none"], rkv=["--evict=rkv"],
                           named=["--evict=none", "--eval_evict=rkv"]).items():
        train_here(*asked, *more, f"--out_dir={tmp_path / name}")
        rows, steps = read_log(tmp_path / name)
        evals[name] = rows[0]
        kept[name] = steps[0]["kv_kept"] == steps[0]["kv_dense_shared"]
    assert kept == dict(snapkv=False, none=True, rkv=False, named=True)
    assert evals["none"] == evals["snapkv"] and evals["named"] == evals["rkv"]
    assert evals["rkv"]["eval_accept"] != evals["snapkv"]["eval_accept"] < 0.99  # control
    assert evals["none"]["eval_compressed"] != evals["none"]["eval_dense"]
    # the cache decides on the compressed one alone
    assert len({row["eval_length_dense"] for row in evals.values()}) == 1
    assert len({row["eval_length"] for row in evals.values()}) == 2


def test_the_first_and_the_last_two_evaluations_are_the_precise_ones(tmp_path):
    """A file holds fewer problems than are asked for; a longer run evaluates on."""
    for steps, every, want in ((5, 2, {0: 6, 2: 4, 4: 6, 5: 6}), (2, 1, {0: 6, 1: 6, 2: 6}),
                               (5, 1, {0: 6, 1: 4, 2: 4, 3: 4, 4: 6, 5: 6}), (2, 9, {0: 6, 2: 6})):
        c = SimpleNamespace(steps=steps, eval_every=every, eval_final=6, eval_problems=4)
        assert {step: problems_at(c, step) for step in want} == want
    out, file = tmp_path / "out", write_problems(tmp_path / "p.jsonl", range(50))
    ask = [f"--task={file}", "--eval_every=1", "--eval_final=6", f"--out_dir={out}"]

    def problems(*args):
        train_here(*ask, *args)
        return {row["step"]: row["problems"] for row in read_log(out)[0]}

    assert problems("--steps=1") == {0: 5, 1: 5}
    assert problems("--steps=3", "--resume=True") == {0: 5, 1: 5, 2: 5, 3: 5}
    after = (out / "samples.txt").read_text().split("--- eval 3, dense cache\n")[1]
    assert after.split("---")[0].count(">>>") == 5


def test_every_seed_is_measured_on_the_same_problems(tmp_path, monkeypatch):
    """And under the same eviction, where it is random; but trained on others."""
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    rows = []
    for seed in (0, 1):
        train_here(f"--seed={seed}", "--evict=random", "--steps=1", "--eval_final=16",
                   f"--out_dir={tmp_path / str(seed)}")
        rows.append(read_log(tmp_path / str(seed)))
    first, same = rows[0][0][0], rows[1][0][0]
    assert first == same and 0 < first["eval_dense"]
    assert rows[0][1][0]["gap"] != rows[1][1][0]["gap"]
    tok = Tokenizer(TINY)
    texts = {(split, seed): [p.text for p in Problems(
        "kv", tok, seed=seed, tokens=96, n_eval=4).get(split, range(4))[0]]
        for split in ("eval", "train") for seed in (0, 1)}
    assert texts["eval", 0] == texts["eval", 1] and texts["train", 0] != texts["train", 1]


def test_evaluate(monkeypatch):
    """Greedy reward, and the overlap of both policies where keys are evicted, however many problems
    are decoded at once."""
    net, tok = Transformer.from_pretrained(TINY), Tokenizer(TINY)
    problems = Problems("kv", tok, seed=0, tokens=96, n_eval=6)
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    c = train.settings(FAST)
    e = eviction_of(c)
    assert e == Eviction("snapkv", budget=24, window=16, sinks=2, pool=7)
    got = evaluate(net, tok, problems, c, eviction=e, n=6)

    batch, ids = problems.get("eval", range(6))
    r = generate(net, ids, 1, 5, temperature=0.0, eviction=e, stop_ids=tok.stop_ids)
    texts = [row[0] for row in decode(tok, r, special=False)]
    with torch.no_grad():
        accept = replay(net, r, stats=True)["accept"][r.mask]
    assert got["reward"] == pytest.approx(sum(map(share_of_digits, batch, texts)) / 6)
    assert got["length"] == pytest.approx(r.lengths.float().mean().item())
    assert got["accept"] == pytest.approx(accept.mean().item(), rel=1e-4)
    assert got["accept_p05"] == pytest.approx(accept.quantile(0.05).item(), rel=1e-4)

    c.eval_batch = 4
    again = evaluate(net, tok, problems, c, eviction=e, n=6)
    assert again.pop("samples") == got.pop("samples")
    assert again == pytest.approx(got, rel=1e-4)
    dense = evaluate(net, tok, problems, c, eviction=Eviction("none"), n=6)
    assert dense.keys() == {"reward", "length", "samples"} and dense["reward"] > 0
    few = Eviction("recent", budget=4, window=2, sinks=1)
    narrow = evaluate(net, tok, problems, c, eviction=few, n=6)
    assert narrow["accept"] < got["accept"]  # control


# what is new: spreads of the budget, methods that somebody adds

@pytest.mark.parametrize("spread", SPREAD)
def test_the_start_promises_what_the_end_keeps(spread, tmp_path, capsys):
    """The bound of the first lines is what a rollout of prompts as long as allowed takes."""
    train_here(f"--spread={spread}", "--steps=1", f"--out_dir={tmp_path / 'out'}")
    printed = capsys.readouterr().out.replace(",", "")
    bound = int(printed.split("holds up to ")[1].split()[0])
    kept = int(printed.split("of a rollout: ")[1].split()[0])
    assert kept == bound
    assert (spread == "uniform") == ("on average" not in printed)


def test_pipes_are_refused(finished, tmp_path):
    """Where a file is read a pipe would be waited for."""
    out = copy_of(finished[0], tmp_path)
    for name in ("ckpt.pt", "log.jsonl", "config.json"):
        whole = (out / name).read_bytes()
        (out / name).unlink()
        os.mkfifo(out / name)
        if name != "config.json":  # which a resume writes and does not read
            with pytest.raises(SystemExit, match=f"error: resume: .*{name}.* not a regular file"):
                train_here("--resume=True", f"--out_dir={out}")
        with pytest.raises(SystemExit, match="holds .*which no run|holds another run"):
            train_here(f"--out_dir={out}")
        (out / name).unlink()
        (out / name).write_bytes(whole)


# what a run writes into its folders, and what of it goes on

def test_what_a_run_reads_may_move(tmp_path, monkeypatch):
    """The folder of the model goes while the run lasts; resumed, it and the task file have other
    names. Another number of held-out problems is another run."""
    first, second, out = (tmp_path / x for x in ("M", "N", "out"))
    for folder in (first, second):
        shutil.copytree(TINY, folder)
        (folder / "run.json").write_text("of the run that it comes from")
    a, b = (write_problems(tmp_path / f"{name}.jsonl", range(1000, 1020)) for name in "ab")

    def gone():
        shutil.rmtree(first, ignore_errors=True)
        a.unlink(missing_ok=True)

    with monkeypatch.context() as patched:
        at_call(None, gone, patched.setattr)
        train_here(f"--model={first}", f"--task={a}", "--steps=1", f"--out_dir={out}")
    assert not first.exists()
    saved, there = contents(out / "model"), contents(second)
    assert saved["tokenizer.json"] == there["tokenizer.json"]
    found = json.loads(saved["run.json"])
    assert sorted(found["files"]) == sorted(saved) and found["step"] == 1
    assert found["reward"] == read_log(out)[0][-1]["eval_compressed"]

    ask = [f"--model={second}", f"--task={b}", "--resume=True", f"--out_dir={out}"]
    for key in ("eval_problems", "eval_final"):
        with pytest.raises(SystemExit, match=f"resume: {key} was 4 .* now it is 3"):
            train_here(*ask, f"--{key}=3")
    train_here(*ask, "--steps=2", "--eval_batch=3")
    assert read_checkpoint(out)["step"] == 2
    b.write_text(b.read_text() + " ")
    with pytest.raises(SystemExit, match="resume: task .* has other contents now"):  # control
        train_here(*ask, "--steps=3")


@pytest.mark.parametrize("there, step, evals, want", [
    (0, 2, (0,), 0), (4, 2, (0,), None), (None, 2, (0,), None), ("gone", 2, (0,), None),
    ("half", 2, (0,), None), (4, 2, (0, 2), 2), (4, 0, (0,), 0)])
def test_what_best_holds(there, step, evals, want, tmp_path, capsys):
    """The best so far, step 0, counts after a resume where best/ holds its model or it is here;
    else the evaluation of this step, if there was one."""
    best = tmp_path / "best"
    if there != "gone":
        best.mkdir()
        files = ["model.safetensors", "run.json"]
        if there != "half":
            (best / files[0]).touch()
        holds = 0 if there == "half" else there
        (best / "run.json").write_text(json.dumps(dict(step=holds, files=files)))
    run = SimpleNamespace(step=step, path=tmp_path.joinpath, config=SimpleNamespace(lora_rank=0),
                          memory=dict(best=dict(step=0), evals=[dict(step=i) for i in evals]))
    check_best(run)
    assert run.memory.get("best", {}).get("step") == want
    assert ("does not hold the model of step 0" in capsys.readouterr().out) == (want != 0)
