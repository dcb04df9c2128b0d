"""
Reinforcement learning with a compressed KV cache: rollout, replay under the Shadow Mask, objective,
distillation, in one loop.

    python train.py                                       # the embedded checkpoint, CPU or GPU
    python train.py config/smollm2.py --out_dir=out/mine  # config files and --key=value, in order

The idea. The sampler decodes from an evicted cache, so it is a sparse policy. What was evicted is
logged and replayed in the learner's attention, so the policy that is updated is the policy that
sampled (learner = "shadow"), and a KL term lets the dense policy learn from it (distill_to =
"dense") or the other way round:

    loss = objective(shadow) + distill * KL(dense || stop-gradient(shadow))

each response's KL times its reward (distill_on): what is wrong teaches nothing. The model as it was
before training can be the teacher instead (teacher = "initial").

Read `main` for the loop and `update` for the loss. The usual repair, weights for a sampler that was
not the learner (correction), is here too, to be compared with. Under torchrun several ranks share
the prompts of each step and the gradient (support/parallel.py); `share` is everything where there
is one. All randomness of a step is a function of (seed, step), so a checkpoint needs no RNG state
beyond those two numbers, and it does not matter which rank samples.
"""
import functools
import math
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from data.files import check_files, files_of, is_file
from data.rewards import RewardError, check_reward, find_reward, means
from data.tasks import TASKS, Problems, before_stop, judge, stop_end, stop_strings
from data.tokenizer import Tokenizer
from grpo import CORRECTIONS, GRPO, NORMS, replay
from kvcache import EVICT, POOL, SPREAD, Eviction
from model import Transformer, find_checkpoint, read_config
from objectives.dpo import DPO
from objectives.ppo import PPO
from rollout import generate, join
from support import parallel
from support.checkpoint import fingerprint
from support.configurator import check_ranges, configure, help_if_asked
from support.dry_run import PHASES, dry_run_of, savings
from support.jsonfile import parse_object, shown
from support.lora import LoRA, check_lora, frozen_base, targets_of
from support.memory import memory_errors, memory_of, saving_if_memory_runs_out
from support.metrics import Metrics, quantile
from support.optimizer import Masters
from support.own import find_own, is_own
from support.run import Run, choose_device, one_line_errors, progress, say, step_of, tell
from support.tracker import TRACKERS, Tracker, check_tracker

OBJECTIVES = {"grpo": GRPO, "ppo": PPO, "dpo": DPO}
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tiny")

# Settings, overridden by config files and --key=value; units and sane ranges beside each.
# run
out_dir = "out"          # folder for log.jsonl, samples.txt, config.json, ckpt.pt, model/, best/
resume = False           # go on from out_dir/ckpt.pt
overwrite = False        # throw away the run that out_dir holds
tracker = "none"         # also show the log in tensorboard (out_dir/tensorboard) or wandb
dry_run = False          # measure memory and time of the largest step, without out_dir, and end
seed = 0
device = "auto"          # auto: cuda if there is one; cpu, cuda, cuda:1
dtype = "auto"           # of the weights: float32, bfloat16; auto: by size on cuda, else float32
# model and task
model = TINY             # a folder or a hub name; here the embedded checkpoint
task = "kv4"             # needle, kv, kv4, kv16, list, own, hop, sum, a .jsonl file, gsm8k:FOLDER
eval_task = ""           # a .jsonl file of held-out problems; "": a tenth of the task's, by a hash
reward = "auto"          # auto, exact, number, boxed, math, choice, contains, or module:function
shots = 0                # problems of the file that come first in every prompt, answered; 0 .. 8
prompt_tokens = 256      # longest prompt in tokens; 64 .. the model's context
template = ""            # more arguments for the chat template, JSON: {"enable_thinking": false}
template_file = ""       # a chat template in place of the checkpoint's
raw_text = False         # the prompt as it stands in the file, without the chat template
control_tokens = False   # with raw_text: text that spells a control token is that token
skip_long = False        # leave out problems of a file that are too long, instead of refusing it
# rollout
prompts = 16             # prompts per step; 4 .. 128
group = 8                # samples per prompt; 2 .. 64, and 1 will do for ppo
max_new_tokens = 17      # longest response in tokens
temperature = 1.0        # of the sampler and every log-prob; 0.01 .. 100
stop = ""                # a response ends with the token that completes this text; or a JSON list
evict = "snapkv"         # none, snapkv, rkv, h2o, recent, random: the names in kvcache.EVICT
budget = 56              # prompt keys kept per layer and KV head, window and sinks included
spread = "uniform"       # of the budget over layers and KV heads: uniform, pyramid, adaptive
window = 20              # last prompt rows: kept, and their attention votes; 8 .. 64
sinks = 2                # first prompt keys that are never dropped, in tokens; 0 .. 16
pool = 7                 # width in keys over which votes are pooled; odd, 1 .. 21
pool_by = "max"          # max: the largest of neighbouring votes, or their mean
response_budget = 0      # response keys kept per layer and KV head, window included; 0: all
period = 128             # steps between evictions of response keys; 8 .. 512
# learner
objective = "grpo"       # grpo, ppo (a learned value as baseline), dpo (best against worst)
learner = "shadow"       # the policy that it updates: shadow (replays the mask), dense (ignores it)
correction = "none"      # weights for a sampler that was not the learner: tis, mis, sparse_rl
ratio_to = "learner"     # of the clipped ratio: the learner before its update, or the sampler
ref_kl = 0.0             # weight of the learner's KL to the initial model, k3; 0 .. 1
distill = 0.1            # weight of one policy's KL to its teacher, over the vocabulary; 0 .. 1
distill_to = "dense"     # the policy that has a teacher: dense or shadow
distill_by = "kl"        # or one_sided: where the teacher's log-prob of a sampled token is higher
distill_on = "reward"    # all, or reward: each response weighs its reward, within 0 .. 1
teacher = "other"        # the other policy, or initial: the same policy before training
norm = "sequence"        # loss reduction: sequence (GRPO), token (DAPO), constant (Dr. GRPO)
clip = 0.2               # lower clip of the ratio; in ppo also the clip of the values
clip_high = 0.2          # upper clip of the ratio; 0.28 in DAPO
updates = 1              # optimizer steps per rollout; 1 .. 4, and a lower lr with more
gamma = 1.0              # ppo: discount per token; 0.9 .. 1
lam = 1.0                # ppo: 1 trusts the reward alone, 0 the next value alone; 0.9 .. 1
value_coef = 0.1         # ppo: weight of the value loss; 0.05 .. 1
beta = 0.1               # dpo: strength of the pull to the initial weights; 0.01 .. 1
micro_rows = 16384       # packed rows per forward pass of the learner; lower it if memory runs out
checkpointing = False    # keep less for the backward pass, a fifth more time; for long prompts
# LoRA: small matrices are trained beside the large ones
lora_rank = 0            # of those matrices; 0: all weights are trained, else 4 .. 64
lora_alpha = 32.0        # their product is scaled by lora_alpha / lora_rank
lora_targets = "all"     # beside which: all, qkvo, or names such as q_proj,v_proj,down_proj
# optimizer: AdamW on fp32 masters
steps = 60
lr = 6e-4                # with LoRA about ten times that of full training
warmup = 5               # steps of linear warm-up
lr_schedule = "constant" # after it: constant, or linear or cosine down to lr_end at the last step
lr_end = 0.0             # a fraction of lr
beta2 = 0.95
weight_decay = 0.0
grad_clip = 1.0          # largest gradient norm
# evaluation: greedy, held-out problems, with the compressed cache and with the dense one
eval_every = 20          # steps; also before step 0 and at the end
eval_problems = 128      # how many
eval_final = 128         # how many before step 0 and in the last two; 1024 in experiments
eval_first = 0           # number of the first: others for choosing settings than for judging them
eval_batch = 128         # problems decoded at once
eval_evict = "auto"      # its compressed cache: auto (as evict; snapkv where that is none), a name
save_every = 20          # steps between checkpoints and between samples

DEFAULTS = {key: value for key, value in globals().items()
            if isinstance(value, (bool, int, float, str)) and key[0].islower()}
CHOICES = dict(
    spread=list(SPREAD), learner=["shadow", "dense"],
    distill_to=["dense", "shadow"], distill_by=["kl", "one_sided"], distill_on=["all", "reward"],
    teacher=["other", "initial"], pool_by=list(POOL),
    correction=["none", *CORRECTIONS], ratio_to=["learner", "sampler"], norm=list(NORMS),
    dtype=["auto", "float32", "bfloat16"],
    lr_schedule=["constant", "linear", "cosine"], tracker=["none", *TRACKERS])
# settings whose names are looked up, and where; module:name brings one's own in
TABLES = dict(evict=EVICT, eval_evict=EVICT, objective=OBJECTIVES, task=TASKS)
# settings that mean something to some objectives only; a class names those that it uses
OF_OBJECTIVES = ("correction", "ratio_to", "ref_kl", "norm", "clip", "clip_high", "updates",
                 "gamma", "lam", "value_coef", "beta")
CUTS = "it cuts the support the learner scores, so every ratio would be biased"
REFUSED = dict(top_p=CUTS, top_k=CUTS, min_p=CUTS)
MANY = 10**9
# Eviction says more on budget, window and sinks, an objective on group
RANGES = dict(
    prompts=(1, 10**6), group=(1, 10**6), prompt_tokens=(1, MANY), max_new_tokens=(1, MANY),
    period=(1, MANY), updates=(1, 1000), micro_rows=(1, MANY), steps=(1, MANY),
    eval_every=(1, MANY), eval_problems=(1, 10**6), eval_final=(1, 10**6), eval_batch=(1, 10**6),
    eval_first=(0, MANY), save_every=(1, MANY), warmup=(0, MANY), budget=(0, MANY),
    window=(0, MANY), sinks=(0, MANY), response_budget=(0, MANY), temperature=(1e-2, 100),
    ref_kl=(0, 100), distill=(0, 100), clip=(0, 1), clip_high=(0, 100), lr=(1e-12, 1),
    lr_end=(0, 1), gamma=(0, 1), lam=(0, 1), value_coef=(0, 100), beta=(1e-6, 100),
    beta2=(0, 0.9999), weight_decay=(0, 1), grad_clip=(1e-6, 1e6), seed=(0, 2**40),
    shots=(0, 1000), lora_rank=(0, 10**6), lora_alpha=(1e-6, 1e6))
MAY_CHANGE = {  # on resume; the last three because a run may end for want of memory
    "resume", "overwrite", "dry_run", "tracker", "out_dir", "device", "steps", "eval_every",
    "save_every", "eval_batch", "micro_rows", "checkpointing"}
# parameters; smaller models gain little or no time by bfloat16 (docs/reproduce.md), so dtype=auto
# leaves them in float32
BFLOAT16_FROM = 30_000_000
ANSWERS = dict(question=str, answer=str, compressed=str, dense=str, reward_compressed=float,
               reward_dense=float)
EVALUATION = dict(step=int, eval_compressed=float, eval_dense=float)
MEMORY = dict(  # of a run, as a checkpoint keeps it
    evals=[EVALUATION], answers=(ANSWERS, ANSWERS), kv=dict(kept=int, dense=int, dense_shared=int))
MEMORY.update({"best?": EVALUATION, "idle?": int, "in_a_row?": int, "wandb?": str, "reward?": str})
NOT_LOADED = ("out of memory while the model was loaded, before the first step: it needs a smaller "
              "model, --dtype=bfloat16 on a card that has it, or more memory")


def main(argv):
    me = sys.modules[__name__]  # for support/dry_run.py
    with one_line_errors(ValueError, OSError, MemoryError), memory_errors(NOT_LOADED):
        c, run, net, tok, problems, objective, opt, teacher = setup(argv)
        if c.dry_run:
            dry_run_of(me, c, net, problems, learner=(objective, opt, teacher))
            return
    stops = stop_strings(c.stop)
    # a full disk, a reward that is no number, an update that is not finite, too little memory
    with (one_line_errors(OSError, ValueError, FloatingPointError, MemoryError, also=run.kept),
          run.saving_on(RewardError, opt),
          saving_if_memory_runs_out(run, opt, PHASES, functools.partial(savings, me))):
        while True:
            # 0. evaluate on held-out problems, also before the first step and after the last; then
            # save, as a checkpoint counts what stands in the log before it
            if run.step % c.eval_every == 0 or run.finished:
                evaluate_both(c, run, net, tok, problems=problems)
            save(c, run, net, opt)
            if run.finished or run.interrupted:
                break
            began = time.monotonic()

            # 1. problems, numbered through the run; the number is the position in the data
            mine = parallel.share(c.prompts)
            number = run.step * c.prompts + mine.start
            batch, prompts = problems.get("train", range(number, number + len(mine)))

            # 2. roll out under the compressed cache, which logs what it drops
            say(f"step {run.step}: rollout")
            rollout = generate(
                net, prompts, c.group, c.max_new_tokens, temperature=c.temperature,
                eviction=eviction_of(c), stop_ids=tok.stop_ids, seed=c.seed * 1_000_003 + run.step,
                part=(mine.start, c.prompts))

            # 3. reward the decoded text; what was sampled is never encoded again
            rollout, rewards, parts = rewarded(tok, rollout, batch, first=number, stops=stops)
            sampled = time.monotonic()

            # 4. advantages, replay under the log, loss, optimizer step
            lr = learning_rate(c, run.step)
            log = update(net, opt, objective, rollout, rewards=rewards, c=c, lr=lr,
                         teacher=teacher)

            # 5. log
            log = dict(step=run.step, **facts(rollout, rewards, parts), **log, lr=lr,
                       rollout_s=sampled - began, learn_s=time.monotonic() - sampled)
            log["tokens_per_s"] = log["tokens"] / max(log["rollout_s"], 1e-9)
            run.log("step", log)
            progress(show(log), end=f"eta {run.minutes_left():.1f} min")
            if run.step % c.save_every == 0 or run.step == c.steps - 1:
                write_samples(run, tok, batch[0], rollout=rollout, rewards=rewards)
            run.memory["kv"] = rollout.kv
            watch_idle(run, tok, batch[0], log=log, rollout=rollout, rewards=rewards)
            run.step += 1
        if run.finished and not run.interrupted:
            finish(run, net, opt)
            return
    run.leave()


def rewarded(tok, rollout, batch, first, stops=()):
    """Judge the responses to a batch of training problems. first: number of the first problem.
    -> of all ranks: the rollout, cut at stop strings, rewards (B, G), numbers of responses by
    name"""
    rollout = cut_at(tok, rollout, stops)

    def work():
        return judge(batch, texts_of(tok, rollout, stops), "training", first=first,
                     tokens=ids_of(rollout))

    rewards, parts = parallel.attempt(RewardError, work)
    rewards = torch.tensor(rewards, device=rollout.tokens.device)         # (prompts, G)
    rollouts, rewards, parts = zip(*parallel.gather((rollout, rewards, parts)))
    return join(rollouts), torch.cat(rewards), join_parts(parts)


def join_parts(several):
    """Dicts of lists, one of each rank, None of one that judged nothing, as one. Raises ValueError
    where their names differ."""
    several = [parts for parts in several if parts is not None] or [{}]
    for parts in several:
        if set(parts) != set(several[0]):
            here, there = (", ".join(each) or "none" for each in (parts, several[0]))
            raise ValueError(f"the reward has the names {here} on one rank and {there} on another: "
                             "must be the same in each call")
    return {name: sum((parts[name] for parts in several), []) for name in several[0]}


def learning_rate(c, step):
    """Of one step: a linear warm-up, then constant or down to lr_end * lr at the last step."""
    warm = min(1.0, (step + 1) / (c.warmup + 1))
    if c.lr_schedule == "constant":
        return c.lr * warm
    done = min(1.0, max(0, step - c.warmup) / max(1, c.steps - 1 - c.warmup))
    left = 1 - done
    if c.lr_schedule == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    return c.lr * warm * (c.lr_end + (1 - c.lr_end) * left)


def update(net, opt, objective, rollout, rewards, c, lr, teacher=None):
    """Learn from one rollout: c.updates optimizer steps. rewards (B, G); teacher: of distillation,
    a frozen model, else the other policy -> numbers for the log. Raises FloatingPointError, before
    the step, if a gradient is not finite."""
    policies = policies_of(c)

    def score(rollout, model=net):
        """What replay returns for the learner's policy, of a whole rollout, without gradients."""
        say("scoring")
        outs = []
        for indices in micro_batches(rollout, len(policies), c.micro_rows, share=True):
            with torch.no_grad():
                outs.append(replay(model, rollout.select(indices), (c.learner,),
                                   value=objective.value if model is net else None))
        outs = sum(parallel.gather(outs), [])  # of all ranks
        return {name: torch.cat([out[name] for out in outs]) for name in outs[0]}

    # advantages, or whatever the objective learns from: of the whole batch, however it is cut
    rollout, batch, log = objective.prepare(replace(rollout, rewards=rewards), rewards, score)
    if not rollout.prompts:  # nothing to learn from: the weights stay as they are
        return dict(log, loss=0.0, kl=0.0, clip_frac=0.0, grad_norm=0.0)

    parts = micro_batches(rollout, len(policies), c.micro_rows, share=True)
    old = {}   # micro-batch -> the learner's log-probs before the first update
    done = []  # the Metrics of each update
    for _ in range(c.updates):
        metrics = Metrics(clip_frac=0.0, kl=0.0)
        for i, indices in enumerate(parts):
            say(f"update {len(done) + 1}/{c.updates}, micro-batch {i + 1}/{len(parts)}")
            part = rollout.select(indices)
            x = {name: values[indices] for name, values in batch.items()}

            # one forward pass under the logged mask scores both policies, (B, G, R) each
            out = replay(net, part, policies, distill_to=student_of(c), stats=not done,
                         checkpointing=c.checkpointing, value=objective.value, teacher=teacher)

            # the ratio to the learner is 1 on the first update: GRPO's loss is 0, not its gradient
            loss, numbers = objective.loss(
                out, part=part, batch=x, old=old.get(i), whole=rollout)
            if c.distill:
                scale = x["scale"]  # the distance of student and teacher is reduced like the loss
                if c.distill_on == "reward":
                    scale = scale * part.rewards.clamp(0, 1)[..., None]   # (B, G, R)
                kl = (scale * distance(out, c)).sum()
                loss = loss + c.distill * kl
                metrics.add(kl=kl.item())
            loss.backward()

            metrics.add(loss=loss.item(), **numbers)
            logp = out[c.learner].detach()
            old.setdefault(i, logp)
            if not done:
                seen = {name: out[name] for name in ("entropy", "accept") if name in out}
                metrics.collect(part.mask, gap=(logp - part.logp_roll).abs(), **seen)
        metrics = Metrics.together(parallel.gather(metrics))
        metrics.add(grad_norm=opt.step(lr, c.grad_clip))
        done.append(metrics)
    opt.changed = False  # these weights are whole
    return dict(log, **summary(done))


def policies_of(c):
    """The policies that the learner scores."""
    if c.distill and (c.teacher == "other" or c.distill_to != c.learner):
        # replay gives entropy and values of the last
        return ("dense", "shadow") if c.learner == "shadow" else ("shadow", "dense")
    return (c.learner,)


def student_of(c):
    """The policy whose KL to its teacher replay computes, or None."""
    return c.distill_to if c.distill and c.distill_by == "kl" else None


def distance(out, c):
    """How far the student is from its teacher, by token (B, G, R). one_sided: max(log-prob of the
    teacher - of the student, 0) of the sampled token, as the first author's code estimates it."""
    if c.distill_by == "kl":
        return out["kl"]
    teacher = "shadow" if c.distill_to == "dense" else "dense"
    return (out[teacher].detach() - out[c.distill_to]).relu()


def summary(done):
    """Metrics of a rollout's updates -> numbers for the log: those of the first update, but those
    of the ratio, which in it is mostly 1 by definition, are the last one's."""
    first, last = done[0], done[-1]
    log = dict(first.sums)
    log.update({name: last.sums[name] for name in ("clip_frac", "ratio", "kl_old")
                if name in last.sums})
    gap = first.tokens("gap")
    log.update(gap=gap.mean().item(), gap_max=gap.max().item())
    log.update(entropy=first.tokens("entropy").mean().item())
    if first.has("accept"):
        accept = first.tokens("accept")
        log.update(accept=accept.mean().item(), accept_p05=quantile(accept, 0.05).item())
    return log


def micro_batches(rollout, copies, limit, share=False):
    """Indices of the prompts of each micro-batch: as many groups as fit into `limit` packed rows,
    at least one. copies: of each response, one per policy. share: only this rank's prompts."""
    parts, used, n = [], 0, len(rollout.prompts)
    rows = (rollout.lengths - 1).sum(1).tolist()
    for b in parallel.share(n) if share else range(n):
        size = len(rollout.prompts[b]) + copies * rows[b]
        if not parts or used + size > limit:
            parts.append([])
            used = 0
        parts[-1].append(b)
        used += size
    return parts


def ids_of(rollout):
    """The tokens of each response: B lists of G lists of ids."""
    return [[tokens[:n] for tokens, n in zip(*group)]
            for group in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]


def decode(tok, rollout, special=True):
    """The text of each response: B lists of G. special: with stop tokens and the like."""
    return [[tok.decode(ids, special=special) for ids in group] for group in ids_of(rollout)]


def cut_at(tok, rollout, stops):
    """The rollout whose responses end with the token whose text completes a stop string: what
    stands behind is neither rewarded nor learned from."""
    if not stops:
        return rollout
    plain = functools.partial(tok.decode, special=False)
    ends = [[stop_end(plain, ids, stops) for ids in group] for group in ids_of(rollout)]
    return rollout.cut(torch.tensor(ends, device=rollout.lengths.device))


def texts_of(tok, rollout, stops):
    """What a reward gets of each response: no stop tokens, nothing from a stop string on."""
    return [[before_stop(text, stops) for text in group]
            for group in decode(tok, rollout, special=False)]


def facts(rollout, rewards, parts):
    """What a rollout says of itself, for the log. parts: of rewards, by name."""
    equal = (rewards == rewards[:, :1]).all(1)                            # (B,)
    log = dict(
        reward=rewards.mean().item(), equal=equal.float().mean().item(),
        truncated=1 - rollout.stopped.float().mean().item(), tokens=rollout.lengths.sum().item(),
        length=rollout.lengths.float().mean().item(), **means(parts))
    log.update({f"kv_{name}": size for name, size in rollout.kv.items()})
    if rewards.is_cuda:
        log["peak_gb"] = max(parallel.gather(torch.cuda.max_memory_allocated() / 1e9))
    return log


def evaluate(net, tok, problems, c, eviction, n, run=None):
    """Greedy reward on the first n held-out problems under `eviction`, the same for every seed.
    -> dict of reward, length (mean, in tokens), samples (problem, response, reward of each), a
    reward_NAME for each number that a function of one's own names and, if keys are evicted, accept
    and accept_p05: how much of the dense policy the sparse one covers, the sum over the vocabulary
    of min(p_dense, p_shadow), mean and 5th percentile over tokens. None if a signal comes between
    two batches."""
    work = functools.partial(
        evaluate_share, net, tok, problems, c=c, eviction=eviction, n=n, run=run)
    found = parallel.gather(parallel.attempt(RewardError, work))
    say("")
    if None in found:
        return None
    samples, tokens, overlap, parts = zip(*found)
    samples, overlap = sum(samples, []), sum(overlap, [])
    rewards = [x for _, _, x in samples]
    log = dict(reward=sum(rewards) / n, length=sum(tokens) / n, samples=samples,
               **means(join_parts(parts)))
    if overlap:
        overlap = torch.cat(overlap)
        log.update(accept=overlap.mean().item(), accept_p05=quantile(overlap, 0.05).item())
    return log


def evaluate_share(net, tok, problems, c, eviction, n, run):
    """This rank's share of `evaluate`. -> samples, number of tokens, overlaps of batches of tokens,
    what else the reward returns by name; None if a signal comes between two batches"""
    dense, stops = eviction.method == "none", stop_strings(c.stop)
    samples, overlap, tokens, parts = [], [], 0, {}
    mine = parallel.share(n)
    for start in range(mine.start, mine.stop, c.eval_batch):
        if run and run.signal:
            return None
        say(f"eval ({'dense' if dense else eviction.method} cache) {start}/{n}")
        end = min(start + c.eval_batch, mine.stop)
        batch, prompts = problems.get("eval", range(start, end))
        r = generate(net, prompts, 1, c.max_new_tokens, temperature=0.0, eviction=eviction,
                     stop_ids=tok.stop_ids, seed=0)
        r = cut_at(tok, r, stops)
        judged, found = judge(batch, texts_of(tok, r, stops), "held-out", first=start,
                              tokens=ids_of(r))
        for name, xs in found.items():
            parts.setdefault(name, []).extend(xs)
        for problem, (text,), (x,) in zip(batch, decode(tok, r), judged):
            samples.append((replace(problem, rule=str(problem.rule)), text, x))
        tokens += r.lengths.sum().item()
        for indices in micro_batches(r, 2, c.micro_rows):
            if not dense:
                with torch.no_grad():
                    out = replay(net, r.select(indices), stats=True)
                overlap.append(out["accept"][r.mask[indices]].cpu())
    return samples, tokens, overlap, parts if samples else None


def problems_at(c, step):
    """How many held-out problems the evaluation at a step is asked for. The one before the first
    step and the last two, whose mean is the result of a run, are the precise ones."""
    one_before_last = (c.steps - 1) // c.eval_every * c.eval_every
    return c.eval_final if step == 0 or step >= one_before_last else c.eval_problems


def evaluate_both(c, run, net, tok, problems):
    """Evaluate with a compressed and with the dense cache, once a step; log and print it, unless a
    signal cuts it short: then it is done again after a resume."""
    evals = run.memory.setdefault("evals", [])
    if evals and evals[-1]["step"] == run.step:
        return
    n = min(problems_at(c, run.step), problems.n_eval)
    sparse = evaluate(net, tok, problems, c, eviction=eviction_of_evaluation(c), n=n, run=run)
    dense = evaluate(net, tok, problems, c, eviction=Eviction("none"), n=n, run=run)
    if sparse is None or dense is None:
        return
    e = dict(
        step=run.step, problems=n, eval_compressed=sparse["reward"], eval_dense=dense["reward"],
        eval_accept=sparse["accept"], eval_accept_p05=sparse["accept_p05"],
        eval_length=sparse["length"], eval_length_dense=dense["length"])
    for cache, found in (("compressed", sparse), ("dense", dense)):
        e.update({name.replace("reward", f"eval_{cache}", 1): x for name, x in found.items()
                  if name.startswith("reward_")})
    best = run.memory.get("best")
    if best is None or e["eval_compressed"] > best["eval_compressed"]:
        run.memory["best"] = e
    evals.append(e)
    for name, found in (("compressed", sparse), ("dense", dense)):
        lines = "".join(sample(*response) for response in found["samples"])
        run.append("samples.txt", f"--- eval {run.step}, {name} cache\n{lines}")
    texts = side_by_side(sparse["samples"], dense["samples"])
    run.memory.setdefault("answers", [texts[0], None])[1] = texts[0]  # before and after
    run.log("eval", dict(e, texts=texts))
    named = "".join(f"{name} {x:.3f}, " for name, x in e.items()
                    if name.startswith(("eval_compressed_", "eval_dense_")))
    tell(f"eval {run.step:4d} | held-out reward ({n} problems), greedy: "
         f"compressed cache {e['eval_compressed']:.3f}, dense cache {e['eval_dense']:.3f}, {named}"
         f"accept {e['eval_accept']:.3f} p05 {e['eval_accept_p05']:.3f}")


def side_by_side(sparse, dense, n=4):
    """The first n held-out problems with their responses under either cache, for the log."""
    texts = []
    for (problem, compressed, earned), (_, text, x) in list(zip(sparse, dense))[:n]:
        texts.append(dict(
            question=problem.text.strip().splitlines()[-1][:500], answer=problem.answer,
            compressed=compressed, reward_compressed=earned, dense=text, reward_dense=x))
    return texts


def save(c, run, net, opt):
    """Write the checkpoint where it is due, then the model where it is the best so far: a run that
    is cut between the two comes back to the same step and writes it again."""
    run.agree()
    best = run.memory.get("best", {})
    is_best = best.get("step") == run.step
    due = is_best or run.step % c.save_every == 0 or run.finished or run.interrupted
    if due and run.unsaved:
        parallel.check_equal(opt.masters, "the weights")
        run.save(opt.state())
    if is_best:
        write_models(run, net, opt, names=("best", "adapter-best"), reward=best["eval_compressed"])
    parallel.gather(None)  # it is there for all ranks


def write_models(run, net, opt, names, reward):
    """Write the model and, with LoRA, what it adds to the initial one. names: of their folders."""
    run.write_model(names[0], net, reward)
    if run.c.lora_rank:
        run.write_model(names[1], opt, reward)


def check_best(run, names=("best",)):
    """After a resume: forget the best evaluation where best/ holds the model of another step, as it
    does if a later checkpoint was given up, or none, and no more is known of it."""
    evals, best = run.memory.get("evals", []), run.memory.get("best")
    if best and best["step"] in (run.step, step_of(run.path(""), names)):
        return
    if best:
        places = " with ".join(str(run.path(name)) for name in names)
        tell(f"{places} does not hold the model of step {best['step']}, the best so far: the best "
             "is looked for anew from here on")
        del run.memory["best"]
    if evals and evals[-1]["step"] == run.step:  # its model is here
        run.memory["best"] = evals[-1]


def eviction_of(c, method=None):
    """The settings that say which keys a rollout keeps."""
    method = method or c.evict
    responses = None if method == "none" else c.response_budget or None
    return Eviction(
        method=method, budget=c.budget, window=c.window, sinks=c.sinks, pool=c.pool,
        pool_by=c.pool_by, response_budget=responses, period=c.period, spread=c.spread)


def eviction_of_evaluation(c):
    """Those of the held-out evaluation with a compressed cache, which is one for all arms that are
    to be compared: the method may be named for those that train without eviction."""
    if c.eval_evict != "auto":
        return eviction_of(c, c.eval_evict)
    return eviction_of(c, "snapkv" if c.evict == "none" else c.evict)


def settings(argv):
    """-> namespace of all keys, checked for what can be known before a model is loaded; --help
    ends the program. Raises ValueError."""
    help_if_asked(argv, __doc__, ("settings", __file__, DEFAULTS))
    c = SimpleNamespace(**configure(DEFAULTS, argv, CHOICES, REFUSED))
    check_ranges(c, RANGES)
    bring_in(c)
    eviction_of(c)  # checks itself
    check_objective(c)
    if c.task not in TASKS and not is_file(c.task) and (os.path.exists(c.task) or "." in c.task):
        raise ValueError(f"task {shown(c.task)}: a file must end in .jsonl")
    if c.task not in TASKS and not is_file(c.task):
        raise ValueError(f"unknown task {shown(c.task)}: one of {', '.join(TASKS)}, a .jsonl "
                         "file, or gsm8k:FOLDER")
    stop_strings(c.stop)
    check_files(c)
    check_reward(c.reward)
    check_lora(c, DEFAULTS)
    if not c.out_dir:
        raise ValueError("out_dir is empty")
    check_tracker(c.tracker)
    if c.lr_end and c.lr_schedule == "constant":
        raise ValueError(f"lr_end={c.lr_end}: lr_schedule=constant goes nowhere; it takes linear "
                         "or cosine")
    if c.distill and c.distill_by == "one_sided" and c.teacher == "initial":
        raise ValueError("distill_by=one_sided compares the two policies of one model: it takes "
                         "teacher=other")
    return c


def bring_in(c):
    """Enter what settings name as module:name into TABLES. Raises ValueError for a name that is in
    no table, and for what cannot be what it is named as."""
    for key, table in TABLES.items():
        name = getattr(c, key)
        if key in brought_in(c):
            found, _ = find_own(name, key)
            takes = "two functions, what makes a problem and what judges a text"
            if key == "task" and not (isinstance(found, tuple) and len(found) == 2
                                      and all(map(callable, found))):
                raise ValueError(f"task {name}: must be a pair of {takes}, it is {found!r:.80}")
            if not callable(found) and key != "task":
                raise ValueError(f"{key} {name}: must be callable, it is {found!r:.80}")
            table[name] = found
        known = [each for each in table if key != "eval_evict" or each != "none"]
        if key == "eval_evict":
            known.insert(0, "auto")
        if key != "task" and name not in known:
            raise ValueError(f"{key} must be one of {', '.join(known)}, or module:name, got "
                             f"{shown(name)}")


def brought_in(c):
    """The settings that name something of one's own."""
    return [key for key in TABLES
            if is_own(getattr(c, key)) and not (key == "task" and is_file(c.task))]


def check_objective(c):
    """Raise ValueError for a setting that the objective does not use: its class names those that it
    does (`uses`). Whatever else it has to say, its `check` says."""
    objective = OBJECTIVES[c.objective]
    uses = getattr(objective, "uses", ())
    for key in OF_OBJECTIVES:
        if key not in uses and getattr(c, key) != DEFAULTS[key]:
            known = ", ".join(uses) or "none of such settings"
            raise ValueError(f"{key}={getattr(c, key)}: objective={c.objective} does not use it; "
                             f"it uses {known}")
    if hasattr(objective, "check"):
        objective.check(c)


def setup(argv):
    """Whatever can be wrong with a request is found here, before out_dir is touched.
    -> settings, run (None of a dry run), model, tokenizer, problems, objective, optimizer, teacher
    or None"""
    c = settings(argv)
    eviction_of_evaluation(c)  # checks itself
    choose_device(c)
    check_ranks(c)
    folder = find_checkpoint(c.model)
    choose_dtype(c, folder)
    rule = find_reward(c.reward)
    run = None
    if not c.dry_run:
        paths = files_of(c.task, c.eval_task)
        if c.template_file:
            paths["template_file"] = [c.template_file]
        run = Run(c, MAY_CHANGE, identity_of(c, folder), shapes=MEMORY,
                  inputs=dict(model=folder, **{key: found[0] for key, found in paths.items()}))
    if run and c.template_file:
        with open(c.template_file, "rb") as f:
            run.beside["chat_template.jinja"] = f.read()  # so that model/ and best/ speak it
    tok = Tokenizer(folder, template_file=c.template_file)

    def load():
        model = Transformer.from_pretrained(folder, device=c.device, dtype=getattr(torch, c.dtype))
        model.use_tokens(len(tok), tok.absent)
        return model

    @functools.cache
    def initial():
        """The model as it was before training, also where a run goes on; frozen."""
        if c.lora_rank:
            return frozen_base(net, c)
        return load().requires_grad_(False)

    net = load()
    if c.prompt_tokens + c.max_new_tokens > net.config.max_pos:
        raise ValueError(f"prompt_tokens {c.prompt_tokens} + max_new_tokens {c.max_new_tokens} "
                         f"exceed the model's context of {net.config.max_pos}")
    check_memory(c, net)
    problems = problems_of(c, tok, rule, n_eval=max(c.eval_problems, c.eval_final))
    objective = OBJECTIVES[c.objective](net, c, initial)
    teacher = initial() if c.distill and c.teacher == "initial" else None
    if c.lora_rank:
        opt = LoRA(net, c, objective.value, base=initial())
    else:
        opt = Masters(net, c, objective.value)
    if run:
        if run.learner is not None:
            opt.load(run.learner, run.path("ckpt.pt"))
        run.open()
        check_best(run, ("best", "adapter-best") if c.lora_rank else ("best",))
        run.memory = parallel.gather(run.memory)[0]  # rank 0's: it decides when to save
        if callable(rule):
            run.watch("reward", rule.file, rule.fingerprint)
    introduce(c, folder, net, problems=problems, opt=opt)
    if run and run.writes and c.tracker != "none":
        done = run.memory.get("evals", [])[-1:]
        run.tracker = Tracker(run, already=[e for e in done if e["step"] == run.step])
    return c, run, net, tok, problems, objective, opt, teacher


def check_ranks(c):
    """Raise ValueError for what several ranks cannot do."""
    ranks = parallel.size()
    if ranks > c.prompts:
        raise ValueError(f"prompts={c.prompts} leave some of {ranks} ranks without one: raise "
                         "prompts, or start fewer processes")
    if ranks > 1 and c.dry_run:
        raise ValueError("dry_run=True measures one process: say it without torchrun, with "
                         f"--prompts={largest_share(c)}, the share of one of {ranks} ranks")


def largest_share(c):
    """The most prompts that a rank samples in a step."""
    return -(-c.prompts // parallel.size())


def problems_of(c, tok, rule, n_eval):
    """The Problems that the settings name. rule: a reward's name, or the function it stands for."""
    return Problems(
        c.task, tok, seed=c.seed, tokens=c.prompt_tokens, n_eval=n_eval,
        template=parse_object(c.template or "{}", "template"), skip_long=c.skip_long,
        eval_task=c.eval_task, shots=c.shots, raw_text=c.raw_text, rule=rule,
        eval_first=c.eval_first, control_tokens=c.control_tokens)


def choose_dtype(c, folder):
    """Replace "auto" in c.dtype by what suits device and size of the model in folder. Raises
    ValueError for bfloat16 on a card that only emulates it."""
    cuda = c.device.startswith("cuda")
    native = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    if c.dtype == "bfloat16" and not native:
        raise ValueError(f"dtype=bfloat16: {torch.cuda.get_device_name()} has no such arithmetic, "
                         "use --dtype=float32")
    if c.dtype != "auto":
        return
    with torch.device("meta"):  # shapes alone
        model = Transformer(read_config(os.path.join(folder, "config.json"), c.device))
    large = sum(p.numel() for p in model.parameters()) >= BFLOAT16_FROM
    c.dtype = "bfloat16" if large and cuda and native else "float32"


def identity_of(c, folder):
    """{setting: fingerprint of the files that it names}: what they hold is part of a run. The
    weights that it starts from are so only where they are needed again."""
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
             "chat_template.jinja"]
    if needs_initial(c):
        names += sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    found = dict(model=fingerprint(*(os.path.join(folder, name) for name in names)))
    found.update({key: fingerprint(*paths)
                  for key, paths in files_of(c.task, c.eval_task).items()})
    if c.template_file:
        found["template_file"] = fingerprint(c.template_file)
    found.update({key: fingerprint(find_own(getattr(c, key), key)[1]) for key in brought_in(c)})
    return found


def needs_initial(c):
    """Whether the model as it was before training is needed throughout."""
    return (c.lora_rank > 0 or c.objective == "dpo" or c.ref_kl > 0
            or (c.distill > 0 and c.teacher == "initial"))


def response_keys(c):
    """Most keys of a response that are held at once, per layer and KV head."""
    own = c.max_new_tokens - 1
    if c.evict == "none" or not c.response_budget:
        return own
    return min(own, c.response_budget + c.period)


def check_memory(c, net):
    """Raise ValueError for more samples at a time than memory can hold: of each at least the KV
    and the log of its response and one row of logits."""
    log = c.max_new_tokens * 4 * (3 + net.config.n_layer * net.config.n_kv_head)
    size = response_keys(c) * net.config.kv_bytes_per_token(net.dtype) + log + 4 * net.vocab_used
    there = memory_of(c.device)
    fit = int(min(there, 1e18)) // size
    held_out = max(c.eval_problems, c.eval_final)
    asked = dict(group=c.group, prompts=largest_share(c) * c.group,
                 eval_batch=min(c.eval_batch, held_out))
    for key, samples in asked.items():
        if samples > fit:
            most = fit // c.group * parallel.size() if key == "prompts" else fit
            raise ValueError(f"{key} {getattr(c, key)} is too much: {samples} samples at a time "
                             f"take at least {samples * size / 1e9:.0f} GB, {c.device} has "
                             f"{there / 1e9:.0f} GB; {key} {most} might fit")


def introduce(c, folder, net, problems, opt):
    """Print the facts that decide speed and memory."""
    cuda = c.device.startswith("cuda")
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    path = "Triton kernel" if cuda else "PyTorch reference"
    held = "LoRA" if c.lora_rank else "masters"
    tell(f"torch {torch.__version__}, {where}, {c.dtype} weights, fp32 {held}, attention by the "
          f"{path}")
    per_token = net.config.kv_bytes_per_token(net.dtype)
    if parallel.size() > 1:
        tell(f"{parallel.size()} ranks share the prompts of each step")
    size = sum(p.numel() for p in net.parameters()) / 1e6
    tell(f"{folder}: {net.config.arch}, {size:.2f}M parameters, {per_token:,} KV bytes per token")

    L = net.config.n_layer
    slots = sum(eviction_of(c).slots(layer, L, c.prompt_tokens) for layer in range(L))  # per prompt
    keys = c.prompt_tokens if c.evict == "none" else min(c.budget, c.prompt_tokens)
    how = c.evict if c.spread == "uniform" else f"{c.evict}, on average, spread {c.spread}"
    samples = c.prompts * c.group
    dense = samples * (c.prompt_tokens + c.max_new_tokens - 1) * per_token
    kept = (c.prompts * slots // L + samples * response_keys(c)) * per_token
    tell(f"{c.task}: prompts of up to {c.prompt_tokens} tokens, {keys} keys kept per layer and KV "
          f"head ({how}); a rollout of {c.prompts} x {c.group} samples holds up to {kept:,} KV "
          f"bytes, {dense:,} if each kept all keys")
    for note in problems.notes:
        tell(note)
    e = eviction_of(c)
    if c.evict != "none" and not e.evicts(problems.longest, c.max_new_tokens, n_layer=L):
        tell(f"nothing is evicted: the longest prompt has {problems.longest} tokens, budget is "
             f"{c.budget}")
    if c.reward != "auto":
        tell(f"reward by {problems.rule}")
    if c.lora_rank:
        tell(f"LoRA of rank {c.lora_rank} on {', '.join(targets_of(c))}: {opt.trained / 1e6:.2f}M "
             "parameters are trained; these matrices are held twice, as loaded and as trained")
    elif needs_initial(c):
        tell("a frozen copy of the initial model is held beside it")
    # other norms weigh long responses more, corrections weigh tokens: the loss then is not 0
    if (c.objective, c.correction, c.norm, c.ratio_to) == ("grpo", "none", "sequence", "learner"):
        tell("the policy term of the loss is 0 in value, not in gradient: the ratio is 1 on a "
              "rollout's first update")


def show(log):
    """One line per step. gap: learner against sampler; accept: overlap of the two policies, mean
    and 5th percentile; ent: entropy of the learner's policy; clip: clipped tokens; trunc: responses
    cut short; equal: groups whose samples all earned the same; grad: gradient norm; seconds of
    rollout + update. weight, rejected: mean weight of a correction, tokens that it drops; value,
    value_loss: of ppo; pairs, margin: of dpo; ref_kl: KL to the initial model."""
    parts = [f"step {log['step']:4d}", f"reward {log['reward']:.3f}",
             f"loss {log['loss']:+.4f} kl {log['kl']:.4f}"]
    if "gap" in log:
        parts.append(f"gap {log['gap']:.1e} max {log['gap_max']:.1e}")
        if "accept" in log:
            parts.append(f"accept {log['accept']:.3f} p05 {log['accept_p05']:.3f}")
        parts.append(f"ent {log['entropy']:.2f}")
    else:
        parts.append("nothing replayed")
    parts.append(f"clip {log['clip_frac']:.2f} trunc {log['truncated']:.2f} "
                 f"equal {log['equal']:.2f}")
    for name in ("weight", "rejected", "value", "value_loss", "pairs", "margin", "ref_kl"):
        if name in log:
            parts.append(f"{name} {log[name]:.3f}")
    parts += [f"{name} {x:.3f}" for name, x in log.items() if name.startswith("reward_")]
    parts.append(f"grad {log['grad_norm']:.2f}")
    parts.append(f"{log['rollout_s']:.1f}+{log['learn_s']:.1f} s")
    return " | ".join(parts)


def sample(problem, text, x):
    """A response with its reward x, for the eye."""
    return f">>> {text!r} (answer {problem.answer}) reward {x:.2f}\n"


def write_samples(run, tok, problem, rollout, rewards):
    """Two responses to the first problem of a rollout, behind the prompt as the model got it."""
    prompt = tok.decode(rollout.prompts[0])
    texts, = decode(tok, rollout.select([0]))
    for text, x in list(zip(texts, rewards[0].tolist()))[:2]:
        run.append("samples.txt", f"--- step {run.step}\n{prompt}\n{sample(problem, text, x)}")


IDLE = 20  # steps in a row without a gradient after which a run says so


def watch_idle(run, tok, problem, log, rollout, rewards):
    """Count the steps whose gradient was exactly 0; where many follow each other, say once what
    that may mean."""
    memory = run.memory
    if log["grad_norm"]:
        memory["in_a_row"] = 0
        return
    memory["idle"] = memory.get("idle", 0) + 1
    memory["in_a_row"] = memory.get("in_a_row", 0) + 1
    if memory["in_a_row"] == IDLE:
        texts, = decode(tok, rollout.select([0]))
        shown = "".join("  " + sample(problem, text[:200], x)
                        for text, x in list(zip(texts, rewards[0].tolist()))[:2])
        why = "is the task too easy?" if rewards.mean() > 0 else (
            "do the responses have the form that the reward asks for, is the task too hard?")
        tell(f"{IDLE} steps in a row have changed nothing: in each, all samples of a prompt "
             f"earned the same ({rewards.mean():.3f} on average now); {why} For example:\n"
             f"{shown.rstrip()}")


def finish(run, net, opt):
    """Save the model in Hugging Face format with its tokenizer and say what was reached."""
    evals, best, kv = run.memory["evals"], run.memory["best"], run.memory["kv"]
    first, last = evals[0], evals[-1]
    write_models(run, net, opt, names=("model", "adapter"), reward=last["eval_compressed"])
    tell(f"model saved to {run.path('model')}: step {last['step']}, held-out reward "
         f"{last['eval_compressed']:.3f} with the compressed cache")
    what = f"step {best['step']}, {best['eval_compressed']:.3f}"
    if best["eval_compressed"] == 0:
        what = f"none of them earned anything, so it is the first, of step {best['step']}"
    tell(f"best of {len(evals)} evaluations saved to {run.path('best')}: {what}")
    shared = kv["dense_shared"]
    tell(f"KV cache of a rollout: {kv['kept']:,} bytes kept, {kv['dense']:,} dense "
         f"(1/{kv['dense'] / kv['kept']:.1f}), {shared:,} dense with each prompt shared by its "
         f"group (1/{shared / kv['kept']:.1f})")
    idle = run.memory.get("idle", 0)
    if idle:
        so = "nothing was learned" if idle == run.step else "these steps changed nothing"
        tell(f"in {idle} of {run.step} steps the gradient was exactly 0, as where all groups earn "
             f"the same throughout: {so}")
    show_answers(*run.memory["answers"])
    tell("held-out reward with the compressed cache: "
         f"{first['eval_compressed']:.3f} -> {last['eval_compressed']:.3f} "
         f"(dense cache {first['eval_dense']:.3f} -> {last['eval_dense']:.3f})")


def show_answers(before, after):
    """Print the first held-out problem's answers from both caches, before and after training."""
    tell(f"the first held-out problem: {before['question']}")
    tell(f"  right answer          {before['answer']}")
    for when, found in (("before", before), ("after", after)):
        for cache in ("compressed", "dense"):
            tell(f"  {when + ', ' + cache:20}  {found[cache].strip()[:200]!r}, reward "
                 f"{found['reward_' + cache]:.2f}")


if __name__ == "__main__":
    with parallel.ranks():
        main(sys.argv[1:])
