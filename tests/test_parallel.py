"""support/parallel.py: several ranks do what one does, and end as one."""
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import conftest
import train
from conftest import (
    FAST,
    ROOT,
    STOP,
    Forked,
    Ranks,
    alive,
    at_call,
    learner,
    prompts,
    read_checkpoint,
    read_log,
    rel,
    toy,
    train_here,
)
from data.rewards import RewardError
from kvcache import Eviction
from rollout import generate, join
from run.learn import Metrics, asked
from run.rewards import join_parts, rewarded
from run.settings import eviction_of
from run.start import check_ranks
from support import parallel
from support.run import choose_device

SIZES = (40, 61, 33, 40, 52)  # tokens of the prompts, no number of ranks divides how many
ENDS = (*STOP, 20, 31, 44)
SHAPE = dict(prompts=5, group=3, max_new_tokens=12, budget=24, window=8, response_budget=10,
             period=3, warmup=0, distill=0.2)
CASES = dict(
    sequence=dict(),
    token=dict(norm="token", micro_rows=150, updates=2),
    weights=dict(learner="dense", correction="sparse_rl", norm="token", updates=2),
    ppo=dict(objective="ppo", updates=2, lam=0.95),
    dpo=dict(objective="dpo", updates=2),
    one_pair=dict(objective="dpo"),
    no_pair=dict(objective="dpo"),
    lora=dict(lora_rank=4, updates=2, ref_kl=0.1, evict="random", norm="constant"))
CONTROLS = ("sequence", "token", "weights")


# what a rank samples

@pytest.mark.parametrize("evict", ("snapkv", "random"))
@pytest.mark.parametrize("spread", ("uniform", "adaptive"))
def test_parts_of_a_rollout(model, evict, spread):
    """Prompts get the samples that they get among all, whoever samples them."""
    e = Eviction(evict, budget=24, window=8, sinks=2, response_budget=10, period=3, spread=spread)
    ids = prompts(*SIZES)
    settings = dict(group=3, max_new_tokens=12, eviction=e, stop_ids=STOP, seed=5)
    whole = generate(model, ids, **settings)
    parts = [generate(model, ids[a:b], **settings, part=(a, 5))
             for a, b in ((0, 1), (1, 4), (4, 5))]
    r = join(parts)
    assert r.prompts == ids and r.sizes == list(SIZES) and r.temperature == 1.0
    for name in ("tokens", "lengths", "stopped"):
        assert torch.equal(getattr(r, name), getattr(whole, name)), name
    assert (r.logp_roll - whole.logp_roll).abs().max() < 1e-4
    for b, layer, head in product(range(5), range(3), range(2)):
        assert torch.equal(r.kept[b][layer][head], whole.kept[b][layer][head])
    n = whole.lengths[..., None]                                # what dies later was never there
    assert torch.equal(r.until.minimum(n), whole.until.minimum(n))
    assert r.kv["dense"] == whole.kv["dense"] and 0 < r.kv["kept"] <= whole.kv["kept"]
    # controls: numbered from 0 it is other noise, in another order another rollout
    alone = generate(model, ids[1:4], **settings)
    assert not torch.equal(alone.tokens, whole.tokens[1:4])
    assert not torch.equal(join(parts[::-1]).tokens, whole.tokens)


def test_shares(monkeypatch):
    """Of any number of things every rank has a range, and all are somebody's once."""
    assert parallel.share(7) == range(7) and parallel.gather(7) == [7]  # one rank
    for n, size in product(range(9), (1, 2, 3, 8)):
        monkeypatch.setattr(parallel, "size", lambda: size)
        found = []
        for r in range(size):
            monkeypatch.setattr(parallel, "rank", lambda: r)
            assert n // size <= len(parallel.share(n)) <= -(-n // size)
            found += parallel.share(n)
        assert found == list(range(n))


def test_numbers_of_the_log():
    """Of one element, whatever their shapes; more are refused before they are added up."""
    metrics = Metrics(loss=0.5)
    for x in (1, 2.0, torch.tensor(3), torch.tensor([4.0]), torch.ones(1, 1, requires_grad=True)):
        metrics.add(loss=x)
    assert asked(metrics.numbers()) == {"loss": 11.5}
    with pytest.raises(ValueError, match=r"loss must be one number, got \(2,\)"):
        metrics.add(loss=torch.ones(2))


def test_metrics_together():
    """As if one had been told everything; a rank without work adds nothing."""
    a, b, c, all_ = Metrics(kl=0.0), Metrics(kl=0.0), Metrics(kl=0.0), Metrics(kl=0.0)
    mask = torch.tensor([True, False, True])
    for metrics, x in ((a, 1.0), (a, 2.0), (c, 4.0)):
        for one in (metrics, all_):
            one.add(kl=x, loss=-x)
            one.collect(mask, gap=torch.arange(3) * x)
    got = Metrics.together([a, b, c])
    assert got.sums == all_.sums == dict(kl=7.0, loss=-7.0)
    assert got.tokens("gap").tolist() == all_.tokens("gap").tolist() == [0, 2, 0, 4, 0, 8]
    assert Metrics.together([a, b]).sums != all_.sums


# what ranks learn

def score(row, text, tokens):
    return dict(reward=sum(tokens) % 3 * row["weight"], tokens=len(tokens))


def learn(name, dtype, steps=1, alone=False):
    """Some steps of a toy model. alone: each rank with its own prompts, as if there were no others,
    but for the sum of the gradients. -> of the last step: rollout, rewards, named numbers, log;
    gradients of every update before they are clipped; weights"""
    net, ids = toy(dtype=dtype), prompts(*SIZES)
    c, objective, opt = learner(net, toy(dtype=dtype), **{**SHAPE, **CASES[name]})
    weights = dict(one_pair=(0, 0, 0, 1, 0), no_pair=[0] * 5).get(name, [1] * 5)
    tok = SimpleNamespace(decode=lambda ids, special: "text")
    problems = [SimpleNamespace(rule=score, row=dict(weight=w), text="?", where="")
                for w in weights]
    gradients, clip, as_it_is = [], torch.nn.utils.clip_grad_norm_, dict(vars(parallel))

    def seen(masters, limit):
        gradients.append([m.grad.clone() for m in masters])
        return clip(masters, limit)

    torch.nn.utils.clip_grad_norm_ = seen
    for step in range(steps):
        mine = parallel.share(5)
        rollout = generate(
            net, ids[mine.start:mine.stop], 3, 12, eviction=eviction_of(c), seed=step,
            stop_ids=ENDS, part=(mine.start, 5))
        if alone:
            parallel.gather, parallel.share = lambda x: [x], range
        rollout, parts = rewarded(tok, rollout, problems[mine.start:mine.stop], first=mine.start)
        rewards = rollout.rewards
        log = conftest.learn(net, opt, objective, rollout, rewards=rewards.to(dtype), c=c, lr=1e-3)
        vars(parallel).update(as_it_is)
    torch.nn.utils.clip_grad_norm_ = clip
    parallel.check_equal(opt.whole(), "the weights")
    return dict(rollout=rollout, rewards=rewards, parts=parts, log=log, gradients=gradients,
                weights=list(opt.whole()))


def learn_all(folder):
    found = {name: learn(name, torch.double) for name in CASES}
    found["fp32"] = learn("sequence", torch.float32, steps=3)
    for name in CONTROLS:
        found[f"control of {name}"] = learn(name, torch.double, alone=True)
    torch.save(found, os.path.join(folder, f"rank-{parallel.rank()}.pt"))


def furthest(got, want, times=1.0):
    """Largest difference of two lists of tensors, relative to the largest value of each."""
    return max(rel(times * x, y) for x, y in zip(got, want, strict=True) if y.any())


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """What one process found, and what each of three ranks did."""
    folder = tmp_path_factory.mktemp("ranks")
    started = Ranks(3, folder, learn_all, [str(folder)])
    alone = tmp_path_factory.mktemp("one")
    learn_all(alone)  # without torch.distributed
    codes, printed = started.wait()
    assert codes == [0] * 3, printed
    return [torch.load(path, weights_only=False) for path in (
        alone / "rank-0.pt", *(folder / f"rank-{r}.pt" for r in range(3)))]


@pytest.mark.parametrize("name", CASES)
def test_ranks_learn_what_one_learns(learned, name):
    """In fp64, with prompts that no number of ranks divides: samples, gradients, weights, log."""
    want, *found = [one[name] for one in learned]
    r = want["rollout"]
    assert r.stopped.any() and not r.stopped.all() and len(set(r.lengths.flatten().tolist())) > 3
    for got in found:
        assert torch.equal(got["rollout"].tokens, r.tokens)
        assert torch.equal(got["rewards"], want["rewards"]) and got["parts"] == want["parts"]
        for mine, whole in zip(got["gradients"], want["gradients"], strict=True):
            assert furthest(mine, whole) < 1e-10
        assert furthest(got["weights"], want["weights"]) < 1e-8
        assert list(got["log"]) == list(want["log"])
        assert got["log"] == pytest.approx(want["log"], rel=1e-6, abs=1e-6)
    assert len(want["gradients"]) == CASES[name].get("updates", name != "no_pair")
    pairs = dict(dpo=4, one_pair=1, no_pair=0)
    assert want["log"].get("pairs") == pairs.get(name)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_each_rank_divides_by_counts(learned, name):
    """The control: gradients of ranks that know their own prompts alone add up to something else,
    also as a mean over ranks."""
    want = learned[0][name]["gradients"][0]
    got = learned[1][f"control of {name}"]["gradients"][0]
    assert furthest(got, want) > 1e-2 and furthest(got, want, 1 / 3) > 1e-2


def test_weights_in_fp32(learned):
    """After three steps; all ranks hold the same bits."""
    start = [p.detach() for p in toy().parameters()]
    want, first, *others = [found["fp32"]["weights"] for found in learned]
    assert max((a - b).abs().max() for a, b in zip(first, want)) < 1e-5
    assert all(all(map(torch.equal, weights, first)) for weights in others)
    assert max((a - b).abs().max() for a, b in zip(start, want)) > 1e-3  # control


# what ranks say to each other

def check_names(r):
    """Of the numbers that a reward returns, on each rank."""
    with pytest.raises(ValueError, match="names right on one rank, wrong on another"):
        join_parts(parallel.gather({"wrong right".split()[r]: [1]}))
    with pytest.raises(ValueError, match="names .* on one rank, .*: they must be the same"):
        join_parts(parallel.gather({"right": [1]} if r else {}))  # of one rank alone
    assert join_parts(parallel.gather({"right": [1]} if r else None)) == {"right": [1]}


def check_skipping(r):
    """What overflows float16 on rank 1 alone is skipped by both."""
    net = toy(dtype=torch.float16)
    _, _, opt = learner(net)
    for gradient, skipped in ((1.0 if r else 0.25, 1), (0.25, 0)):
        opt.backward(sum(p.float().sum() for p in net.parameters()) * gradient)
        assert (opt.step(1e-2, 1.0) == 0) == skipped
        assert opt.scaling == dict(loss_scale=2**15, skipped=skipped)
    parallel.check_equal(opt.whole(), "the weights")


def talk():
    r = parallel.rank()
    assert parallel.size() == 2 and parallel.launched()
    kinds = [torch.tensor(r == 0), torch.zeros(0, 3), torch.arange(6).view(2, 3).t() + r,
             torch.tensor([1.5, r], dtype=torch.bfloat16)[1:], torch.tensor([[True, False]] * 3)]
    mine = [kinds] * (1 + r), "ab"[r]  # of other lengths on each rank
    found = parallel.gather(mine)
    assert found[r] is mine and found[1 - r][0][0] is not kinds
    for n, (several, name) in enumerate(found):
        assert name == "ab"[n] and len(several) == 1 + n
        assert all(f is several[0] for f in several)
        truth, empty, matrix, one, flags = several[0]
        assert truth.shape == () and truth.item() == (n == 0) and empty.shape == (0, 3)
        assert matrix.tolist() == [[n, 3 + n], [1 + n, 4 + n], [2 + n, 5 + n]]
        assert one.dtype == torch.bfloat16 and one.item() == n and torch.equal(flags, kinds[4])
    column = torch.arange(6.).view(3, 2)[:, 0].requires_grad_()
    assert [x.tolist() for x in parallel.gather(column)] == [[0, 2, 4]] * 2
    assert not parallel.gather(column)[1 - r].requires_grad
    with pytest.raises(RuntimeError):  # its own and no ConnectionError: no rank has gone
        parallel.gather(torch.ones(2).to_sparse())
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    a.grad = torch.arange(3.0) + r
    if r == 0:
        b.grad = torch.ones(3)
    parallel.sum_gradients([a, b])
    assert a.grad.tolist() == [1, 3, 5] and b.grad.tolist() == [1, 1, 1]
    turned = torch.nn.Parameter(torch.zeros(3, 2).t())
    turned.grad = torch.tensor([[1., 2], [3, 4], [5, r]]).t()
    assert not turned.grad.is_contiguous()
    parallel.sum_gradients(x for x in (turned, b))
    assert turned.grad.tolist() == [[2, 6, 10], [4, 8, 1]] and b.grad.tolist() == [2, 2, 2]
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    assert [[len(x) for x in xs] for xs in parallel.bundles([a, b, half, a], limit=5)] == [
        [3], [3], [2], [3]]
    assert [len(xs) for xs in parallel.bundles([a, b, half, a], limit=6)] == [2, 1, 1]
    parallel.sum_gradients([half, a, b])
    assert half.grad.tolist() == [2, 2] and a.grad.tolist() == [2, 6, 10]

    parallel.check_equal([a, b], "the weights")
    with torch.no_grad():
        b[r] = r * 1e-45  # one bit of rank 1
    with pytest.raises(ValueError, match="the weights of rank 1 are not those of rank 0"):
        parallel.check_equal([a, b], "the weights")
    check_names(r)
    check_skipping(r)

    assert parallel.attempt(RewardError, lambda: r) == r
    print(f"{r} is here", flush=True)

    def work():
        if r == 1:
            raise RewardError("of rank 1")

    parallel.attempt(RewardError, work)
    print("never", flush=True)


def test_ranks_talk(tmp_path):
    """Where rank 1 has an error that all may know of, rank 0 raises it and rank 1 waits."""
    codes, printed = Ranks(2, tmp_path, talk).wait()
    assert codes == [1, 1], printed
    assert printed[0].startswith("0 is here\nTraceback") and printed[1] == "1 is here\n"
    assert printed[0].endswith("RewardError: of rank 1\n")


def test_the_end_waits_for_the_watch(monkeypatch):
    """It may be asking the store, and a thread in there may abort the interpreter's end."""
    asking, ended = threading.Event(), threading.Event()

    class Store:
        def check(self, keys):
            asking.set()
            time.sleep(0.3)
            return False

    thread = threading.Thread(target=parallel.watch, args=(Store(),), daemon=True)
    for name, value in (("ENDED", ended), ("WATCH", thread)):
        monkeypatch.setattr(parallel, name, value)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    thread.start()
    assert asking.wait(10)
    parallel.leave()
    assert not thread.is_alive()


def test_what_several_ranks_cannot_do(monkeypatch):
    c = train.settings([*FAST, "--prompts=3"])
    check_ranks(c)
    monkeypatch.setattr(parallel, "size", lambda: 2)
    check_ranks(c)
    c.dry_run = True
    with pytest.raises(ValueError, match="dry_run=True measures one process: .* --prompts=2, the"):
        check_ranks(c)
    monkeypatch.setattr(parallel, "size", lambda: 4)
    with pytest.raises(ValueError, match="prompts=3 is too few for 4 ranks: raise"):
        check_ranks(c)


def test_cards_of_ranks(monkeypatch):
    """A rank takes the card of its number on its machine."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    several = "more ranks than the 2 cards here: use --nproc_per_node=2"
    for cards, number, shared, device, want in (
            (2, None, None, "auto", "cuda"), (2, None, None, "cuda:1", "cuda:1"),
            (2, None, None, "cpu", "cpu"), (2, 1, None, "auto", "cuda:1"),
            (2, 1, None, "cuda", "cuda:1"), (2, 1, None, "cpu", "cpu"),
            (2, 1, None, "cuda:1", "device=cuda:1 is one card, torchrun gives each rank"),
            (2, 2, None, "cuda", several), (2, 2, "0", "cuda", several),
            # where NCCL is told that ranks may share one
            (2, 2, "1", "cuda", "cuda:0"), (3, 5, "1", "cuda", "cuda:2"),
            (0, 5, "1", "cuda", "torch finds no CUDA")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        env = dict(LOCAL_RANK=number, NCCL_MULTI_RANK_GPU_ENABLE=shared,
                   TORCHELASTIC_RUN_ID=None if number is None else "test")
        for name, value in env.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        c = SimpleNamespace(device=device)
        try:
            choose_device(c)
            assert c.device == want
        except ValueError as e:
            assert want in str(e)
    assert taken == [0, 1, 1, 1, 0, 2]


# runs

def disturbed(what, rank, number, *args):
    """train.main, in which something happens to one rank in its call of generate of this number:
    two are an evaluation, before step 0 and step 2, others are steps."""
    def act():
        if rank == parallel.rank():
            what()
        elif what is fail:
            time.sleep(300)  # where no collective could end it

    at_call(number, act)
    train.main([*FAST, *args])


def stop():
    signal.raise_signal(signal.SIGTERM)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise AssertionError("a mistake of the program's own")


def check_log(out, whole):
    """Is it the log of the whole run up to rounding? Responses and rewards are equal."""
    exact = ("kind", "step", "reward", "equal", "truncated", "tokens", "length", "problems", "lr",
             "eval_compressed", "eval_dense", "texts")
    for got, want in zip(read_log(out), read_log(whole)):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert list(a) == list(b)
            for name in a:
                if name in exact:
                    assert a[name] == b[name], name
                elif name.startswith("gap"):
                    assert a[name] < 1e-4
                # of prompts of different lengths a rank pads its own
                elif name not in ("kv_kept", "peak_gb"):
                    assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
    with open(os.path.join(out, "samples.txt")) as a, open(os.path.join(whole, "samples.txt")) as b:
        assert a.read() == b.read()


SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
two_cards = pytest.mark.skipif(
    torch.cuda.device_count() < 2 - SHARED,
    reason="needs two GPUs, or one, a recent NCCL and NCCL_MULTI_RANK_GPU_ENABLE=1")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=two_cards)])
def device(request):
    """Where ranks talk by gloo, where by NCCL."""
    return request.param


@pytest.fixture(scope="module")
def whole(device, request, tmp_path_factory):
    """out_dir of a run that one rank did alone"""
    if device == "cpu":
        return request.getfixturevalue("finished")[0]
    out = tmp_path_factory.mktemp("cuda") / "out"
    train_here(f"--out_dir={out}", f"--device={device}")
    return out


def test_a_run_of_two_ranks_goes_on_with_one(device, whole, tmp_path):
    """A signal to one of them ends both, saved once; then one rank does a step, then two the rest,
    and log and weights are those of the run that one rank did alone."""
    args = [f"--out_dir={tmp_path / 'out'}", f"--device={device}"]
    codes, printed = Ranks(2, tmp_path, disturbed, (stop, 1, 4, *args)).wait()
    assert codes == [143, 143], printed
    assert printed[0].endswith("at step 2; go on with the same command and --resume=True\n")
    assert "2 ranks share the prompts of each step" in printed[0]
    assert printed[1] == "" and read_checkpoint(tmp_path / "out")["step"] == 2
    alone = Ranks(1, tmp_path, disturbed, (stop, 0, 3, *args, "--resume=True"))
    assert alone.wait()[0] == [143] and read_checkpoint(tmp_path / "out")["step"] == 3
    resumed = Ranks(2, tmp_path, train.main, [[*FAST, *args, "--resume=True"]])
    assert resumed.wait()[0] == [0, 0]
    check_log(tmp_path / "out", whole)
    got, want = (read_checkpoint(path)["learner"]["masters"] for path in (tmp_path / "out", whole))
    assert max((a - b).abs().max() for a, b in zip(got, want)) < 1e-5
    # control: with other noise the log is another
    train_here(f"--out_dir={tmp_path / 'other'}", f"--device={device}", "--seed=1")
    with pytest.raises(AssertionError):
        check_log(tmp_path / "other", whole)


def test_a_signal_in_an_evaluation(finished, tmp_path):
    """It is dropped on all ranks, also on those that had no signal, and made after a resume."""
    out = f"--out_dir={tmp_path / 'out'}"
    codes, printed = Ranks(2, tmp_path, disturbed, (stop, 1, 1, out, "--eval_batch=1")).wait()
    assert codes == [143, 143] and printed[0].endswith("and --resume=True\n"), printed
    assert "eval " not in printed[0] and read_checkpoint(tmp_path / "out")["memory"]["evals"] == []
    train_here(out, "--resume=True")
    check_log(tmp_path / "out", finished[0])


def test_a_rank_that_fails_ends_the_run(device, tmp_path):
    """It alone says why, and the others end wherever they are."""
    began = time.time()
    args = [f"--out_dir={tmp_path / 'out'}", f"--device={device}"]
    codes, printed = Ranks(2, tmp_path, disturbed, (fail, 1, 4, *args)).wait()
    assert codes == [1, 1] and time.time() - began < 30
    assert printed[1].endswith("AssertionError: a mistake of the program's own\n")
    assert printed[1].startswith("Traceback")
    assert printed[0].splitlines()[-1].startswith("step    0 |")
    assert read_checkpoint(tmp_path / "out")["step"] == 0


def test_a_rank_that_is_killed_loses_nothing_saved(device, whole, tmp_path):
    args = [f"--out_dir={tmp_path / 'out'}", f"--device={device}"]
    codes, printed = Ranks(2, tmp_path, disturbed, (kill, 1, 8, *args)).wait()
    assert codes == [1, -signal.SIGKILL]
    last = printed[0].splitlines()[-1]
    assert last.startswith("error: another rank has ended without an error, killed perhaps (")
    assert last.endswith("ckpt.pt holds step 2") and printed[1] == ""
    train_here(*args, "--resume=True")
    check_log(tmp_path / "out", whole)


def killed_between(what):
    """Rank 1 dies before a collective in which the other then waits."""
    if parallel.rank() == 1:
        setattr(parallel if what == "gather_tensors" else torch.distributed, what,
                lambda *args: kill())
    p = torch.nn.Parameter(torch.zeros(3))
    parallel.gather(p) if what == "gather_tensors" else parallel.sum_gradients([p])


@pytest.mark.parametrize("what", ("gather_tensors", "all_reduce"))
def test_a_rank_that_is_killed_while_another_waits(what, tmp_path):
    codes, printed = Ranks(2, tmp_path, killed_between, (what,)).wait()
    assert codes == [1, -signal.SIGKILL], printed
    assert "ConnectionError: another rank has ended without an error, killed perhaps" in printed[0]


THREADS = """
import os
import sys

sys.path.insert(0, sys.argv[1])
import train
from support import parallel

with parallel.ranks():
    train.main(sys.argv[2:])
if os.environ["RANK"] == "1":
    tasks = os.listdir("/proc/self/task")
    print(sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for threads")
def test_a_run_that_ends_well(tmp_path):
    """It ends with 0, and no thread of a process group is left, as that may abort the end."""
    (tmp_path / "threads.py").write_text(THREADS)
    p = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "threads.py", ROOT, *FAST, "--steps=1", "--out_dir=out"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert p.returncode == 0, p.stderr
    names = p.stdout.splitlines()[-1]
    assert "held-out reward with the compressed cache" in p.stdout.splitlines()[-2]
    assert "python" in names and "gloo" not in names, names


def launch(folder, target, *args):
    """As torchrun does, whose ranks here begin as forks of this process."""
    multiprocessing.current_process()._config["daemon"] = False  # so that it may have children
    os.chdir(folder)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", max_restarts=0,
        rdzv_endpoint="localhost:0", run_id="test", start_method="fork")
    elastic_launch(config, target)(*args)


def wait_as_ranks():
    with parallel.ranks():
        print("in", flush=True)
        time.sleep(1000)


def children(pid):
    """Of a process, their numbers."""
    found = []
    for other in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{other}/stat") as f:
                state, parent = f.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(other))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for processes")
def test_no_rank_outlives_a_killed_launcher(tmp_path):
    said = tmp_path / "said"
    launcher = Forked(said, launch, str(tmp_path), wait_as_ranks)
    while not said.exists() or said.read_text().count("in\n") < 2:
        assert launcher.poll() is None, said.read_text()
        time.sleep(0.01)
    left, until = children(launcher.pid), time.time() + 60
    assert len(left) == 2
    launcher.kill()
    launcher.wait()
    while left and time.time() < until:
        time.sleep(0.1)
        left = [pid for pid in left if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left and said.read_text() == "in\nin\n"


def test_no_rank_waits_for_a_launcher_that_has_gone(tmp_path):
    """It was killed while they imported torch, of which none could know."""
    ranks = Ranks(2, tmp_path, talk, port=1)
    codes, printed = ranks.wait()
    assert codes == [1, 1]
    assert all(re.fullmatch(r"error: torchrun does not answer at 127.0.0.1:1 .*\n", text)
               for text in printed)


def test_an_environment_that_is_not_torchruns(monkeypatch):
    """Its run id alone, as a process may inherit it, makes no rank; half of the rest is named."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not parallel.launched()
    with parallel.ranks():
        assert parallel.size() == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert parallel.launched()  # the control
    monkeypatch.setattr(parallel, "end_with_launcher", lambda: None)
    with pytest.raises(SystemExit, match=r"^error: TORCHELASTIC_RUN_ID .*, but: .*RANK exp[^\n]*$"):
        parallel.start()


REWARD = """
import os

calls = 0


def score(row, text, tokens):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls > 4 + 2 * 4:  # 4 of the evaluation, 4 of each step
        raise KeyError("level")
    return {"reward": len(text) % 3 / 2, "size": len(text)}
"""


def run_as_ranks(*args):
    with parallel.ranks():
        train.main([*FAST, *args])


def test_a_reward_that_fails_on_one_rank(tmp_path):
    """It ends the run with that as its first error, after rank 0 has saved what was learned."""
    (tmp_path / "mine.py").write_text(REWARD)
    began, said = time.time(), tmp_path / "said"
    ask = ("--reward=mine:score", "--save_every=100", "--eval_every=100", "--out_dir=out")
    code = Forked(said, launch, str(tmp_path), run_as_ranks, *ask).wait()
    assert code == 1 and time.time() - began < 60
    text = said.read_text()
    errors = [line for line in text.splitlines() if "rror" in line]
    assert errors[0].startswith("error: the reward of training problem 5 ('Repeat each word ")
    assert errors[0].endswith("raised KeyError: 'level' (" + str(tmp_path / "mine.py") +
                              ":11); the row has prompt, answer; "
                              f"{tmp_path}/out/ckpt.pt holds step 2")
    assert text.count("\nstep ") == 2 and text.count("fp32 masters") == 1
    assert read_checkpoint(tmp_path / "out")["step"] == 2
    steps = read_log(tmp_path / "out")[1]
    assert len(steps) == 2 and all(0 <= row["reward"] <= 1 < row["reward_size"] for row in steps)


def test_the_kept_logs():
    """The default run with two ranks and with one, as docs/several-gpus.md tells it."""
    folder = os.path.join(ROOT, "results", "parallel")
    one, two = ([json.loads(line) for line in open(os.path.join(folder, f"kv4-{name}.jsonl"))]
                for name in ("one", "two"))
    steps = [(a, b) for a, b in zip(one, two, strict=True) if a["kind"] == "step"]
    assert len(steps) == 40
    for name in ("reward", "tokens", "equal"):
        assert all(a[name] == b[name] for a, b in steps)
    assert all(a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) for a, b in steps)
    assert any(a["grad_norm"] != b["grad_norm"] for a, b in steps)  # they are two runs
    assert [round(log[-1]["eval_compressed"], 3) for log in (one, two)] == [0.604, 0.605]
