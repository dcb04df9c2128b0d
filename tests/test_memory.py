"""support/memory.py and run/dry_run.py: peaks, the dry run, and runs whose memory ends."""
import os
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import rollout
import train
from conftest import (
    FAST,
    ROOT,
    contents,
    in_all_rooms,
    prompts,
    read_checkpoint,
    read_log,
    same_weights,
    toy,
    train_here,
)
from experiments import ablate
from model import Transformer
from run.dry_run import (
    CHOSEN,
    changed,
    disk,
    dry_run,
    may_not_fit,
    savings,
    tell_whole_run,
)
from run.learn import micro_batches
from run.settings import eviction_of, policies_of
from run.start import check_ranks, limit_memory, set_up
from support.adamw import Chunk
from support.jsonfile import read_json
from support.memory import Cost, compare, highest, measure, ran_out
from support.run import Run

MB = 10**6
GONE = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you"


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Looking through all objects of a process with so many libraries is most of a dry run."""
    monkeypatch.setattr("gc.collect", lambda: 0)


# memory of a piece of a program

def test_a_peak_is_measured_though_it_is_gone():
    """200 MB that live within the call alone; the control allocates nothing."""
    some, none = (measure(lambda n=n: torch.ones(n * MB // 4).sum(), "cpu") for n in (200, 1))
    assert 150 * MB < some.peak - none.peak < 250 * MB and some.fits
    assert measure(lambda: torch.ones(50 * MB // 4), "cpu").peak < some.peak - 100 * MB


def test_a_system_that_does_not_say(monkeypatch, capsys):
    """The dry run then tells seconds, and that peaks are not known; no trials."""
    def closed(path, *args):
        raise PermissionError(path)
    monkeypatch.setattr("builtins.open", closed)
    cost = measure(lambda: None, "cpu")
    assert cost.peak is None and cost.fits
    compare(dict(all=lambda c: None), {}, "cpu", trials=None, first={})
    assert "not known" in capsys.readouterr().out


def hidden(error):
    """As the end of a CUDA graph hides the reason."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as e:
        return e


@pytest.mark.parametrize("error, yes", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError(GONE), True), (MemoryError(), True),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True),
    (hidden(torch.OutOfMemoryError("CUDA out of memory")), True),
    (hidden(ValueError("shapes differ")), False), (ValueError("out of memory"), False)])
def test_which_errors_say_that_memory_ran_out(error, yes):
    assert ran_out(error) == yes

    def fail():
        raise error
    if yes:
        assert not measure(fail, "cpu").fits
    else:
        with pytest.raises(type(error)):
            measure(fail, "cpu")


def test_the_highest_phase_is_that_which_did_not_fit():
    costs = dict(a=Cost(5, 1), b=Cost(9, 1), c=Cost(3, 1))
    assert highest(costs) == "b"
    assert highest(dict(costs, d=Cost(1, 1, fits=False))) == "d"


# the dry run

def rows(printed):
    """{name: what stands behind it} of the dry run's lines."""
    return {line[:24].strip(): line[24:].split() for line in printed.splitlines()
            if re.match(r"(sampling|learning|evaluation|all|--)", line)}


def test_dry_run_prints_peaks_and_writes_nothing(tmp_path, capsys, monkeypatch):
    """Each prompt is as long as may be, each response too; weights stay, bit by bit. The control
    learns at another rate."""
    lengths, weights, update = [], [], train.update

    def watched(model, ids, *args, **kwargs):
        r = generate(model, ids, *args, **kwargs)
        lengths.append({(len(p), n) for p, ns in zip(ids, r.lengths.tolist()) for n in ns})
        return r

    def around(job, *args):
        weights[:] = [[p.clone() for p in job.net.parameters()]]
        dry_run(job, *args)
        weights.append(list(job.net.parameters()))

    generate = in_all_rooms("generate", watched, monkeypatch.setattr)
    monkeypatch.setattr(train, "measure", around)
    train_here("--dry_run=True", f"--out_dir={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    assert all(map(torch.equal, *weights))
    assert lengths[:3] == [{(64, 4)}] * 3 and {(64, 5)} == set().union(*lengths[3:])
    found = rows(printed)
    assert list(found)[:4] == ["sampling", "learning", "evaluation", "all"]
    phases, (highest, whole) = [*found.values()][:3], map(float, found["all"])
    assert highest == max(float(peak) for peak, _ in phases)
    assert whole == pytest.approx(sum(float(seconds) for _, seconds in phases), abs=0.02)
    for name, (peak, change, seconds, *verdict) in list(found.items())[4:]:
        assert verdict == (["no", "help"] if float(change) >= 0 or change == "-0.000" else [])
        key, value = name[2:].split("=")
        assert value != str(train.DEFAULTS[key]) and float(seconds) > 0
        assert float(peak) - highest == pytest.approx(float(change), abs=2e-3)
    assert len(found) >= 5
    line, last = printed.splitlines()[-2:]
    assert re.fullmatch(r"at this size 4 steps take 0\.\d min, 3 evaluations 0\.\d min; "
                        r"checkpoints and models take up to 0\.05 GB", line)
    assert last == "nothing was written"

    def learns(*args, **kwargs):
        return update(*args, **{**kwargs, "lr": 1e-2})
    monkeypatch.setattr(train, "update", learns)
    monkeypatch.setattr("run.dry_run.savings", lambda *args: {})
    train_here("--dry_run=True", f"--out_dir={tmp_path / 'out'}")
    assert not all(map(torch.equal, *weights))


def test_dry_run_tells_of_the_whole_run(finished, capsys, monkeypatch):
    """Steps and evaluations, the precise ones of more problems, at the seconds of one of them; the
    files, as a run has left them."""
    sizes = []
    monkeypatch.setattr(train, "measure", lambda job, *_: sizes.append(disk(job.net, job.opt)))
    train_here("--dry_run=True", "--out_dir=nowhere")
    ckpt, model = (os.path.getsize(os.path.join(finished[0], name))
                   for name in ("ckpt.pt", "model/model.safetensors"))
    assert sizes[0] == pytest.approx(3 * ckpt + 2 * model, rel=0.02)
    monkeypatch.setattr("run.dry_run.disk", lambda net, opt: 12.3e9)
    c = train.settings(["--steps=40", "--eval_batch=16", "--eval_problems=32", "--eval_final=128"])
    job = SimpleNamespace(config=c, net=None, opt=None, problems=SimpleNamespace(n_eval=100))
    capsys.readouterr()
    for steps in (40, 400, 401):
        c.steps = steps
        tell_whole_run(job, dict(sampling=30.0, learning=60.0, evaluation=6.0))
    few, many, one_more = capsys.readouterr().out.splitlines()
    # 7 batches of the precise evaluations, 2 of the others
    assert few == ("at this size 40 steps take 60.0 min, 3 evaluations 2.1 min; checkpoints "
                   "and models take up to 12.30 GB")
    assert many.startswith("at this size 400 steps take 10.0 h, 21 evaluations 5.7 min; ")
    assert one_more.startswith("at this size 401 steps take 10.0 h, 22 evaluations 5.9 min; ")


def test_dry_run_leaves_a_run_alone(finished, monkeypatch):
    """Whatever else is asked of its out_dir; it is still checked like any request."""
    monkeypatch.setattr("run.dry_run.savings", lambda *args: {})
    before = contents(Path(finished[0]))
    train_here("--dry_run=True", "--overwrite=True", "--objective=dpo", f"--out_dir={finished[0]}")
    with pytest.raises(SystemExit, match="at most|exceed"):
        train_here("--dry_run=True", "--prompt_tokens=9999999", f"--out_dir={finished[0]}")
    assert contents(Path(finished[0])) == before


def test_a_trial_that_does_not_fit(capsys, monkeypatch):
    """It says so and the next goes on; where the step itself does not fit, what makes it fit shows
    its peak."""
    update = train.update

    def hungry(net, opt, *args, config, **kwargs):
        if config.prompts > 1 and config.checkpointing == bad:
            torch.empty(2**50)
        return update(net, opt, *args, config=config, **kwargs)

    monkeypatch.setattr(train, "update", hungry)
    monkeypatch.setattr("support.memory.highest", lambda costs: max(
        costs, key=lambda name: (not costs[name].fits, name == "learning")))
    bad = True
    train_here("--dry_run=True", "--out_dir=nowhere")
    found = rows(capsys.readouterr().out)
    assert found["--checkpointing=True"][:3] == ["out", "of", "memory"]
    assert all(found[name][1][0] in "+-" for name in ("--group=2", "--micro_rows=128"))
    bad = False
    train_here("--dry_run=True", "--out_dir=nowhere")
    found = rows(capsys.readouterr().out)
    assert found["learning"][:3] == ["out", "of", "memory"] and "evaluation" not in found
    assert len(found["--checkpointing=True"]) == 2  # no difference to what is unknown
    assert found["--group=2"][:3] == ["out", "of", "memory"]


@pytest.mark.parametrize("ask", [
    (), ("--distill=0",), ("--objective=dpo",), ("--prompts=5", "--micro_rows=1024"),
    ("--teacher=initial",), ("--micro_rows=100",), ("--prompts=1",)])
def test_the_micro_rows_that_are_offered_make_more_micro_batches(ask):
    """Or none are offered, where each holds one prompt already."""
    c = train.settings(["--micro_rows=2048", *ask])
    r = rollout.generate(toy(), prompts(*[c.prompt_tokens] * c.prompts), c.group, c.max_new_tokens,
                         eviction=eviction_of(c))
    if c.objective == "dpo":
        r = r.select(range(c.prompts), torch.tensor([[0, 1]] * c.prompts))
    copies = len(policies_of(c))
    now = micro_batches(r, copies, c.micro_rows)
    first = now[0].stop
    offered = savings(train.settings, c, "learning").get("micro_rows")
    if first == 1:
        assert offered is None
    else:
        assert micro_batches(r, copies, offered)[0].stop < first


def test_what_is_offered_is_allowed_and_other():
    """Of the smallest and of odd settings too."""
    least = ("--prompts=1", "--group=2", "--eval_batch=1", "--budget=23", "--max_new_tokens=1")
    for ask in ((), least, ("--evict=none",), ("--objective=dpo",), (*least, "--checkpointing=1")):
        if "--checkpointing=1" in ask:
            ask = (*least, "--checkpointing=True", "--logit_mb=64")
        c = train.settings([*ask])
        for phase in ("sampling", "learning", "evaluation"):
            for key, value in savings(train.settings, c, phase).items():
                other = changed(train.settings, c, key, value)
                assert getattr(other, key) == value != getattr(c, key)
                assert {**vars(other), key: getattr(c, key)} == vars(c)
    assert savings(train.settings, c, "learning") == savings(train.settings, c, "sampling") == {}
    dense = train.settings(["--evict=none"])
    assert savings(train.settings, dense, "sampling")["evict"] == "snapkv"


def test_no_arm_is_a_dry_run():
    arms = ["config/smd.py", "config/naive.py"]
    ablate.request(arms, [], range(1))
    with pytest.raises(ValueError, match="dry_run=True trains nothing"):
        ablate.request(arms, ["--dry_run=True"], range(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card(tmp_path, capsys):
    """Peaks are counted to the byte but for rounding; a run on a card that is too small says so in
    one line, wherever memory runs out."""
    some = measure(lambda: torch.ones(50 * MB, device="cuda").sum(), "cuda")
    none = measure(lambda: torch.ones(1, device="cuda").sum(), "cuda")
    assert 199 * MB < some.peak - none.peak < 210 * MB
    ask = ["--device=cuda", "--prompts=64", "--save_every=99", "--eval_every=99",
           f"--out_dir={tmp_path / 'out'}"]
    train_here(*ask, "--dry_run=True")
    assert len(rows(capsys.readouterr().out)) >= 5
    ends = set()
    whole = torch.cuda.get_device_properties(0).total_memory
    for mb in (60, 90, 120, 160, 200):
        torch.cuda.set_per_process_memory_fraction(mb * MB / whole)
        try:
            train_here(*ask, "--overwrite=True")
        except SystemExit as e:
            ends.add(str(e))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    print("\n".join(ends))
    assert ends and all(re.match("error: out of memory ", end) for end in ends)


# a choice before a run

def machine(monkeypatch, **gb):
    """Let each phase take so many GB: numbers, or functions of the settings; more than `card` is
    out of memory. -> list that gets what is measured"""
    seen = []

    def fake(work, device):
        config, name = work.args[0], work.func.__name__
        work()
        took = gb.get(name, 1)
        took = 1e9 * (took(config) if callable(took) else took)
        seen.append((name, *(getattr(config, key) for key in CHOSEN)))
        return Cost(took, 1.0, fits=took <= 1e9 * gb.get("card", 99))

    monkeypatch.setattr("run.dry_run.measure", fake)
    return seen


def learner_gb(c):
    """As activations, rows and logits would have it."""
    return 1 + (1 if c.checkpointing else 4) * min(c.micro_rows, 512) / 128 + c.logit_mb / 64


def test_what_fits_is_chosen_by_measuring(tmp_path, capsys, monkeypatch):
    """Checkpointing first, then fewer rows, then fewer logits, then a smaller batch of the
    evaluation; said, and written down. What was measured has changed nothing: the run is, bit for
    bit, that of the settings chosen. A resume takes them over unmeasured; the control, a resume
    with another limit, measures again."""
    out, by_hand, cut = (str(tmp_path / name) for name in ("out", "by_hand", "cut"))
    seen = machine(monkeypatch, learning=learner_gb, evaluation=lambda c: c.eval_batch / 9)
    monkeypatch.setattr("run.start.memory_of", lambda device: 80e9)
    ask = ["--updates=2", "--logit_mb=512"]
    train_here(*ask, "--memory=3.5", f"--out_dir={out}")
    assert seen == [("sampling", False, 16384, 512, 128), ("learning", False, 16384, 512, 128),
                    ("learning", True, 16384, 512, 128), ("learning", True, 128, 512, 128),
                    ("learning", True, 128, 64, 128), ("evaluation", True, 128, 64, 128),
                    ("evaluation", True, 128, 64, 2)]
    assert ("memory of 3.5 GB: the largest step fits with checkpointing=True micro_rows=128 "
            "logit_mb=64 eval_batch=2 (3.000 GB at its peak)\n") in capsys.readouterr().out
    chosen = dict(checkpointing=True, micro_rows=128, logit_mb=64, eval_batch=2)
    assert chosen.items() <= read_json(f"{out}/config.json").items()

    train_here(*ask, *(f"--{key}={value}" for key, value in chosen.items()),
               f"--out_dir={by_hand}")
    assert read_log(out) == read_log(by_hand) and same_weights(out, by_hand)
    train_here(*ask, "--memory=3.5", "--steps=2", f"--out_dir={cut}")
    seen.clear()
    capsys.readouterr()
    train_here(*ask, "--memory=3.5", "--resume=True", f"--out_dir={cut}")
    assert not seen and "eval_batch=2 (as before)" in capsys.readouterr().out
    assert read_log(out) == read_log(cut) and same_weights(out, cut)
    train_here(*ask, "--memory=50", "--resume=True", "--steps=5", f"--out_dir={cut}")
    assert len(seen) == 3 and "fits as it is (25.000 GB" in capsys.readouterr().out


@pytest.mark.parametrize("gb, more, say", [
    (dict(sampling=9), [],
     "sampling takes 9.000 GB, 2 GB may be held: lower budget, or lower prompts"),
    (dict(sampling=9), ["--evict=none"], "sampling takes .* held: set --evict=snapkv, or lower p"),
    (dict(learning=9), ["--moments=bfloat16", "--lora_rank=4"],
     "learning takes .* may be held: lower prompt_tokens or group"),
    (dict(learning=9), [], "learning takes 9.000 GB with checkpointing=True micro_rows=128 "
     "logit_mb=64 eval_batch=128, 2 GB .*: set --moments=bfloat16 .* set --lora_rank=16, or"),
    (dict(learning=9, card=8), ["--prompts=1"], "learning runs out of memory with checkpointing"),
    (dict(evaluation=9), [], "evaluation takes 9.000 GB with .* eval_batch=1, ")])
def test_where_nothing_fits(gb, more, say, tmp_path, monkeypatch):
    """One line with what would help, and no folder is made."""
    machine(monkeypatch, **gb)
    with pytest.raises(SystemExit, match=f"error: {say}"):
        train_here("--memory=2", *more, f"--out_dir={tmp_path / 'out'}")
    assert not os.listdir(tmp_path)


def test_nothing_is_measured_unasked(tmp_path, monkeypatch):
    """Where no limit is named, on a CPU never; on a card where the learner may be too large for it.
    Several ranks measure nothing."""
    seen = machine(monkeypatch)
    train_here(f"--out_dir={tmp_path / 'out'}")
    assert not seen
    job = set_up([*FAST, "--dry_run=True"], train.settings, train.OBJECTIVES, train.update)
    assert not may_not_fit(job, 1)
    job.config.device = "cuda"
    monkeypatch.setattr("run.dry_run.held", lambda device: 10 * MB)
    for mb in (300, 4000):  # five times the logits alone are 1400
        job.config.checkpointing = False
        assert may_not_fit(job, mb * MB) == (mb < 1400)
    net, c = job.net, job.config
    rows = c.prompts * (c.prompt_tokens + 2 * c.group * (c.max_new_tokens - 1))
    per_layer = sum(sum(p.shape) for p in net.layers[0].parameters() if p.dim() == 2)
    rest = (10 * MB + 4 * sum(p.numel() for p in net.parameters()) + 8 * net.head.numel()
            + 5.3 * 2**20 * c.logit_mb)
    kept = 4 * rows * len(net.layers) * per_layer
    for more, yes in ((1.01, False), (0.99, True)):
        assert may_not_fit(job, (rest + kept) * more / 0.75) == yes
    c.checkpointing = True
    kept = 4 * rows * (per_layer + len(net.layers) * net.config.width)
    for more, yes in ((1.01, False), (0.99, True)):
        assert may_not_fit(job, (rest + kept) * more / 0.75) == yes


def test_a_limit_is_held(monkeypatch):
    """torch is told so on a card; more than there is is refused, and several ranks are."""
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr("run.start.memory_of", lambda device: 80e9)
    for memory, device in ((0.0, "cuda"), (20.0, "cpu"), (20.0, "cuda:1")):
        limit_memory(SimpleNamespace(memory=memory, device=device))
    assert shares == [0.25]
    with pytest.raises(ValueError, match="memory=81.0: cpu has 80.0 GB"):
        limit_memory(SimpleNamespace(memory=81.0, device="cpu"))
    monkeypatch.setattr("support.parallel.size", lambda: 2)
    with pytest.raises(ValueError, match="memory=5.0 measures one process: under torchrun set"):
        check_ranks(train.settings(["--memory=5"]))


def test_a_limit_on_this_machine(tmp_path, capsys):
    """Measured for real, of the whole process: room enough, and too little for the model itself."""
    train_here("--memory=8", "--steps=1", f"--out_dir={tmp_path / 'out'}")
    assert "memory of 8 GB: the largest step fits as it is (" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"sampling takes \d\.\d* GB, 0.01 GB may be held"):
        train_here("--memory=0.01", f"--out_dir={tmp_path / 'none'}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_limit_on_a_card(tmp_path, capsys):
    """What is chosen fits: the run comes to its end below the limit that torch holds it to. The
    control, half of that, ends in one line."""
    ask = ["--device=cuda", "--prompts=64", "--save_every=99", "--eval_every=99"]
    torch.cuda.empty_cache()
    ends = []
    try:
        for mb in (1200, 600, 400, 300, 200, 150, 120):
            torch.cuda.reset_peak_memory_stats()
            out = tmp_path / str(mb)
            try:
                train_here(*ask, f"--memory={mb / 1000}", f"--out_dir={out}")
                ends.append(re.findall("largest step fits .*", capsys.readouterr().out)[0])
                assert torch.cuda.max_memory_reserved() <= mb * MB
            except SystemExit as e:
                ends.append(str(e))
                assert re.match("error: (sampling|learning|evaluation|out of memory)", ends[-1])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print("\n".join(ends))
    assert any("checkpointing=True" in end for end in ends) and ends[-1].startswith("error")


def test_what_moments_cost_is_that_of_the_log():
    log, page = (Path(ROOT, *where).read_text() for where in (
        ("results", "moments-cpu.log"), ("docs", "memory.md")))
    ends = {}
    for kind in ("float32", "bfloat16"):
        rows = [x.split()[2:] for x in log.splitlines() if x.startswith(f"{kind} ")]
        means = [fmean(map(float, x)) for x in zip(*rows[:3])]
        assert means == pytest.approx([*map(float, rows[3])], abs=1e-3)  # of rounded numbers
        ends[kind] = rows[3]
        assert re.search(f"at (held-out rewards of )?{', '.join(x[0] for x in rows[:3])} ", page)
    (_, dense, *_, loss), (_, dense_16, *_, loss_16) = ends.values()
    assert f"the means were {dense} and {dense_16}, and" in page
    assert f"20 steps was {float(loss):.4f} and {float(loss_16):.4f} (`" in page


# a run whose memory ends

def fail_at(monkeypatch, owner, name, call):
    """Asks for a petabyte at that call."""
    calls = []

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            torch.empty(2**50)
        return real(*args, **kwargs)

    if owner is train:
        real = in_all_rooms(name, fails, monkeypatch.setattr)
    else:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("owner, name, call, more, step, phase, offers", [
    (rollout, "prefill", 6, [], 3, "sampling",
     "lower: a new run with --prompts=1 (now 2) or --group=2 (now 4)"),
    (train, "replay", 5, [], 3, "learning",
     "lower: --resume=True and --micro_rows=128 (now 16384) or --checkpointing=True (now False); "
     "lower: a new run with --group=2 (now 4); "),
    (rollout, "prefill", 1, [], 0, "evaluation", "lower: --resume=True and --eval_batch=2 (now"),
    (train, "replay", 4, ["--eval_every=2"], 2, "evaluation", "--eval_batch=2 (now 128)"),
])
def test_it_says_where_and_loses_no_step(finished, tmp_path, monkeypatch, owner, name, call, more,
                                         step, phase, offers):
    """One line: phase, memory held, settings that lower it, what was kept: all steps that were
    done. A resume ends where the undisturbed run ended."""
    out = str(tmp_path / "out")
    ask = ["--save_every=99", "--eval_every=99", *more, f"--out_dir={out}"]
    with monkeypatch.context() as m:
        fail_at(m, owner, name, call)
        with pytest.raises(SystemExit) as e:
            train_here(*ask)
    line = str(e.value)
    assert re.match(rf"error: out of memory in step {step}, \d\.\d+ GB held, in {phase}; ", line)
    assert offers in line and "--dry_run=True" in line and "\n" not in line
    assert line.endswith(f"; {out}/ckpt.pt holds step {step}")
    assert read_checkpoint(out)["step"] == step
    train_here(*ask, "--resume=True", "--eval_batch=2")
    assert same_weights(out, finished[0]) and read_log(out)[1] == read_log(finished[0])[1]


@pytest.mark.parametrize("owner, name, call, more", [
    (Chunk, "step", 4, []), (train, "replay", 9, ["--updates=2"])])
def test_weights_that_an_update_has_begun_to_change_are_not_saved(
        tmp_path, monkeypatch, owner, name, call, more):
    """Inside the optimizer, or in a rollout's second update: what was saved before is kept."""
    out = str(tmp_path / "out")
    fail_at(monkeypatch, owner, name, call)
    with pytest.raises(SystemExit, match=f"in step 3, .* in learning; .*; {out}/ckpt.pt holds "
                       "step 0"):
        train_here("--save_every=99", "--eval_every=99", *more, f"--out_dir={out}")
    assert read_checkpoint(out)["step"] == 0


def test_a_disk_that_is_full_too(tmp_path, monkeypatch):
    """The line tells both."""
    fail_at(monkeypatch, train, "replay", 3)
    save = Run.save

    def full(run, state):
        if run.step:
            raise OSError("could not write ckpt.pt: no space left")
        save(run, state)
    monkeypatch.setattr(Run, "save", full)
    with pytest.raises(SystemExit, match="learning; .* could not be saved: .*no space.*holds "
                       "step 0"):
        train_here(f"--out_dir={tmp_path / 'out'}")


@pytest.mark.parametrize("owner, name, more, says", [
    (rollout, "prefill", ["--dry_run=True"], "out of memory in sampling with a single prompt"),
    (Transformer, "from_pretrained", [], "error: .*while the model was loaded")])
def test_nothing_fits(owner, name, more, says, tmp_path, monkeypatch):
    fail_at(monkeypatch, owner, name, 1)
    with pytest.raises(SystemExit, match=says):
        train_here(*more, f"--out_dir={tmp_path / 'out'}")
    assert not os.listdir(tmp_path)


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("shapes differ")
    in_all_rooms("replay", broken, monkeypatch.setattr)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train_here(f"--out_dir={tmp_path / 'out'}")
