"""
The command line and the loop, run as a user runs them, on the embedded checkpoint.
"""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

import train
from grpo import advantages, replay
from kvcache import EVICT
from rollout import generate
from test_rollout import SMALL, STOP, prompts, toy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FAST = ["--prompts=4", "--group=4", "--eval_problems=8", "--steps=4", "--eval_every=2", "--save_every=2", "--device=cpu"]


def run(*args, **kwargs):
    """`python train.py ...` from another folder, as a user might."""
    return subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *args], capture_output=True, text=True, timeout=200, **kwargs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole short run. -> out_dir, what it printed"""
    out = str(tmp_path_factory.mktemp("run") / "out")
    p = run(*FAST, f"--out_dir={out}")
    assert p.returncode == 0, p.stderr
    return out, p.stdout


def test_run_leaves_what_it_promises(finished):
    out, printed = finished
    lines = printed.strip().splitlines()
    assert lines[-1].startswith("held-out reward with the compressed cache: ") and "bytes kept" in lines[-2]
    assert sum(line.startswith("step ") for line in lines) == 4 and sum(line.startswith("eval ") for line in lines) == 3
    log = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
    steps = [r for r in log if "loss" in r]
    assert [r["step"] for r in steps] == [0, 1, 2, 3] and [r["step"] for r in log if "eval_compressed" in r] == [0, 2, 4]
    for r in steps:
        assert r["gap_max"] <= 1e-4  # the replay identity, in the loop itself
        assert r["kv_kept"] < r["kv_dense_shared"] < r["kv_dense"]
        assert 0 < r["accept_p05"] <= r["accept"] <= 1 and r["grad_norm"] > 0
    assert json.load(open(os.path.join(out, "config.json")))["group"] == 4
    assert ">>>" in open(os.path.join(out, "samples.txt")).read()
    again = run(f"--model={os.path.join(out, 'model')}", *FAST, "--steps=1", f"--out_dir={out}2")  # what was saved loads
    assert again.returncode == 0, again.stderr
    first = json.loads(open(os.path.join(out + "2", "log.jsonl")).readline())
    assert first["eval_compressed"] == log[-1]["eval_compressed"]


def test_resume_is_bitwise(finished, tmp_path):
    """4 steps equal 2 steps, a new process, and 2 more; another seed does not."""
    out = str(tmp_path / "out")
    assert run(*FAST, "--steps=2", f"--out_dir={out}").returncode == 0
    p = run(*FAST, "--resume=True", f"--out_dir={out}")
    assert p.returncode == 0, p.stderr
    load = lambda o: torch.load(os.path.join(o, "ckpt.pt"), weights_only=True)
    whole, halves = load(finished[0]), load(out)
    assert whole["step"] == halves["step"] == 4
    assert all(torch.equal(a, b) for a, b in zip(whole["masters"], halves["masters"]))
    for a, b in zip(whole["optimizer"]["state"].values(), halves["optimizer"]["state"].values()):
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    times = ("rollout_s", "learn_s")
    read = lambda o: [{k: v for k, v in json.loads(line).items() if k not in times} for line in open(os.path.join(o, "log.jsonl"))]
    assert [r for r in read(out) if "loss" in r] == [r for r in read(finished[0]) if "loss" in r]
    assert run(*FAST, "--seed=1", f"--out_dir={out}b").returncode == 0
    assert not all(torch.equal(a, b) for a, b in zip(whole["masters"], load(out + "b")["masters"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_default_device_on_a_gpu(tmp_path):
    """Without --device the card is found, and two runs with one seed write equal lines; another seed does not."""
    def lines(name, *more):
        p = run(*FAST[:-1], f"--out_dir={tmp_path / name}", *more)
        assert p.returncode == 0 and "Triton kernel" in p.stdout, p.stderr
        read = [json.loads(line) for line in open(tmp_path / name / "log.jsonl")]
        return [{k: v for k, v in r.items() if k not in ("rollout_s", "learn_s")} for r in read]
    first = lines("a")
    assert first == lines("b") and first != lines("c", "--seed=1") and len(first) == 7


def test_one_process_a_folder(tmp_path):
    """While another process works in out_dir, a run there is refused and leaves it alone; afterwards it may begin."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "log.jsonl").write_text("theirs\n")
    holder = subprocess.Popen([sys.executable, "-c", f"import train; train.hold({str(out)!r}); print('held', flush=True); input()"], cwd=ROOT,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    ask = [*FAST, "--steps=1", f"--out_dir={out}", "--overwrite=True"]
    p = run(*ask)
    assert p.returncode == 1 and p.stderr.strip() == f"error: out_dir {str(out)!r} is in use by another process"
    assert (out / "log.jsonl").read_text() == "theirs\n"
    holder.kill()  # the lock goes with the process, however it ends
    holder.wait()
    assert run(*ask).returncode == 0


def test_interrupt_saves_and_resumes(tmp_path):
    out = str(tmp_path / "out")
    p = subprocess.Popen([sys.executable, os.path.join(ROOT, "train.py"), *FAST, "--steps=500", "--eval_every=500", f"--out_dir={out}"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in p.stdout:
        if line.startswith("step    0"):
            p.send_signal(signal.SIGINT)
            break
    printed, errors = p.communicate(timeout=60)
    assert p.returncode == 130 and "go on with the same command and --resume=True" in printed and "Traceback" not in errors
    step = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)["step"]
    assert 1 <= step < 10
    p = run(*FAST, f"--steps={step + 1}", "--eval_every=500", "--resume=True", f"--out_dir={out}")
    assert p.returncode == 0 and f"step {step:4d}" in p.stdout, p.stderr


def test_kill_leaves_a_whole_checkpoint(tmp_path):
    """kill -9 at any moment: the checkpoint that is there loads, and the log goes on without a step twice."""
    out = str(tmp_path / "out")
    p = subprocess.Popen([sys.executable, os.path.join(ROOT, "train.py"), *FAST, "--steps=500", "--save_every=1", "--eval_every=500",
                          f"--out_dir={out}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in p.stdout:
        if line.startswith("step    3"):
            p.kill()
            break
    p.wait(timeout=60)
    step = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)["step"]
    assert step >= 3
    q = run(*FAST, f"--steps={step + 2}", "--save_every=1", "--eval_every=500", "--resume=True", f"--out_dir={out}")
    assert q.returncode == 0, q.stderr
    log = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
    assert [r["step"] for r in log if "loss" in r] == list(range(step + 2))


@pytest.mark.parametrize("say, args", [
    ("unknown key 'bugdet'; the nearest is 'budget'", ["--bugdet=32"]),
    ("unknown key 'HOLD_OUT'", ["--HOLD_OUT=5"]),
    ("budget expects int, got str 'many'", ["--budget=many"]),
    ("budget expects int, got float 32.5", ["--budget=32.5"]),
    ("resume expects bool, got int 1", ["--resume=1"]),
    (f"evict must be one of {', '.join(EVICT)}, got 'snap'", ["--evict=snap"]),
    ("top_p is not offered", ["--top_p=0.9"]),
    ("top_k is not offered", ["--top_k=50"]),
    ("temperature must be between", ["--temperature=0"]),
    ("lr must be a finite number", ["--lr=nan"]),
    ("grad_clip must be between", ["--grad_clip=-1"]),
    ("beta2 must be between", ["--beta2=2"]),
    ("device must be auto, cpu, cuda or cuda:N", ["--device=gpu"]),
    ("out_dir is empty", ["--out_dir="]),
    ("group must be at least 2", ["--group=1"]),
    ("group must be at least 2", ["config/dpo.py", "--group=1"]),
    ("group must be at least 1", ["config/ppo.py", "--group=0"]),
    ("objective must be one of grpo, ppo, dpo, got 'reinforce'", ["--objective=reinforce"]),
    ("correction must be one of none, tis, mis, sparse_rl", ["--correction=vtrace"]),
    ("learner=shadow replays the sampler", ["--correction=tis"]),
    ("evict=none makes them one", ["config/tis.py", "--evict=none"]),
    ("response_budget 16 must be above the window of 16", ["--response_budget=16"]),
    ("period must be at least 1", ["--period=0"]),
    ("which objective=dpo does not have", ["config/tis.py", "--objective=dpo"]),
    ("lam must be between 0 and 1", ["--lam=1.5"]),
    ("beta must be between", ["config/dpo.py", "--beta=0"]),
    ("budget 20 must be above window + sinks", ["--budget=20", "--window=16", "--sinks=4"]),
    ("unknown task 'needel'", ["--task=needel"]),
    ("nofile.jsonl", ["--task=nofile.jsonl"]),
    ("write --key=value", ["--steps", "3"]),
    ("no such config file", ["config/nothing.py"]),
    ("exceed the model's context", ["--prompt_tokens=100000"]),
    ("does not exist", ["--resume=True"]),
    ("neither a local folder nor", ["--model=no/such-model"]),
    *([] if torch.cuda.is_available() else [("torch finds no CUDA", ["--device=cuda"])]),
])
def test_bad_input(say, args, tmp_path, capsys, monkeypatch):
    """One line that names the culprit, a non-zero exit, nothing written."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)  # config files
    with pytest.raises(SystemExit) as e:
        train.main([f"--out_dir={tmp_path / 'out'}", *args])
    assert say in str(e.value) and str(e.value).startswith("error: ") and "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_bad_config_file(tmp_path):
    file = tmp_path / "c.py"
    for text, say in (("bugdet = 32", "unknown key 'bugdet'; the nearest is 'budget'"), ("lr = 'big'", "lr expects float, got str 'big'"),
                      ("lr = = 3", "line 1"), ("import math", "unknown key 'math'")):
        file.write_text(text)
        with pytest.raises(ValueError, match=say.replace("(", "\\(")):
            train.settings([str(file)])
    file.write_text("lr = 1\nsteps = 7\n")
    c = train.settings([str(file), "--steps=8"])
    assert c.lr == 1.0 and type(c.lr) is float and c.steps == 8
    for name in os.listdir(os.path.join(ROOT, "config")):
        train.settings([os.path.join(ROOT, "config", name)])


def test_out_dir_is_guarded(finished, tmp_path):
    """A folder that holds a run is not touched unless resume or overwrite is said, nor resumed as another run."""
    out, _ = finished
    before = {name: os.stat(os.path.join(out, name)).st_mtime_ns for name in os.listdir(out)}
    for args, say in ((["--seed=0"], "holds another run"), (["--resume=True", "--lr=1e-5"], "lr was 0.0")):
        with pytest.raises(SystemExit, match=say):
            train.main([*FAST, *args, f"--out_dir={out}"])
    assert before == {name: os.stat(os.path.join(out, name)).st_mtime_ns for name in os.listdir(out)}
    for args, say in ((["--resume=True", "--steps=2"], "has done 4 steps already"),
                      (["--overwrite=True", "--prompt_tokens=20"], "needs at least"),  # found too late, the old run would be gone
                      (["--overwrite=True", f"--model={os.path.join(out, 'model')}"], "where this run would save its own")):
        with pytest.raises(SystemExit, match=say):
            train.main([*FAST, *args, f"--out_dir={out}"])
    assert before == {name: os.stat(os.path.join(out, name)).st_mtime_ns for name in os.listdir(out)}
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="error: .*file"):
        train.main([*FAST, f"--out_dir={tmp_path / 'file' / 'out'}"])


def test_full_disk(tmp_path):
    """A write that fails half-way says so in one line and leaves the checkpoint before it whole."""
    out = str(tmp_path / "out")
    assert run(*FAST, "--steps=2", f"--out_dir={out}").returncode == 0
    code = ("import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
            f"sys.path.insert(0, {ROOT!r}); sys.argv[0] = 'train.py'; runpy.run_path({os.path.join(ROOT, 'train.py')!r}, run_name='__main__')")
    p = subprocess.run([sys.executable, "-c", code, *FAST, "--resume=True", f"--out_dir={out}"], capture_output=True, text=True, timeout=200)
    assert p.returncode == 1 and p.stderr.strip().startswith("error: could not write") and len(p.stderr.strip().splitlines()) == 1
    assert torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)["step"] == 2
    assert not os.path.exists(os.path.join(out, "ckpt.pt.tmp"))


@pytest.mark.parametrize("damage", [lambda b: b[:len(b) // 2], lambda b: b"", lambda b: b"text", lambda b: b[:5000]])
def test_damaged_checkpoint(finished, tmp_path, damage):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    (out / "ckpt.pt").write_bytes(damage((out / "ckpt.pt").read_bytes()))
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="error: resume: .*ckpt.pt cannot be read") as e:
        train.main([*FAST, "--resume=True", f"--out_dir={out}"])
    assert "\n" not in str(e.value) and (out / "log.jsonl").read_bytes() == before


def test_diverged():
    """A gradient that is not finite stops the run and leaves the weights alone."""
    net = toy()
    c, opt = learner(net)
    before = [m.detach().clone() for m in opt.masters]
    for q in net.parameters():
        q.grad = torch.full_like(q, float("nan"))
    with pytest.raises(FloatingPointError, match="norm is nan"):
        opt.step(1e-3, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, opt.masters))


def test_problem_files(tmp_path):
    """A file is checked as a whole before anything else happens, and a good one trains."""
    file, out = tmp_path / "p.jsonl", tmp_path / "out"
    good = [json.dumps(dict(question=f"The code for apple is {i}. What is it?", answer=str(i))) for i in range(20)]
    for lines, say in (([*good, json.dumps(dict(prompt="apple " * 300, answer="1"))], "problem 21 of .* has 3.. tokens"),
                       ([*good, "{"], "p.jsonl:21 is not JSON"), ([], "holds no problem"), (good[:5], "5 problems are too few"), ([*good, '{"prompt": "x", "answer": null}'], ":21 needs")):
        file.write_text("\n".join(lines))
        with pytest.raises(SystemExit, match=say):
            train.main([*FAST, f"--task={file}", f"--out_dir={out}"])
        assert not out.exists()
    file.write_text("\n".join(good))
    p = run(*FAST, f"--task={file}", "--steps=1", f"--out_dir={out}")
    assert p.returncode == 0, p.stderr


def learner(net, **changes):
    c = train.settings([])
    for k, v in changes.items():
        setattr(c, k, v)
    return c, train.Masters(net, c)


def test_micro_batches_do_not_change_the_update():
    """All groups in one forward pass or one group at a time: the same weights after the step, for every reduction."""
    net = toy()
    r = generate(net, prompts(61, 40, 97, 20), 4, 12, stop_ids=STOP, seed=1, **SMALL)
    adv = advantages(torch.rand(4, 4, generator=torch.Generator().manual_seed(0)))
    start = {k: p.detach().clone() for k, p in net.named_parameters()}
    for norm in ("sequence", "token", "constant"):
        grads = []
        for rows in (10_000, 1):
            net.load_state_dict(start)
            c, opt = learner(net, norm=norm, micro_rows=rows)
            assert len(train.split_rows(r, 2, rows)) == (1 if rows > 1 else 4)
            opt.step = lambda lr, clip: grads.append([p.grad.clone() for p in net.parameters()]) or 0.0
            train.learn(net, opt, r, adv, c, 1e-3)
            net.zero_grad()
        for a, b in zip(*grads):
            assert (a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1e-3)


OBJECTIVES = dict(sparse_rl=dict(correction="sparse_rl", learner="dense", distill=0.0),
                  ppo=dict(objective="ppo"), dpo=dict(objective="dpo"), ppo_dense=dict(objective="ppo", learner="dense", correction="tis"),
                  dpo_dense=dict(objective="dpo", learner="dense"))


def objective_gradients(name, rows):
    """Gradients of one update of 4 groups, `rows` packed rows at a time. -> gradients, log"""
    net, ref, grads = toy(), toy(seed=5), []
    r = generate(net, prompts(61, 40, 97, 20), 4, 12, stop_ids=STOP, seed=1, **SMALL)
    signal = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    value = torch.nn.Linear(64, 1)
    torch.nn.init.constant_(value.weight, 0.02)
    c, _ = learner(net, micro_rows=rows, **OBJECTIVES[name])
    opt = train.Masters(net, c, value if c.objective == "ppo" else None)
    opt.step = lambda lr, clip: grads.extend(p.grad.clone() for p in opt.masters) or 0.0
    signal = advantages(signal) if c.objective == "grpo" else signal
    return grads, train.learn(net, opt, r, signal, c, 1e-3, dict(ppo=value, dpo=ref).get(c.objective))


def apart(a, b):
    return max(((x - y).abs().max() / x.abs().max().clamp(min=1e-3)).item() for x, y in zip(a, b))


def one_by_one(f):
    """f(name, logp, ..., mask) or f(x, mask), computed for each group alone."""
    def per_group(*args):
        groups = range(len(args[-1]))
        return torch.cat([f(*(x[b:b + 1] if isinstance(x, torch.Tensor) else x for x in args)) for b in groups])
    return per_group


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_of_every_objective(name, monkeypatch):
    """What is normalised over the whole batch is known before the first backward pass: one group at a time gives the same gradient."""
    whole, log = objective_gradients(name, 10_000)
    parts, log_parts = objective_gradients(name, 1)
    assert apart(whole, parts) < 1e-4
    assert all(log[k] == pytest.approx(log_parts[k], rel=1e-3, abs=1e-5) for k in log) and log.keys() == log_parts.keys()
    assert ("weight" in log) == ("correction" in OBJECTIVES[name])
    if name == "sparse_rl":
        assert 0 < log["rejected"] < 1 and 0 < log["weight"] < 1
    control = dict(sparse_rl="correction_weights", ppo="whiten", ppo_dense="whiten").get(name)
    if control:  # each group normalised on its own is another gradient
        monkeypatch.setattr(train, control, one_by_one(getattr(train, control)))
        assert apart(whole, objective_gradients(name, 1)[0]) > 1e-2
    else:  # dpo: a micro-batch that takes its own pairs for all of them
        loss = train.objective_loss
        monkeypatch.setattr(train, "objective_loss", lambda out, r, x, old, c, whole: loss(out, r, x, old, c, r))
        assert apart(whole, objective_gradients(name, 1)[0]) > 1e-2


def test_ppo_values_and_returns():
    """The reward is that of the last token, so undiscounted every prefix is worth it; the values trained are the learner's policy's."""
    net, value = toy(), torch.nn.Linear(64, 1)
    r = generate(net, prompts(61, 40), 4, 12, stop_ids=STOP, seed=1, **SMALL)
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    c, _ = learner(net, objective="ppo")
    x, log = train.before_updates(net, r, [[0], [1]], rewards, c, value)
    torch.testing.assert_close(x["returns"], rewards[..., None] * r.mask)
    c.gamma = 0.5
    half = train.before_updates(net, r, [[0, 1]], rewards, c, value)[0]["returns"]
    b, g = torch.arange(2)[:, None], torch.arange(4)
    torch.testing.assert_close(half[b, g, r.lengths - 1], rewards)
    torch.testing.assert_close(half[..., 0], rewards * 0.5 ** (r.lengths - 1))
    c.gamma = 1.0
    error = lambda values: ((values - x["returns"]) ** 2 * x["scale"] / 2).sum().item()
    dense = torch.no_grad()(replay)(net, r, ("dense",), value=value)["value"]
    got = train.learn(net, train.Masters(net, c, value), r, rewards, c, 0.0, value)["value_loss"]
    assert got == pytest.approx(error(x["values"]), rel=1e-4) and got != pytest.approx(error(dense), rel=1e-2)


def test_dpo_without_a_pair():
    """Rewards that are all equal leave the weights alone; one that is not does not."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, seed=1, **SMALL)
    c, opt = learner(net, objective="dpo")
    before, rewards = [p.detach().clone() for p in net.parameters()], torch.ones(2, 4)
    log = train.learn(net, opt, r, rewards, c, 1e-3, toy(seed=5))
    assert log["pairs"] == 0 and all(torch.equal(a, b) for a, b in zip(before, net.parameters())) and train.show(
        dict(log, step=0, reward=1.0, truncated=0.0, equal=1.0, rollout_s=0.0, learn_s=0.0))
    rewards[1, 2] = 0.0
    log = train.learn(net, opt, r, rewards, c, 1e-3, toy(seed=5))
    assert log["pairs"] == 1 and not all(torch.equal(a, b) for a, b in zip(before, net.parameters()))


def test_objectives_take_several_updates():
    """Later updates see a ratio, a value or a margin that has moved."""
    for name in ("ppo", "dpo"):
        net = toy()
        r = generate(net, prompts(61, 40), 4, 12, seed=1, **SMALL)
        aux = dict(ppo=torch.nn.Linear(64, 1), dpo=toy())[name]
        c, _ = learner(net, objective=name, updates=3)
        opt = train.Masters(net, c, aux if name == "ppo" else None)
        log = train.learn(net, opt, r, torch.rand(2, 4, generator=torch.Generator().manual_seed(0)), c, 1e-2, aux)
        assert log["gap_max"] <= 1e-4 and log["clip_frac" if name == "ppo" else "pairs"] > 0
        if name == "dpo":
            assert abs(log["margin"]) < 1e-3  # of the first update: model and reference are the same weights


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_objective_resumes_bitwise(name, tmp_path, monkeypatch):
    """4 steps equal 2 steps, a new start, and 2 more. The controls resume without the value head, or with the trained reference."""
    common = [os.path.join(ROOT, "config", f"{name}.py"), *FAST]
    whole, halves, wrong = (str(tmp_path / x) for x in ("whole", "halves", "wrong"))
    load = lambda out: torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(load(a)["masters"], load(b)["masters"]))
    train.main([*common, f"--out_dir={whole}"])
    train.main([*common, "--steps=2", f"--out_dir={halves}"])
    shutil.copytree(halves, wrong)
    train.main([*common, "--resume=True", f"--out_dir={halves}"])
    assert same(whole, halves) and load(whole)["step"] == 4
    if name == "ppo":
        state = load(wrong)
        assert [x.shape for x in state["masters"][-2:]] == [(1, 128), (1,)] and state["masters"][-1].abs() > 0
        state["masters"][-2:] = [torch.zeros_like(x) for x in state["masters"][-2:]]
        torch.save(state, os.path.join(wrong, "ckpt.pt"))
        with safe_open(os.path.join(whole, "model", "model.safetensors"), "pt") as f:
            assert all(f.get_tensor(k).shape != (1, 128) for k in f.keys())  # the head stays out of the model
    else:
        learn = train.learn
        monkeypatch.setattr(train, "learn", lambda net, *args: learn(net, *args[:-1], net))
    train.main([*common, "--resume=True", f"--out_dir={wrong}"])
    assert not same(whole, wrong)


def test_ppo_needs_no_group(tmp_path):
    out = str(tmp_path / "out")
    train.main([*FAST, "--objective=ppo", "--group=1", "--steps=1", f"--out_dir={out}"])
    log = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
    assert log[1]["grad_norm"] > 0 and log[1]["equal"] == 1 and log[1]["gap_max"] <= 1e-4


def test_several_updates_per_rollout():
    """The second update's ratio is to the learner's own log-probs before the first: it moves away from 1 and can be clipped."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, seed=1, **SMALL)
    adv = advantages(torch.rand(2, 4, generator=torch.Generator().manual_seed(0)))
    c, opt = learner(net, updates=3, lr=1e-2)
    log = train.learn(net, opt, r, adv, c, 1e-2)
    assert log["gap_max"] <= 1e-4 and log["clip_frac"] > 0  # the gap is taken before the first update, the clipping at the last


def test_bf16_weights_and_fp32_masters():
    """An update far below bf16's spacing is kept by the masters and reaches the bf16 weights once it adds up; bf16 alone loses it."""
    net = toy().to(torch.bfloat16)
    c, opt = learner(net, lr=1e-6)
    before = [m.detach().clone() for m in opt.masters]
    for step in range(3):
        sum(p.sum() for p in net.parameters()).backward()  # every gradient is 1
        assert all(p.grad is None for p in net.parameters())  # the masters have taken it
        opt.step(1e-6, 1.0)
    moved = torch.cat([(m - b).flatten() for m, b in zip(opt.masters, before)])
    assert (moved + 3e-6).abs().max() < 1e-6
    assert all(torch.equal(p, m.to(torch.bfloat16)) for p, m in zip(net.parameters(), opt.masters))
    plain = torch.tensor([0.1], dtype=torch.bfloat16)
    assert torch.equal(plain - 1e-6 - 1e-6 - 1e-6, plain)  # the control
    # gradients of micro-batches add up in fp32: 256 + 1 is not representable in bf16
    for value in (256.0, 1.0):
        sum(p.sum() for p in net.parameters()).mul(value).backward()
    assert all((m.grad == 257).all() for m in opt.masters)
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + torch.tensor(1.0, dtype=torch.bfloat16)).item() == 256
