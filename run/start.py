"""
The start of a run: its device, its model and what belongs to it, what of memory it takes, and the
lines that say so. Whatever can be wrong with a request is found before out_dir is touched.
"""
import functools
import os
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from data.files import files_of
from data.rewards import RewardError, find_reward
from data.tasks import Problems
from data.tokenizer import Tokenizer
from model import Transformer
from run.dry_run import PHASES, fit, savings
from run.evaluate import check_best
from run.learn import size_logits
from run.settings import (
    BEFORE,
    MAY_CHANGE,
    eviction_of,
    eviction_of_evaluation,
    identity_of,
    needs_initial,
)
from support import parallel
from support.hf_config import read_config
from support.hub import find_checkpoint
from support.jsonfile import parse_object
from support.lora import LoRA, frozen_base, targets_of
from support.memory import memory_errors, memory_of, saving_if_memory_runs_out
from support.optimizer import Masters
from support.own import placed
from support.run import Run, choose_device
from support.screen import one_line_errors, tell
from support.tracker import Tracker

# parameters; smaller models gain little or no time by bfloat16 (docs/reproduce.md), so dtype=auto
# leaves them in float32
BFLOAT16_FROM = 30_000_000
ANSWERS = dict(question=str, answer=str, compressed=str, dense=str,
               reward_compressed=float, reward_dense=float)
EVALUATION = dict(step=int, eval_compressed=float, eval_dense=float)
MEMORY = {  # of a run, as a checkpoint keeps it
    "evals": [EVALUATION], "answers": (ANSWERS, ANSWERS),
    "kv": dict(kept=int, dense=int, dense_shared=int), "best?": EVALUATION,
    "fit?": dict(asked=dict, chosen=dict(
        checkpointing=bool, micro_rows=int, logit_mb=int, eval_batch=int)),
    "idle?": int, "in_a_row?": int, "skipped?": int, "wandb?": str, "reward?": str}
NOT_LOADED = ("out of memory while the model was loaded, before the first step: take "
              "a smaller model, 16-bit weights (--dtype=bfloat16, or float16 on a card "
              "without it), or more memory")


@dataclass
class Job:
    """All that a run works with."""
    config: SimpleNamespace
    run: Run               # its folder; None of a dry run
    net: Transformer
    tok: Tokenizer
    problems: Problems
    objective: object
    opt: Masters           # or LoRA
    teacher: Transformer   # of distillation, frozen; None: the model's other policy


@one_line_errors(ValueError, OSError, MemoryError, FloatingPointError)
@placed(ValueError, OSError, FloatingPointError)
@memory_errors(NOT_LOADED)
def set_up(argv, settings, objectives, update):
    """-> Job. settings: function of argv. objectives: {name: class}. update: that of train.py. What
    is wrong ends the program with one line."""
    config = settings(argv)
    eviction_of_evaluation(config)  # checks itself
    choose_device(config)
    check_ranks(config)
    limit_memory(config)
    folder = find_checkpoint(config.model)
    choose_dtype(config, folder)
    rule = find_reward(config.reward)
    run = None if config.dry_run else folder_of(config, folder)
    tok = Tokenizer(folder, template_file=config.template_file)

    def load():
        dtype = getattr(torch, config.dtype)
        model = Transformer.from_pretrained(folder, device=config.device, dtype=dtype)
        model.use_tokens(len(tok), tok.absent)
        return model

    @functools.cache
    def initial():
        """The model as it was before training, also where a run goes on; frozen."""
        if config.lora_rank:
            return frozen_base(net, config)
        return load().requires_grad_(False)

    net = load()
    check_context(config, net)
    check_memory(config, net)
    n_eval = max(config.eval_problems, config.eval_final)
    problems = problems_of(config, tok, rule, n_eval=n_eval)
    objective = objectives[config.objective](net, config, initial)
    teacher = None
    if config.distill and config.teacher == "initial":
        teacher = initial()
    if config.lora_rank:
        opt = LoRA(net, config, objective.value, base=initial())
    else:
        opt = Masters(net, config, objective.value)
    job = Job(config=config, run=run, net=net, tok=tok, problems=problems,
              objective=objective, opt=opt, teacher=teacher)
    fits = fit(job, update)
    size_logits(config)
    if run:
        open_run(run, opt, rule)
    introduce(config, folder, net, problems=problems, opt=opt)
    if fits:
        tell(fits)
    if run and run.writes and config.tracker != "none":
        done = run.memory.get("evals", [])[-1:]
        already = [row for row in done if row["step"] == run.step]
        run.tracker = Tracker(run, already)
    return job


def folder_of(config, folder):
    """The Run whose model is loaded from `folder`, checked, not yet begun."""
    paths = files_of(config.task, config.eval_task)
    if config.template_file:
        paths["template_file"] = [config.template_file]
    inputs = {key: found[0] for key, found in paths.items()}
    run = Run(config, MAY_CHANGE, identity_of(config, folder), shapes=MEMORY,
              before=BEFORE, inputs=dict(model=folder, **inputs))
    if config.template_file:
        with open(config.template_file, "rb") as f:
            run.beside["chat_template.jinja"] = f.read()  # so that model/ and best/ speak it
    return run


def open_run(run, opt, rule):
    """Begin the run, or go on with it. rule: of the reward, a function if it is somebody's own."""
    if run.learner is not None:
        opt.load(run.learner, run.path("ckpt.pt"))
    run.open()
    check_best(run)
    run.memory = parallel.gather(run.memory)[0]  # rank 0's: it decides when to save
    if callable(rule):
        run.watch("reward", rule.file, rule.fingerprint)


@contextmanager
def guarded(job, settings):
    """Around the loop. What ends it (a full disk, a reward that is no number, an update that is not
    finite, too little memory) ends the program with one line; where nothing of the step in progress
    is learned yet, what was learned before it is saved."""
    kinds = (OSError, ValueError, FloatingPointError, MemoryError)
    advice = functools.partial(savings, settings)
    with (one_line_errors(*kinds, also=job.run.kept),
          placed(ValueError, OSError, FloatingPointError),
          job.run.saving_on(RewardError, job.opt),
          saving_if_memory_runs_out(job.run, job.opt, PHASES, advice)):
        yield


def problems_of(config, tok, rule, n_eval):
    """The Problems that the settings name. rule: a reward's name, or the function it stands for."""
    return Problems(
        config.task, tok, seed=config.seed, tokens=config.prompt_tokens, n_eval=n_eval,
        template=parse_object(config.template or "{}", "template"),
        skip_long=config.skip_long, eval_task=config.eval_task, shots=config.shots,
        raw_text=config.raw_text, rule=rule, eval_first=config.eval_first,
        control_tokens=config.control_tokens)


# what the machine can do

def check_ranks(config):
    """Raise ValueError for what several ranks cannot do."""
    ranks = parallel.size()
    if ranks > config.prompts:
        raise ValueError(f"prompts={config.prompts} is too few for {ranks} ranks: "
                         "raise prompts, or start fewer processes")
    if ranks > 1 and config.dry_run:
        raise ValueError("dry_run=True measures one process: run it without torchrun, "
                         f"with --prompts={largest_share(config)}, the share of one of "
                         f"{ranks} ranks")
    if ranks > 1 and config.memory:
        raise ValueError(f"memory={config.memory} measures one process: under torchrun "
                         "set checkpointing, micro_rows and logit_mb yourself")


def largest_share(config):
    """The most prompts that a rank samples in a step."""
    return -(-config.prompts // parallel.size())


def limit_memory(config):
    """Let torch hold no more on a card than config.memory, which is refused where the device has
    less."""
    if not config.memory:
        return
    there = memory_of(config.device)
    if config.memory * 1e9 > there:
        raise ValueError(f"memory={config.memory}: {config.device} has "
                         f"{there / 1e9:.1f} GB")
    if config.device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(config.memory * 1e9 / there)


def choose_dtype(config, folder):
    """Replace "auto" in config.dtype by what suits device and size of the model in folder. Raises
    ValueError for bfloat16 on a card that only emulates it."""
    cuda = config.device.startswith("cuda")
    native = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.dtype == "bfloat16" and not native:
        raise ValueError(f"dtype=bfloat16: {torch.cuda.get_device_name()} does not "
                         "support it, use --dtype=float16 or --dtype=float32")
    if config.dtype != "auto":
        return
    with torch.device("meta"):  # shapes alone
        path = os.path.join(folder, "config.json")
        model = Transformer(read_config(path, config.device))
    large = sum(p.numel() for p in model.parameters()) >= BFLOAT16_FROM
    config.dtype = "bfloat16" if large and cuda and native else "float32"


def check_context(config, net):
    """Raise ValueError where prompt and response may be longer than the model's context."""
    if config.prompt_tokens + config.max_new_tokens > net.config.max_pos:
        raise ValueError(f"prompt_tokens {config.prompt_tokens} + max_new_tokens "
                         f"{config.max_new_tokens} exceed the model's context of "
                         f"{net.config.max_pos}")


def check_memory(config, net):
    """Raise ValueError for more samples at a time than memory can hold: of each at least the KV
    and the log of its response and one row of logits."""
    log = config.max_new_tokens * 4 * (3 + net.config.n_layer * net.config.n_kv_head)
    slots = eviction_of(config).response_slots(config.max_new_tokens)
    keys = slots * net.config.kv_bytes_per_token(net.dtype)
    size = keys + log + 4 * net.vocab_used
    there = memory_of(config.device)
    fit = int(min(there, 1e18)) // size
    held_out = max(config.eval_problems, config.eval_final)
    asked = dict(group=config.group, prompts=largest_share(config) * config.group,
                 eval_batch=min(config.eval_batch, held_out))
    for key, samples in asked.items():
        if samples > fit:
            most = fit
            if key == "prompts":
                most = fit // config.group * parallel.size()
            raise ValueError(f"{key} {getattr(config, key)} is too much: {samples} "
                             "samples at a time take at least "
                             f"{samples * size / 1e9:.0f} GB, {config.device} has "
                             f"{there / 1e9:.0f} GB; {key} {most} might fit")


# what is said of it

def introduce(config, folder, net, problems, opt):
    """Print the facts that decide speed and memory."""
    cuda = config.device.startswith("cuda")
    threads = torch.get_num_threads()
    where = "1 CPU thread" if threads == 1 else f"{threads} CPU threads"
    if cuda:
        where = torch.cuda.get_device_name()
    path = "Triton kernel" if cuda else "PyTorch reference"
    held = "LoRA" if config.lora_rank else "masters"
    if config.moments != "float32":
        held += f", {config.moments} moments"
    tell(f"torch {torch.__version__}, {where}, {config.dtype} weights, fp32 {held}, "
         f"attention by the {path}")
    if parallel.size() > 1:
        tell(f"{parallel.size()} ranks share the prompts of each step")
    per_token = net.config.kv_bytes_per_token(net.dtype)
    size = sum(p.numel() for p in net.parameters()) / 1e6
    tell(f"{folder}: {net.config.arch}, {size:.2f}M parameters, {per_token:,} KV bytes "
         "per token")
    tell_cache(config, net)
    for note in problems.notes:
        tell(note)
    if config.evict != "none":
        tell_nothing_evicted(config, net, problems)
    if config.reward != "auto":
        tell(f"reward by {problems.rule}")
    if config.lora_rank:
        tell(f"LoRA of rank {config.lora_rank} on {', '.join(targets_of(config))}: "
             f"{opt.trained / 1e6:.2f}M parameters are trained; these matrices are "
             "held twice, as loaded and as trained")
    elif needs_initial(config):
        tell("a frozen copy of the initial model is kept in memory")
    # other norms weigh long responses more, corrections weigh tokens: the loss then is not 0
    asked = (config.objective, config.correction, config.norm, config.ratio_to)
    if asked == ("grpo", "none", "sequence", "learner"):
        tell("the policy term of the loss is 0 in value, not in gradient: the ratio "
             "is 1 on a rollout's first update")


def tell_nothing_evicted(config, net, problems):
    """Say so where the budget holds the longest prompt, or of a task that is generated, whose
    longest is not known, the prompts of the first step."""
    def evicts(n):
        return eviction_of(config).evicts(
            n, config.max_new_tokens, n_layer=net.config.n_layer)

    if not evicts(problems.longest):
        tell(f"nothing is evicted: the longest prompt has {problems.longest} tokens, "
             f"budget is {config.budget}")
        return
    if problems.file:
        return
    longest = 0
    for i in range(config.prompts):
        _, (ids,) = problems.get("train", [i])
        longest = max(longest, len(ids))
        if evicts(longest):  # mostly the first one
            return
    tell(f"nothing is evicted from the first {config.prompts} prompts: the longest has "
         f"{longest} tokens, budget is {config.budget}")


def tell_cache(config, net):
    """Print what a rollout's KV cache holds at most."""
    per_token = net.config.kv_bytes_per_token(net.dtype)
    layers = net.config.n_layer
    eviction = eviction_of(config)
    slots = sum(eviction.slots(layer, layers, config.prompt_tokens)
                for layer in range(layers))
    keys = config.prompt_tokens
    if config.evict != "none":
        keys = min(config.budget, config.prompt_tokens)
    how = config.evict
    if config.spread != "uniform":
        how += f", on average, spread {config.spread}"
    samples = config.prompts * config.group
    dense = samples * (config.prompt_tokens + config.max_new_tokens - 1) * per_token
    of_responses = eviction_of(config).response_slots(config.max_new_tokens)
    held = config.prompts * slots // layers + samples * of_responses
    kept = held * per_token
    tell(f"{config.task}: prompts of up to {config.prompt_tokens} tokens, {keys} keys "
         f"kept per layer and KV head ({how}); a rollout of {config.prompts} x "
         f"{config.group} samples holds up to {kept:,} KV bytes, {dense:,} if each "
         "kept all keys")
