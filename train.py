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

Each response's KL is multiplied by its reward (distill_on), so a wrong answer teaches nothing. The
model as it was before training can be the teacher instead (teacher = "initial").

Read `main` for the loop and `update` for the loss; run/ holds what surrounds them. The usual
repair, weights for a sampler that was not the learner (correction), is here too, to be compared
with. Under torchrun several ranks share the prompts of each step and the gradient
(support/parallel.py); of a single process, `share` is everything. All randomness of a step follows
from (seed, step), whichever rank samples, so a checkpoint needs no RNG state beside those numbers.
"""
import functools
import math
import os
import sys
import time
from types import SimpleNamespace

from data.tasks import stop_strings
from grpo import GRPO, replay
from objectives.dpo import DPO
from objectives.ppo import PPO
from rollout import generate
from run.dry_run import dry_run as measure
from run.evaluate import evaluate_both
from run.learn import Metrics, asked, check_batch, micro_batches, replay_all, summary
from run.report import facts, finish, report, save
from run.rewards import rewarded
from run.settings import CHOICES, REFUSED, check_settings, eviction_of, policies_of
from run.start import guarded, set_up
from support import parallel
from support.configurator import configure, help_if_asked
from support.screen import say

OBJECTIVES = {"grpo": GRPO, "ppo": PPO, "dpo": DPO}
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tiny")

# Settings, overridden by config files and --key=value; units and sane ranges beside each.
# run
out_dir = "out"          # folder for log.jsonl, samples.txt, config.json, ckpt.pt, model/, best/
resume = False           # go on from out_dir/ckpt.pt
overwrite = False        # throw away the run that out_dir holds
tracker = "none"         # also show the log in tensorboard (out_dir/tensorboard) or wandb
dry_run = False          # measure memory and time of the largest step, write nothing, and end
seed = 0
device = "auto"          # auto: cuda if there is one; cpu, cuda, cuda:1
dtype = "auto"           # weights: float32, bfloat16, float16; auto: on cuda by size, else float32
# model and task
model = TINY             # a folder or a hub name; here the embedded checkpoint
task = "kv4"             # needle, kv, kv4, kv16, list, own, hop, sum, FILE, gsm8k:DIR, module:name
eval_task = ""           # a .jsonl file of held-out problems; "": a tenth of the task's, by a hash
reward = "auto"          # auto, exact, number, boxed, math, choice, contains, or module:function
shots = 0                # solved problems of the task's file in front of every prompt; 0 .. 8
prompt_tokens = 256      # longest prompt in tokens; 64 .. the model's context
template = ""            # more arguments for the chat template, JSON: {"enable_thinking": false}
template_file = ""       # a chat template in place of the checkpoint's
raw_text = False         # take the prompt as it is in the file, without the chat template
control_tokens = False   # with raw_text: text such as <|im_end|> becomes that control token
skip_long = False        # leave out problems that are too long, instead of ending with an error
# rollout
prompts = 16             # prompts per step; 4 .. 128
group = 8                # samples per prompt; 2 .. 64, with ppo also 1
max_new_tokens = 17      # longest response in tokens
temperature = 1.0        # of the sampler and every log-prob; 0.01 .. 100
stop = ""                # a response ends with the token that completes this text; or a JSON list
evict = "snapkv"         # none, snapkv, rkv, h2o, recent, random (kvcache.EVICT), or module:name
budget = 56              # prompt keys kept per layer and KV head, window and sinks included
spread = "uniform"       # budget shared among layers and KV heads: uniform, pyramid, adaptive
window = 20              # last prompt tokens: kept, and their attention votes; 8 .. 64
sinks = 2                # first prompt keys that are never dropped, in tokens; 0 .. 16
pool = 7                 # width in keys over which votes are pooled; odd, 1 .. 21
pool_by = "max"          # max: the largest of neighbouring votes; mean: their mean
response_budget = 0      # response keys kept per layer and KV head, window included; 0: all
period = 128             # steps between evictions of response keys; 8 .. 512
# learner
objective = "grpo"       # grpo, ppo (learns a value), dpo (best against worst), or module:name
learner = "shadow"       # the policy that is updated: shadow (replays the mask), dense (ignores it)
correction = "none"      # weights for a sampler that was not the learner: none, tis, mis, sparse_rl
ratio_to = "learner"     # what the clipped ratio divides by: learner before its update, or sampler
ref_kl = 0.0             # weight of the learner's KL to the initial model, k3; 0 .. 1
distill = 0.1            # weight of one policy's KL to its teacher, over the vocabulary; 0 .. 1
distill_to = "dense"     # the policy that has a teacher: dense or shadow
distill_by = "kl"        # kl; one_sided: by how much the teacher's log-prob of the token is higher
distill_on = "reward"    # all; reward: each response is weighted by its reward, cut to 0 .. 1
teacher = "other"        # other: the other policy; initial: the same policy before training
norm = "sequence"        # loss reduction: sequence (GRPO), token (DAPO), constant (Dr. GRPO)
clip = 0.2               # lower clip of the ratio; in ppo also the clip of the values
clip_high = 0.2          # upper clip of the ratio; 0.28 in DAPO
updates = 1              # optimizer steps per rollout; 1 .. 4; more of them need a lower lr
gamma = 1.0              # ppo: discount per token; 0.9 .. 1
lam = 1.0                # ppo: 1 trusts the reward alone, 0 the next value alone; 0.9 .. 1
value_coef = 0.1         # ppo: weight of the value loss; 0.05 .. 1
beta = 0.1               # dpo: strength of the pull to the initial weights; 0.01 .. 1
micro_rows = 16384       # packed rows per forward pass of the learner; lower it if memory runs out
checkpointing = False    # less memory for a fifth more time, by computing activations twice
logit_mb = 256           # MB of logits at a time; learning holds five times that; 16 .. 1024
memory = 0.0             # GB it may hold; the three above and eval_batch follow from it
# LoRA: small matrices are trained beside the large ones
lora_rank = 0            # rank of the small matrices, 4 .. 64; 0: no LoRA, all weights are trained
lora_alpha = 32.0        # their product is scaled by lora_alpha / lora_rank
lora_targets = "all"     # the large ones: all, qkvo, or names such as q_proj,v_proj,down_proj
# optimizer: AdamW on fp32 masters
moments = "float32"      # AdamW's two moments; bfloat16, rounded at random: 4 bytes a weight less
steps = 60
lr = 6e-4                # with LoRA about ten times that of full training
warmup = 5               # steps of linear warm-up
lr_schedule = "constant" # after the warm-up: constant, or linear or cosine down to lr_end
lr_end = 0.0             # where linear and cosine end, as a fraction of lr
beta2 = 0.95
weight_decay = 0.0
grad_clip = 1.0          # largest gradient norm
# evaluation: greedy, held-out problems, with the compressed cache and with the dense one
eval_every = 20          # steps; also before step 0 and at the end
eval_problems = 128      # problems per evaluation
eval_final = 128         # problems before step 0 and in the last two; 1024 in experiments
eval_first = 0           # number of the first problem; choose settings on others than you report
eval_batch = 128         # problems decoded at once
eval_evict = "auto"      # as evict, but auto: that of training (snapkv where it is none)
save_every = 20          # steps between checkpoints and between samples

DEFAULTS = {key: value for key, value in globals().items()
            if isinstance(value, (bool, int, float, str)) and key[0].islower()}


def settings(argv):
    """-> namespace of all keys, checked for what can be known before a model is loaded; --help
    ends the program. Raises ValueError."""
    help_if_asked(argv, __doc__, ("settings", __file__, DEFAULTS))
    config = SimpleNamespace(**configure(DEFAULTS, argv, CHOICES, REFUSED))
    check_settings(config, DEFAULTS, OBJECTIVES)
    return config


def main(argv):
    job = set_up(argv, settings, OBJECTIVES, update)  # model (net), tokenizer, optimizer, ..
    config, run = job.config, job.run
    if config.dry_run:
        measure(job, settings, update)
        return
    with guarded(job, settings):
        while True:
            # 0. evaluate on held-out problems, also before the first step and after the last; save
            # after it, as a checkpoint holds how long the log is
            if run.step % config.eval_every == 0 or run.finished:
                evaluate_both(job)
            save(job)
            if run.finished or run.interrupted:
                break
            began = time.monotonic()

            # 1. problems, numbered through the run; the number is the position in the data
            mine = parallel.share(config.prompts)
            first = run.step * config.prompts + mine.start
            numbers = range(first, first + len(mine))
            problems, prompts = job.problems.get("train", numbers)

            # 2. roll out under the compressed cache, which logs what it drops
            say(f"step {run.step}: rollout")
            rollout = generate(
                job.net, prompts, config.group, config.max_new_tokens,
                temperature=config.temperature, eviction=eviction_of(config),
                stop_ids=job.tok.stop_ids, seed=config.seed * 1_000_003 + run.step,
                part=(mine.start, config.prompts))

            # 3. reward the decoded text; what was sampled is never encoded again
            stops = stop_strings(config.stop)
            rollout, reward_parts = rewarded(  # from here on those of all ranks
                job.tok, rollout, problems, first=first, stops=stops)
            sampled = time.monotonic()

            # 4. advantages, or what else the objective learns from, of the whole batch, however it
            # is cut later; chosen is the rollout, or those of its samples that it learns from (DPO)
            score = functools.partial(replay_all, job.net, job.objective, config)
            chosen, batch, log = job.objective.prepare(rollout, rollout.rewards, score)

            # 5. replay under the Shadow Mask, loss, optimizer step
            lr = learning_rate(config, run.step)
            log.update(update(
                job.net, job.opt, job.objective, chosen, batch=batch,
                config=config, lr=lr, teacher=job.teacher))

            # 6. log
            log = dict(step=run.step, **facts(rollout, reward_parts), **log, lr=lr,
                       rollout_s=sampled - began, learn_s=time.monotonic() - sampled)
            log["tokens_per_s"] = log["tokens"] / max(log["rollout_s"], 1e-9)
            report(job, problems[0], rollout, log)
            run.step += 1
        if run.finished and not run.interrupted:
            finish(job)
            return
    run.leave()


def update(net, opt, objective, rollout, batch, config, lr, teacher=None):
    """Learn from one rollout: config.updates optimizer steps. rollout, batch: what the objective's
    prepare returned. teacher: of distillation, a frozen model, else the other policy. -> numbers
    for the log. Raises FloatingPointError, before the step, if a gradient is not finite."""
    if not rollout.prompts:  # nothing to learn from: the weights stay as they are
        return dict(loss=0.0, kl=0.0, clip_frac=0.0, grad_norm=0.0)

    check_batch(batch, config)
    policies = policies_of(config)
    student = None
    if config.distill and config.distill_by == "kl":
        student = config.distill_to
    micro = micro_batches(rollout, len(policies), config.micro_rows, share=True)
    old = [None] * len(micro)  # the learner's log-probs before the first update
    done = []                  # the numbers of each update
    for number in range(config.updates):
        is_first = number == 0
        metrics = Metrics(clip_frac=0.0, kl=0.0)
        for i, some in enumerate(micro):
            say(f"update {number + 1}/{config.updates}, "
                f"micro-batch {i + 1}/{len(micro)}")
            part = rollout.select(some)
            at = part.sampled  # asked for while a card has nothing else to do
            slices = {name: values[some] for name, values in batch.items()}

            # one forward pass under the logged mask: of the sampled tokens, at most R, the log-prob
            # (B, G, R) under both policies, and their KL (fast/head.py)
            out = replay(
                net, part, policies, distill_to=student, teacher=teacher,
                stats=is_first, checkpointing=config.checkpointing,
                value=objective.value)

            # the ratio to the learner is 1 on the first update: GRPO's loss is 0, not its gradient
            loss, numbers = objective.loss(
                out, part=part, batch=slices, old=old[i], whole=rollout)
            if config.distill:
                scale = slices["scale"]  # the KL is averaged over tokens as the loss is
                if config.distill_on == "reward":
                    scale = scale * part.rewards.clamp(0, 1)[..., None]   # (B, G, R)
                kl = (scale * distance(out, config)).sum()
                loss = loss + config.distill * kl
                metrics.add(kl=kl)
            opt.backward(loss)

            metrics.add(loss=loss, **numbers)
            if is_first:
                old[i] = out[config.learner].detach()
                gap = (old[i] - part.logp_roll).abs()                     # (B, G, R)
                metrics.collect(at, gap=gap, entropy=out["entropy"])
                if "accept" in out:
                    metrics.collect(at, accept=out["accept"])
        # computed before the step, asked for after it: a step waits for a card anyway
        found = Metrics.together(parallel.gather(metrics)).numbers()
        norm = opt.step(lr, config.grad_clip)
        done.append(asked(dict(found, grad_norm=norm, **opt.scaling)))
    opt.halfway = False  # opt.step set it; all updates are done, so the weights may be saved
    return summary(done)


def distance(out, config):
    """How far the student is from its teacher, by token (B, G, R). one_sided: max(log-prob of the
    teacher - of the student, 0) of the sampled token, as the first author's code estimates it."""
    if config.distill_by == "kl":
        return out["kl"]
    teacher = "shadow" if config.distill_to == "dense" else "dense"
    return (out[teacher].detach() - out[config.distill_to]).relu()


def learning_rate(config, step):
    """Of one step: a linear warm-up, then constant or down, to lr_end * lr one step after
    the last, so that with lr_end = 0 the last step trains too."""
    warm = min(1.0, (step + 1) / (config.warmup + 1))
    if config.lr_schedule == "constant":
        return config.lr * warm
    steps = max(1, config.steps - config.warmup)
    done = max(0, step - config.warmup) / steps
    left = 1 - done
    if config.lr_schedule == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    return config.lr * warm * (config.lr_end + (1 - config.lr_end) * left)


if __name__ == "__main__":
    with parallel.ranks():
        main(sys.argv[1:])
