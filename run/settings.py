"""
What the settings of train.py may be, and what of the method follows from them.

The idea. Whatever can be known before a model is loaded is checked here, each complaint one line
that names the setting. The defaults and the objectives are handed in.
"""
import os

from data.files import check_files, files_of, is_file
from data.rewards import check_reward
from data.tasks import TASKS, stop_strings
from grpo import CORRECTIONS, NORMS
from kvcache import EVICT, POOL, SPREAD, Eviction
from support.checkpoint import fingerprint
from support.configurator import check_ranges
from support.jsonfile import shown
from support.lora import check_lora
from support.own import find_own, is_own, must_take
from support.tracker import TRACKERS, check_tracker

CHOICES = dict(
    spread=list(SPREAD), learner=["shadow", "dense"],
    distill_to=["dense", "shadow"], distill_by=["kl", "one_sided"],
    distill_on=["all", "reward"], teacher=["other", "initial"], pool_by=list(POOL),
    correction=["none", *CORRECTIONS], ratio_to=["learner", "sampler"],
    norm=list(NORMS), dtype=["auto", "float32", "bfloat16", "float16"],
    lr_schedule=["constant", "linear", "cosine"],
    moments=["float32", "bfloat16"], tracker=["none", *TRACKERS])
CUTS = "the learner scores all tokens, so a sampler of some would bias every ratio"
REFUSED = dict(top_p=CUTS, top_k=CUTS, min_p=CUTS)
MANY = 10**9
# Eviction says more on budget, window and sinks, an objective on group
RANGES = dict(
    prompts=(1, 10**6), group=(1, 10**6), prompt_tokens=(1, MANY),
    max_new_tokens=(1, MANY), period=(1, MANY), updates=(1, 1000),
    micro_rows=(1, MANY), logit_mb=(1, 10**5), memory=(0, 10**5), steps=(1, MANY),
    eval_every=(1, MANY), eval_problems=(1, 10**6), eval_final=(1, 10**6),
    eval_batch=(1, 10**6), eval_first=(0, MANY), save_every=(1, MANY), warmup=(0, MANY),
    budget=(0, MANY), window=(0, MANY), sinks=(0, MANY), response_budget=(0, MANY),
    temperature=(1e-2, 100), ref_kl=(0, 100), distill=(0, 100), clip=(0, 1),
    clip_high=(0, 100), lr=(1e-12, 1), lr_end=(0, 1), gamma=(0, 1), lam=(0, 1),
    value_coef=(0, 100), beta=(1e-6, 100), beta2=(0, 0.9999), weight_decay=(0, 1),
    grad_clip=(1e-6, 1e6), seed=(0, 2**40), shots=(0, 1000), lora_rank=(0, 10**6),
    lora_alpha=(1e-6, 1e6))
# settings that mean something to some objectives only; a class names those that it uses
OF_OBJECTIVES = ("correction", "ratio_to", "ref_kl", "norm", "clip", "clip_high",
                 "updates", "gamma", "lam", "value_coef", "beta")
MAY_CHANGE = {  # on resume; the last five because a run may end for want of memory
    "resume", "overwrite", "dry_run", "tracker", "out_dir", "device", "steps",
    "eval_every", "save_every", "eval_batch", "micro_rows", "checkpointing", "logit_mb",
    "memory"}
BEFORE = dict(moments="float32")  # of runs from before the setting had a name


def check_settings(config, defaults, objectives):
    """Raise ValueError for what can be known to be wrong before a model is loaded. What settings
    name as module:name is entered into EVICT, TASKS and objectives."""
    check_ranges(config, RANGES)
    bring_in(config, objectives)
    eviction_of(config)  # checks itself
    check_objective(config, defaults, objectives)
    task = config.task
    known = task in TASKS or is_file(task)
    if not known and (os.path.exists(task) or "." in task):
        raise ValueError(f"task {shown(task)}: a file must end in .jsonl")
    if not known:
        raise ValueError(f"unknown task {shown(task)}: one of {', '.join(TASKS)}, a "
                         ".jsonl file, gsm8k:FOLDER, or module:name")
    stop_strings(config.stop)
    check_files(config)
    check_reward(config.reward)
    check_lora(config, defaults)
    if not config.out_dir:
        raise ValueError("out_dir is empty: name a folder")
    check_tracker(config.tracker)
    if config.lr_end and config.lr_schedule == "constant":
        raise ValueError(f"lr_end={config.lr_end} does nothing where "
                         "lr_schedule=constant: set linear or cosine")
    how = (config.distill_by, config.teacher)
    if config.distill and how == ("one_sided", "initial"):
        raise ValueError("distill_by=one_sided compares the two policies of one "
                         "model: set teacher=other")


def tables_of(objectives):
    """{setting: the table in which its name is looked up}; module:name brings one's own in."""
    return dict(evict=EVICT, eval_evict=EVICT, objective=objectives, task=TASKS)


def bring_in(config, objectives):
    """Enter what settings name as module:name into their tables. Raises ValueError for a name that
    is in no table, and for what cannot be what it is named as."""
    for key, table in tables_of(objectives).items():
        name = getattr(config, key)
        if key in brought_in(config):
            elsewhere = config.response_budget > 0
            table[name] = own_thing(name, key, elsewhere)
        known = [each for each in table if key != "eval_evict" or each != "none"]
        if key == "eval_evict":
            known.insert(0, "auto")
        if key != "task" and name not in known:
            raise ValueError(f"{key} must be one of {', '.join(known)}, or "
                             f"module:name, got {shown(name)}")


def own_thing(name, key, elsewhere):
    """What the setting `key` names as module:name. elsewhere: whether a method is told what other
    keys received. Raises ValueError for what it cannot be."""
    found, _ = find_own(name, key)
    what = f"{key} {name}"
    if key == "task":
        pair = isinstance(found, tuple) and len(found) == 2
        if not (pair and all(map(callable, found))):
            raise ValueError(f"{what}: must be a pair of functions, one that makes a "
                             f"problem, one that judges a text, got {found!r:.80}")
        must_take(what, found[0], "rng")
        must_take(what, found[1], "text", "answer")
    elif key == "objective":  # GRPO in grpo.py has all that one needs
        if not isinstance(found, type):
            raise ValueError(f"{what}: must be a class, got {found!r:.80}")
        for member in ("value", "uses", "prepare", "loss"):
            if not hasattr(found, member):
                raise ValueError(
                    f"{what}: the class does not define {member!r}")
        must_take(what, found, "model", "settings", "initial")
        must_take(what, found.prepare, "self", "rollout", "rewards", "score")
        by_name = ("part", "batch", "old", "whole")
        must_take(what, found.loss, "self", "out", by_name=by_name)
        if hasattr(found, "check"):
            must_take(what, found.check, "config")
    elif isinstance(found, type) or not callable(found):
        raise ValueError(f"{what}: must be a function, got {found!r:.80}")
    else:
        score = getattr(found, "score", found)  # of a Method
        needed = elsewhere and getattr(found, "needs_elsewhere", True)
        inputs = ("q", "k", "eviction", "elsewhere")
        must_take(what, score, *inputs[:4 if needed else 3])
    return found


def brought_in(config):
    """The settings that name something of one's own."""
    return [key for key in tables_of(None) if is_own(getattr(config, key))
            and not (key == "task" and is_file(config.task))]


def check_objective(config, defaults, objectives):
    """Raise ValueError for a setting that the objective does not use: its class names those that it
    does (`uses`). Whatever else it has to say, its `check` says."""
    objective = objectives[config.objective]
    uses = getattr(objective, "uses", ())
    for key in OF_OBJECTIVES:
        value = getattr(config, key)
        if key not in uses and value != defaults[key]:
            known = ", ".join(uses) or "none of such settings"
            raise ValueError(f"{key}={value}: objective={config.objective} does not "
                             f"use it; it uses {known}")
    if hasattr(objective, "check"):
        objective.check(config)


# what follows from them

def eviction_of(config, method=None):
    """The settings that say which keys a rollout keeps."""
    method = method or config.evict
    responses = None if method == "none" else config.response_budget or None
    return Eviction(
        method=method, budget=config.budget, window=config.window, sinks=config.sinks,
        pool=config.pool, pool_by=config.pool_by, response_budget=responses,
        period=config.period, spread=config.spread)


def eviction_of_evaluation(config):
    """Those of the held-out evaluation with a compressed cache, which is one for all arms that are
    to be compared: the method may be named for those that train without eviction."""
    if config.eval_evict != "auto":
        return eviction_of(config, config.eval_evict)
    return eviction_of(config, "snapkv" if config.evict == "none" else config.evict)


def policies_of(config):
    """The policies that the learner replays."""
    policies = [config.learner]
    others = config.teacher == "other" or config.distill_to not in policies
    if config.distill and others:
        # in front: replay gives entropy and values of the last
        policies.insert(0, "dense" if config.learner == "shadow" else "shadow")
    return tuple(policies)


def needs_initial(config):
    """Whether the model as it was before training is needed throughout."""
    return (config.lora_rank > 0 or config.objective == "dpo" or config.ref_kl > 0
            or (config.distill > 0 and config.teacher == "initial"))


def problems_at(config, step):
    """How many held-out problems the evaluation at a step is asked for. The one before the first
    step and the last two, whose mean is the result of a run, are the precise ones."""
    one_before_last = (config.steps - 1) // config.eval_every * config.eval_every
    if step == 0 or step >= one_before_last:
        return config.eval_final
    return config.eval_problems


def identity_of(config, folder):
    """{setting: fingerprint of the files that it names}: what they hold is part of a run. The
    weights that it starts from are so only where they are needed again."""
    names = ["config.json", "generation_config.json", "tokenizer.json",
             "tokenizer_config.json", "chat_template.jinja"]
    if needs_initial(config):
        there = sorted(os.listdir(folder))
        names += [name for name in there if name.endswith(".safetensors")]
    found = dict(model=fingerprint(*(os.path.join(folder, name) for name in names)))
    for key, paths in files_of(config.task, config.eval_task).items():
        found[key] = fingerprint(*paths)
    if config.template_file:
        found["template_file"] = fingerprint(config.template_file)
    for key in brought_in(config):
        found[key] = fingerprint(find_own(getattr(config, key), key)[1])
    return found
