"""
What lowers the memory of a run, a dry run that measures it, and a choice made before a run.

    python train.py --dry_run=True
    python train.py --memory=8

The idea. A step is taken at its largest, with prompts of prompt_tokens tokens and responses that
never stop, and an evaluation batch as well; then again with each setting changed that may lower the
highest peak. Where memory ends in a run, the same settings are named without being tried.

Where a limit is named, or the learner may be too large for its card, the same is done before the
first step, and settings that change no result but by rounding are lowered one after the other until
all fits (`fit`). Weights and moments stay as they are meanwhile.
"""
import functools
from dataclasses import replace
from types import SimpleNamespace

import torch

from fast.recorded import nothing_recorded
from kvcache import Eviction
from rollout import generate
from run.evaluate import evaluate
from run.learn import replay_all, size_logits
from run.settings import (
    RANGES,
    eviction_of,
    eviction_of_evaluation,
    policies_of,
    problems_at,
)
from support import parallel
from support.configurator import check_ranges
from support.memory import compare, gigabytes, held, measure, memory_of
from support.own import placed
from support.screen import one_line_errors, say, tell

PHASES = dict(generate="sampling", prepare="learning", update="learning",
              evaluate="evaluation")  # by function
REACHES = dict(checkpointing=["learning"], micro_rows=["learning", "evaluation"],
               logit_mb=["learning", "evaluation"],
               eval_batch=["evaluation"])  # settings that leave the other phases as they are
CHOSEN = ("checkpointing", "micro_rows", "logit_mb", "eval_batch")  # by `fit`
FEW_MB = 64   # of logits, where little memory is left
ROOM = 0.75   # of a card: unasked, `fit` measures only if more is expected to be held


def savings(settings, config, phase):
    """{key: value}: settings that lower the peak of a phase, first what changes no result.
    settings: function of argv, which refuses what is not allowed."""
    if phase == "sampling":
        found = dict(prompts=config.prompts // 2, group=config.group // 2)
        if config.evict == "none":
            found = dict(evict="snapkv", **found)
        else:
            found["budget"] = min(config.budget, config.prompt_tokens) // 2
    elif phase == "learning":
        samples = 2 if config.objective == "dpo" else config.group
        copies = len(policies_of(config)) * samples
        found = dict(micro_rows=fewer_rows(config, config.prompts, copies),
                     checkpointing=True, group=config.group // 2)
        if config.checkpointing:  # which saves more
            found["logit_mb"] = min(FEW_MB, config.logit_mb)
    else:
        n = min(config.eval_batch, max(config.eval_problems, config.eval_final))
        found = dict(eval_batch=n // 2, micro_rows=fewer_rows(config, n, copies=2))
    return {key: value for key, value in found.items()
            if value != getattr(config, key) and changed(settings, config, key, value)}


def fewer_rows(config, prompts, copies):
    """micro_rows, halved until fewer prompts, with `copies` of the longest response each, are in a
    micro-batch; as it is where one fills it."""
    size = config.prompt_tokens + copies * (config.max_new_tokens - 1)
    rows = config.micro_rows
    at_once = min(prompts, rows // size)
    while at_once > 1 and rows >= at_once * size:
        rows //= 2
    return rows


def changed(settings, config, key, value):
    """The settings with one of them changed; None where that is refused."""
    asked = {**vars(config), key: value}
    try:
        return settings([f"--{name}={x}" for name, x in asked.items()])
    except ValueError:
        return None


def phases_of(job, update, opt):
    """{name: function of settings}: a step's phases at their largest, and a batch of an evaluation
    with either cache. update: that of train.py; opt: what it steps, the job's or a stand-in."""
    net = job.net
    rng = torch.Generator().manual_seed(0)
    rollouts = {}

    def prompts(n, config):
        shape = (n, config.prompt_tokens)
        return torch.randint(net.vocab_used, shape, generator=rng).tolist()

    def sampling(config):
        rollouts[config.prompts, config.group] = generate(
            net, prompts(config.prompts, config), config.group, config.max_new_tokens,
            temperature=config.temperature, eviction=eviction_of(config))

    def learning(config):
        job.opt.forget()  # gradients of an update that did not fit
        size_logits(config)
        rollout = rollouts[config.prompts, config.group]
        rewards = torch.arange(config.prompts * config.group, device=net.device) % 2.0
        rollout = replace(rollout, rewards=rewards.view(config.prompts, config.group))
        again = functools.partial(replay_all, net, job.objective, config)
        rollout, batch, _ = job.objective.prepare(rollout, rollout.rewards, again)
        update(net, opt, job.objective, rollout, batch=batch, config=config, lr=0.0,
               teacher=job.teacher)

    def evaluation(config):
        def held_out(split, indices):
            """Any problem, whose rewards are made up, as responses are decoded to nothing; prompts
            of full length."""
            any_one = job.problems.get("eval", [0])[0][0]
            any_one = replace(any_one, rule=lambda *response: dict(reward=0.0))
            return [any_one] * len(indices), prompts(len(indices), config)

        endless = SimpleNamespace(stop_ids=(), decode=lambda ids, special: "")
        problems = SimpleNamespace(get=held_out)
        size_logits(config)
        n = min(config.eval_batch, job.problems.n_eval)
        for eviction in (eviction_of_evaluation(config), Eviction("none")):
            evaluate(net, endless, problems, config, eviction=eviction, n=n)

    return dict(sampling=sampling, learning=learning, evaluation=evaluation)


@one_line_errors(ValueError, OSError, MemoryError, FloatingPointError)
@placed(ValueError, OSError, FloatingPointError)
@nothing_recorded()
def dry_run(job, settings, update):
    """Measure one step and an evaluation batch, then the same with other settings, and print what
    each takes, without the recordings of fast/recorded.py, which take what would be left over.
    Weights stay: lr is 0. settings, update: those of train.py."""
    config = job.config
    phases = phases_of(job, update, job.opt)

    def trials(phase):
        return {f"--{key}={value}": (changed(settings, config, key, value),
                                     REACHES.get(key, [*phases]))
                for key, value in savings(settings, config, phase).items()}

    least = dict(prompts=1, eval_batch=1, max_new_tokens=min(config.max_new_tokens, 4))
    small = SimpleNamespace(**{**vars(config), **least})
    costs = compare(phases, config, config.device, trials=trials, first=small)
    if all(cost.fits for cost in costs.values()):
        tell_whole_run(job, {name: cost.seconds for name, cost in costs.items()})
    tell("nothing was written")


def tell_whole_run(job, seconds):
    """How long a run would take if all were as long as what was measured, and its largest files.
    seconds: {name of a phase: of one step, or of one batch of an evaluation}."""
    config = job.config
    at = {*range(0, config.steps, config.eval_every), config.steps}
    asked = [min(problems_at(config, step), job.problems.n_eval) for step in at]
    batches = sum(-(-n // config.eval_batch) for n in asked)
    steps = config.steps * (seconds["sampling"] + seconds["learning"])
    tell(f"at this size {config.steps} steps take {minutes(steps)}, {len(at)} "
         f"evaluations {minutes(batches * seconds['evaluation'])}; checkpoints and "
         f"models take up to {disk(job.net, job.opt) / 1e9:.2f} GB")


def minutes(seconds):
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def disk(net, opt):
    """Bytes of a run's two checkpoints and two models, and of the larger once more, as it is
    written before the old one goes."""
    moments = 2 * opt.optimizer.kinds[0].itemsize
    checkpoint = (4 + moments) * sum(m.numel() for m in opt.masters)
    model = sum(p.nbytes for p in net.parameters())
    return 2 * (checkpoint + model) + max(checkpoint, model)


# before a run

@nothing_recorded()
def fit(job, update):
    """Lower CHOSEN in job.config until the largest step and a batch of the evaluation fit into
    config.memory or, where that is 0 and the learner is large for its card, into the card. What was
    chosen stays with the run, and a resume that asks for the same takes it over. -> a line that
    says so, or "". Raises ValueError where nothing helps."""
    config = job.config
    limit = config.memory * 1e9 or memory_of(config.device)
    unasked = config.dry_run or parallel.size() > 1 or not may_not_fit(job, limit)
    if not config.memory and unasked:
        return ""
    asked = dict(limit=limit, device=config.device,
                 **{key: getattr(config, key) for key in CHOSEN})
    memory = job.run.memory if job.run else {}
    chosen = memory.get("fit", {})
    peak = None
    if chosen.get("asked") != asked:
        peak = lower_until_it_fits(job, update, limit)
        found = {key: getattr(config, key) for key in CHOSEN}
        chosen = memory["fit"] = dict(asked=asked, chosen=found)
    lowered = [f"{key}={value}" for key, value in chosen["chosen"].items()
               if value != asked[key]]
    for key, value in chosen["chosen"].items():
        setattr(config, key, value)
    check_ranges(config, RANGES)  # of what a checkpoint holds
    how = "with " + " ".join(lowered) if lowered else "as it is"
    measured = "as before" if peak is None else f"{gigabytes(peak)} GB at its peak"
    return f"memory of {limit / 1e9:.4g} GB: the largest step fits {how} ({measured})"


def may_not_fit(job, limit):
    """Might the learner take more of a card than ROOM? A rough sum, which only decides whether to
    measure: activations are taken as what goes into and comes out of each matrix."""
    config, net = job.config, job.net
    if not config.device.startswith("cuda"):
        return False
    copies = len(policies_of(config)) * config.group
    size = config.prompt_tokens + copies * (config.max_new_tokens - 1)
    rows = size * min(config.prompts, max(1, config.micro_rows // size))
    matrices = [p for p in net.layers.parameters() if p.dim() == 2]
    kept = sum(map(sum, (p.shape for p in matrices)))  # numbers in and out, of a row
    if config.checkpointing:
        kept = kept // len(net.layers) + net.config.width * len(net.layers)
    activations = rows * kept * net.dtype.itemsize
    gradients = sum(4 * m.numel() for m in job.opt.masters) + 8 * net.head.numel()
    logits = 5.3 * config.logit_mb * 2**20
    return held(config.device) + activations + gradients + logits > ROOM * limit


def lower_until_it_fits(job, update, limit):
    """Change job.config. -> the highest peak in bytes"""
    config = job.config

    def step(lr, grad_clip):  # in place of the optimizer's
        job.opt.forget()
        return 0.0

    opt = SimpleNamespace(backward=job.opt.backward, step=step, scaling={})
    phases = phases_of(job, update, opt)
    peaks = []
    for name, phase in phases.items():
        while True:
            said = " ".join(f"{key}={getattr(config, key)}" for key in CHOSEN)
            say(f"measuring {name} with {said}")
            cost = measure(functools.partial(phase, config), config.device)
            if cost.peak is None:
                raise ValueError(f"memory={config.memory}: this system does not say "
                                 "what a process holds")
            if cost.fits and cost.peak <= limit:
                break
            key, value = next_lower(config, name)
            if key is None:
                raise ValueError(
                    too_large(config, name, said=said, cost=cost, limit=limit))
            setattr(config, key, value)
        peaks.append(cost.peak)
    job.opt.forget()
    say("")
    return max(peaks)


def next_lower(config, phase):
    """The setting that `fit` changes next, and to what; None and None where there is none."""
    if phase == "learning":
        samples = 2 if config.objective == "dpo" else config.group
        copies = len(policies_of(config)) * samples
        rows = fewer_rows(config, config.prompts, copies)
        ways = (("checkpointing", True), ("micro_rows", rows),
                ("logit_mb", min(FEW_MB, config.logit_mb)))
    elif phase == "evaluation":
        n = min(config.eval_batch, max(config.eval_problems, config.eval_final))
        ways = ("eval_batch", max(1, n // 2)),
    else:
        ways = ()
    for key, value in ways:
        if value != getattr(config, key):
            return key, value
    return None, None


def too_large(config, phase, said, cost, limit):
    """Why nothing fits, and what would help that is another run."""
    took = f"takes {gigabytes(cost.peak)} GB" if cost.fits else "runs out of memory"
    if phase != "sampling":  # which none of these change
        took += f" with {said}"
    ways = ["lower prompt_tokens"]
    if phase == "sampling":
        keeps_all = config.evict == "none"
        ways = ["set --evict=snapkv"] if keeps_all else ["lower budget"]
        ways += ["lower prompts, group or prompt_tokens"]
    if phase == "learning":
        ways = ["lower prompt_tokens or group"]
        if not config.lora_rank:
            ways.insert(0, "set --lora_rank=16")
        if config.moments == "float32":
            ways.insert(0, "set --moments=bfloat16 (4 bytes a weight less)")
    return (f"{phase} {took}, {limit / 1e9:.4g} GB may be held: {', or '.join(ways)}")
