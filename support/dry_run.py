"""
What lowers the memory of a run, and a dry run that measures it.

    python train.py --dry_run=True

The idea. A step is taken at its largest, with prompts of prompt_tokens tokens and responses that
never stop, and an evaluation batch as well; then again with each setting changed that may lower the
highest peak. Where memory ends in a run, the same settings are named without being tried.

train.py uses this file, so what is needed of it is handed over: `train` is that module.
"""
from dataclasses import replace
from types import SimpleNamespace

import torch

from support.memory import compare
from support.run import tell

PHASES = dict(generate="sampling", update="learning", evaluate="evaluation")  # by function
REACHES = dict(checkpointing=["learning"], micro_rows=["learning", "evaluation"],
               eval_batch=["evaluation"])  # settings that leave the other phases as they are


def savings(train, c, phase):
    """{key: value}: settings that lower the peak of a phase, first what changes no result."""
    if phase == "sampling":
        found = dict(prompts=c.prompts // 2, group=c.group // 2)
        if c.evict == "none":
            found = dict(evict="snapkv", **found)
        else:
            found = dict(found, budget=min(c.budget, c.prompt_tokens) // 2)
    elif phase == "learning":
        samples = 2 if c.objective == "dpo" else c.group
        copies = len(train.policies_of(c)) * samples
        found = dict(micro_rows=fewer_rows(c, c.prompts, copies), checkpointing=True,
                     group=c.group // 2)
    else:
        n = min(c.eval_batch, max(c.eval_problems, c.eval_final))
        found = dict(eval_batch=n // 2, micro_rows=fewer_rows(c, n, copies=2))
    return {key: value for key, value in found.items()
            if value != getattr(c, key) and changed(train, c, key, value)}


def fewer_rows(c, prompts, copies):
    """micro_rows, halved until fewer prompts, with `copies` of the longest response each, are in a
    micro-batch; as it is where one fills it."""
    size, rows = c.prompt_tokens + copies * (c.max_new_tokens - 1), c.micro_rows
    at_once = min(prompts, rows // size)
    while at_once > 1 and rows >= at_once * size:
        rows //= 2
    return rows


def changed(train, c, key, value):
    """The settings with one of them changed; None where that is refused."""
    try:
        return train.settings([f"--{name}={x}" for name, x in {**vars(c), key: value}.items()])
    except ValueError:
        return None


def dry_run_of(train, c, net, problems, learner):
    """Measure one step and an evaluation batch, then the same with other settings, and print what
    each takes. Weights stay: lr is 0. learner: objective, optimizer, teacher."""
    objective, opt, teacher = learner
    rng = torch.Generator().manual_seed(0)
    rollouts = {}

    def prompts(n):
        return torch.randint(net.vocab_used, (n, c.prompt_tokens), generator=rng).tolist()

    def held_out(split, indices):
        """Any problem, whose rewards are made up, as responses are decoded to nothing; prompts of
        full length."""
        any_one = replace(problems.get("eval", [0])[0][0], rule=lambda *response: dict(reward=0.0))
        return [any_one] * len(indices), prompts(len(indices))

    def sampling(c):
        rollouts[c.prompts, c.group] = train.generate(
            net, prompts(c.prompts), c.group, c.max_new_tokens, temperature=c.temperature,
            eviction=train.eviction_of(c))

    def learning(c):
        for p in (*opt.params, *opt.masters):  # of an update that did not fit
            p.grad = None
        rewards = torch.arange(c.prompts * c.group, device=net.device) % 2.0
        train.update(net, opt, objective, rollouts[c.prompts, c.group],
                     rewards=rewards.view(c.prompts, c.group), c=c, lr=0.0, teacher=teacher)

    def evaluation(c):
        endless = SimpleNamespace(stop_ids=(), decode=lambda ids, special: "")
        for eviction in (train.eviction_of_evaluation(c), train.Eviction("none")):
            train.evaluate(net, endless, SimpleNamespace(get=held_out), c, eviction=eviction,
                           n=min(c.eval_batch, problems.n_eval))

    def trials(phase):
        return {f"--{key}={value}": (changed(train, c, key, value), REACHES.get(key, phases))
                for key, value in savings(train, c, phase).items()}

    small = SimpleNamespace(**{**vars(c), "prompts": 1, "eval_batch": 1,
                               "max_new_tokens": min(c.max_new_tokens, 4)})
    phases = dict(sampling=sampling, learning=learning, evaluation=evaluation)
    costs = compare(phases, c, c.device, trials=trials, first=small)
    if all(cost.fits for cost in costs.values()):
        tell_whole_run(train, c, net, opt=opt, n_eval=problems.n_eval,
                       seconds={name: cost.seconds for name, cost in costs.items()})
    tell("nothing was written")


def tell_whole_run(train, c, net, opt, n_eval, seconds):
    """How long a run would take if all were as long as what was measured, and its largest files.
    seconds: {name of a phase: of one step, or of one batch of an evaluation}."""
    at = {*range(0, c.steps, c.eval_every), c.steps}
    batches = sum(-(-min(train.problems_at(c, step), n_eval) // c.eval_batch) for step in at)
    steps = c.steps * (seconds["sampling"] + seconds["learning"])
    tell(f"at this size {c.steps} steps take {minutes(steps)}, {len(at)} evaluations "
         f"{minutes(batches * seconds['evaluation'])}; checkpoints and models take up to "
         f"{disk(net, opt) / 1e9:.2f} GB")


def minutes(seconds):
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def disk(net, opt):
    """Bytes of a run's two checkpoints and two models, and of the larger once more, as it is
    written before the old one goes."""
    checkpoint = 12 * sum(m.numel() for m in opt.masters)  # weight and two moments
    model = sum(p.nbytes for p in net.parameters())
    return 2 * (checkpoint + model) + max(checkpoint, model)
