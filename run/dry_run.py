"""
What lowers the memory of a run, and a dry run that measures it.

    python train.py --dry_run=True

The idea. A step is taken at its largest, with prompts of prompt_tokens tokens and responses that
never stop, and an evaluation batch as well; then again with each setting changed that may lower the
highest peak. Where memory ends in a run, the same settings are named without being tried.
"""
import functools
from dataclasses import replace
from types import SimpleNamespace

import torch

from kvcache import Eviction
from rollout import generate
from run.evaluate import evaluate
from run.learn import replay_all
from run.settings import eviction_of, eviction_of_evaluation, policies_of, problems_at
from support.memory import compare
from support.own import placed
from support.screen import one_line_errors, tell

PHASES = dict(generate="sampling", prepare="learning", update="learning",
              evaluate="evaluation")  # by function
REACHES = dict(checkpointing=["learning"], micro_rows=["learning", "evaluation"],
               eval_batch=["evaluation"])  # settings that leave the other phases as they are


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


@one_line_errors(ValueError, OSError, MemoryError, FloatingPointError)
@placed(ValueError, OSError, FloatingPointError)
def dry_run(job, settings, update):
    """Measure one step and an evaluation batch, then the same with other settings, and print what
    each takes. Weights stay: lr is 0. settings, update: those of train.py."""
    config = job.config
    net = job.net
    rng = torch.Generator().manual_seed(0)
    rollouts = {}

    def prompts(n):
        shape = (n, config.prompt_tokens)
        return torch.randint(net.vocab_used, shape, generator=rng).tolist()

    def held_out(split, indices):
        """Any problem, whose rewards are made up, as responses are decoded to nothing; prompts of
        full length."""
        any_one = job.problems.get("eval", [0])[0][0]
        any_one = replace(any_one, rule=lambda *response: dict(reward=0.0))
        return [any_one] * len(indices), prompts(len(indices))

    def sampling(config):
        rollouts[config.prompts, config.group] = generate(
            net, prompts(config.prompts), config.group, config.max_new_tokens,
            temperature=config.temperature, eviction=eviction_of(config))

    def learning(config):
        job.opt.forget()  # gradients of an update that did not fit
        rollout = rollouts[config.prompts, config.group]
        rewards = torch.arange(config.prompts * config.group, device=net.device) % 2.0
        rollout = replace(rollout, rewards=rewards.view(config.prompts, config.group))
        again = functools.partial(replay_all, net, job.objective, config)
        rollout, batch, _ = job.objective.prepare(rollout, rollout.rewards, again)
        update(net, job.opt, job.objective, rollout, batch=batch, config=config, lr=0.0,
               teacher=job.teacher)

    def evaluation(config):
        endless = SimpleNamespace(stop_ids=(), decode=lambda ids, special: "")
        problems = SimpleNamespace(get=held_out)
        n = min(config.eval_batch, job.problems.n_eval)
        for eviction in (eviction_of_evaluation(config), Eviction("none")):
            evaluate(net, endless, problems, config, eviction=eviction, n=n)

    def trials(phase):
        return {f"--{key}={value}": (changed(settings, config, key, value),
                                     REACHES.get(key, phases))
                for key, value in savings(settings, config, phase).items()}

    least = dict(prompts=1, eval_batch=1, max_new_tokens=min(config.max_new_tokens, 4))
    small = SimpleNamespace(**{**vars(config), **least})
    phases = dict(sampling=sampling, learning=learning, evaluation=evaluation)
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
