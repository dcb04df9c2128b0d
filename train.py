"""
Reinforcement learning with a compressed KV cache: rollout, replay under the Shadow Mask, objective, distillation, in one loop.

    python train.py                                        # the embedded checkpoint on whatever is there, CPU or GPU
    python train.py config/smollm2.py --out_dir=out/mine   # a config file, then --key=value, each overriding what came before

The idea. The sampler decodes from an evicted cache, so it is a sparse policy. What was evicted is logged and replayed in
the learner's attention, so the policy that is updated is the policy that sampled (learner = "shadow"), and a KL term
lets the dense policy learn from it (distill_to = "dense") or the other way round:

    loss = objective(shadow) + distill * KL(dense || stop-gradient(shadow))

Read `main` for the loop, `update` for the loss. The usual repair, weights for a sampler that was not the learner
(correction), is here too, to be compared with. Left out on purpose: several GPUs, a KL to a reference model.
All randomness of a step is a function of (seed, step), so a checkpoint needs no RNG state beyond those two numbers.
"""
import os
import shutil
import sys
import time
from types import SimpleNamespace

import torch

from data.problems import Problems
from data.tasks import TASKS, reward
from data.tokenizer import Tokenizer
from grpo import GRPO, NORMS, replay
from kvcache import EVICT, SPREAD, Eviction
from model import Transformer, find_checkpoint
from objectives.dpo import DPO
from objectives.ppo import PPO
from rollout import generate
from support.configurator import configure
from support.optimizer import Masters
from support.run import Metrics, Run, choose_device, say

OBJECTIVES = {"grpo": GRPO, "ppo": PPO, "dpo": DPO}

# configuration: overridden by config files and --key=value; units and sane ranges beside each
# run
out_dir = "out"           # folder for log.jsonl, samples.txt, config.json, ckpt.pt, model/
resume = False            # go on from out_dir/ckpt.pt
overwrite = False         # throw away the run that out_dir holds
seed = 0
device = "auto"           # auto: cuda if there is one; cpu, cuda, cuda:1
dtype = "auto"            # of the weights that sampler and learner read; auto: bfloat16 on cuda, float32 on cpu
# model and task
model = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tiny")  # a folder or a hub name
task = "kv"               # needle, kv, own, hop, sum, or a .jsonl file of problems
prompt_tokens = 192       # longest prompt in tokens; 64 .. the model's context
# rollout
prompts = 16              # prompts per step; 4 .. 128
group = 8                 # samples per prompt; 2 .. 64, and 1 will do for ppo
max_new_tokens = 5        # longest response in tokens
temperature = 1.0         # of the sampler, and of every log-prob; above 0
evict = "snapkv"          # none, snapkv, rkv, h2o, recent, random: the names in kvcache.EVICT
budget = 24               # prompt keys kept per layer and KV head, window and sinks included: votes choose 6 here
spread = "uniform"        # of the budget over the layers: uniform or pyramid, the names in kvcache.SPREAD
window = 16               # the last prompt rows, whose attention votes, in tokens; here the whole question; 8 .. 64
sinks = 2                 # first prompt keys that are never dropped, in tokens; 0 .. 16
pool = 7                  # width in keys over which SnapKV and R-KV votes are max-pooled; odd, 1 .. 21
response_budget = 0       # response keys kept per layer and KV head, window included; 0: all of them
period = 128              # steps between evictions of response keys; 8 .. 512
# learner
objective = "grpo"        # grpo, ppo (a learned value in place of the group's mean) or dpo (best against worst of each group)
learner = "shadow"        # the policy that it updates: shadow (replays the mask) or dense (ignores it)
correction = "none"       # weights for a sampler that was not the learner: none, tis, mis, sparse_rl; for learner = "dense"
distill = 0.1             # weight of the KL between the two policies; 0 .. 1
distill_to = "dense"      # which policy learns from the other: dense or shadow
norm = "sequence"         # loss reduction: sequence (GRPO), token (DAPO), constant (Dr. GRPO)
clip = 0.2                # lower clip of the ratio; in ppo also the clip of the values
clip_high = 0.2           # upper clip of the ratio; 0.28 in DAPO
updates = 1               # optimizer steps per rollout; 1 .. 4, and a lower lr with more
gamma = 1.0               # ppo: discount per token; 0.9 .. 1
lam = 1.0                 # ppo: 1 trusts the reward alone, 0 the next value alone; 0.9 .. 1
value_coef = 0.1          # ppo: weight of the value loss; 0.05 .. 1
beta = 0.1                # dpo: strength of the pull to the initial weights; 0.01 .. 1
micro_rows = 16384        # packed rows per forward pass of the learner; lower it if memory runs out
checkpointing = False     # keep one hidden state per row and layer, compute the rest again: a fifth more time or so; for long prompts
# optimizer: AdamW on fp32 masters
steps = 120
lr = 3e-4
warmup = 5                # steps of linear warm-up
beta2 = 0.95
weight_decay = 0.0
grad_clip = 1.0           # largest gradient norm
# evaluation, greedy, on held-out problems, with the dense cache and with the compressed cache
eval_every = 40           # steps; also before step 0 and at the end
eval_problems = 128
eval_batch = 128          # problems decoded at once
save_every = 40           # steps between checkpoints and between samples

DEFAULTS = {k: v for k, v in globals().items() if isinstance(v, (bool, int, float, str)) and k[0].islower()}
CHOICES = dict(
    evict=list(EVICT), spread=list(SPREAD), objective=list(OBJECTIVES), learner=["shadow", "dense"],
    distill_to=["dense", "shadow"], correction=["none", "tis", "mis", "sparse_rl"], norm=list(NORMS),
    dtype=["auto", "float32", "bfloat16"])
REFUSED = dict.fromkeys(("top_p", "top_k", "min_p"), "it cuts the support the learner scores, so every ratio would be biased")
AT_LEAST = dict(
    prompts=1, prompt_tokens=1, max_new_tokens=1, period=1, updates=1, micro_rows=1, steps=1, eval_every=1, eval_problems=1,
    eval_batch=1, save_every=1, warmup=0, response_budget=0)
BETWEEN = dict(
    temperature=(1e-2, 100), distill=(0, 100), clip=(0, 1), clip_high=(0, 100), lr=(1e-12, 1), gamma=(0, 1), lam=(0, 1),
    value_coef=(0, 100), beta=(1e-6, 100), beta2=(0, 0.9999), weight_decay=(0, 1), grad_clip=(1e-6, 1e6), seed=(0, 2**40))
MAY_CHANGE = {"resume", "overwrite", "out_dir", "device", "steps", "eval_every", "eval_problems", "eval_batch", "save_every",
              "micro_rows", "checkpointing"}  # on resume; the last two because a run may end for want of memory


def main(argv):
    try:
        c, run, net, tok, problems, objective, opt = setup(argv)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        loop(c, run, net, tok, problems, objective, opt)
    except (OSError, FloatingPointError) as e:  # a full disk, an update that is not finite: what was saved stays
        sys.exit(f"error: {e}")
    if run.interrupted and not run.finished():
        print(f"saved in {c.out_dir}; go on with the same command and --resume=True" if run.step > run.first
              else "no step was finished: nothing saved")
        sys.exit(130)


def loop(c, run, net, tok, problems, objective, opt):
    """The algorithm, from run.step to c.steps or to an interrupt."""
    while True:
        # 0. evaluate on held-out problems, also before the first step and after the last
        if run.step % c.eval_every == 0 or run.finished():
            evaluate_both(c, run, net, tok, problems)
        if run.finished() or run.interrupted:
            break
        start = time.time()

        # 1. problems; their index is the position in the data
        batch, prompts = problems.get("train", range(run.step * c.prompts, (run.step + 1) * c.prompts))

        # 2. roll out under the compressed cache, which logs what it drops
        say(f"step {run.step}: rollout")
        rollout = generate(net, prompts, c.group, c.max_new_tokens, temperature=c.temperature, eviction=eviction_of(c),
                           stop_ids=tok.stop_ids, seed=c.seed * 1_000_003 + run.step)

        # 3. reward the decoded text; what was sampled is never encoded again
        texts = decode(tok, rollout)
        rewards = torch.tensor([[reward(p, text) for text in row] for p, row in zip(batch, texts)], device=net.device)
        sampled = time.time()

        # 4. advantages, replay under the log, loss, step: see update
        lr = c.lr * min(1.0, (run.step + 1) / (c.warmup + 1))
        log = update(net, opt, objective, rollout, rewards, c, lr)

        # 5. log and save
        log = dict(step=run.step, reward=rewards.mean().item(), **log, **facts(rollout, rewards),
                   rollout_s=sampled - start, learn_s=time.time() - sampled)
        run.log(log)
        print(show(log) + f" | eta {run.minutes_left():.1f} min", flush=True)
        if run.step % c.save_every == 0 or run.step == c.steps - 1:
            write_samples(run, batch[0], texts[0], rewards[0].tolist())
        run.memory["kv"] = rollout.kv
        run.step += 1
        if run.step % c.save_every == 0 or run.finished() or run.interrupted:
            run.save(opt.state())
    if run.finished():
        finish(c, run, net)


def update(net, opt, objective, rollout, rewards, c, lr):
    """Optimizer steps on one rollout. rewards (B, G) -> numbers for the log"""
    other = "dense" if c.learner == "shadow" else "shadow"
    policies = (other, c.learner) if c.distill else (c.learner,)  # replay gives entropy and values of the last

    def score(rollout, model=net):
        """What replay returns for the learner's policy, for the whole rollout and without gradients."""
        say("scoring")
        head = objective.value if model is net else None
        with torch.no_grad():
            outs = [replay(model, rollout.select(part), (c.learner,), value=head)
                    for part in micro_batches(rollout, len(policies), c.micro_rows)]
        return {name: torch.cat([out[name] for out in outs]) for name in outs[0]}

    # advantages, or whatever the objective learns from; for the whole batch, so that its cut does not matter
    rollout, batch, log = objective.prepare(rollout, rewards, score)
    if not rollout.prompts:  # nothing to learn from: the weights stay as they are
        return dict(log, loss=0.0, kl=0.0, clip_frac=0.0, grad_norm=0.0)
    parts = micro_batches(rollout, len(policies), c.micro_rows)
    old = {}  # micro-batch -> the learner's log-probs before the first update
    steps = []  # Metrics of each update
    for _ in range(c.updates):
        metrics = Metrics()
        for i, part in enumerate(parts):
            say(f"update {len(steps) + 1}/{c.updates}, micro-batch {i + 1}/{len(parts)}")
            r = rollout.select(part)
            x = {name: values[part] for name, values in batch.items()}

            # one forward pass under the logged mask scores both policies
            out = replay(net, r, policies, distill_to=c.distill_to if c.distill else None, stats=not steps,
                         checkpointing=c.checkpointing, value=objective.value)

            # on a rollout's first update the ratio is exactly 1, and GRPO's loss 0; its gradient is not
            loss, numbers = objective.loss(out, r, x, old.get(i), rollout)
            if c.distill:
                kl = (x["scale"] * out["kl"]).sum()  # KL(student || teacher), summed as the objective is
                loss = loss + c.distill * kl
                metrics.add(kl=kl.item())
            loss.backward()

            metrics.add(loss=loss.item(), **numbers)
            logp = out[c.learner].detach()
            old.setdefault(i, logp)
            if not steps:
                seen = {name: out[name] for name in ("entropy", "accept") if name in out}
                metrics.collect(r.mask, gap=(logp - r.logp_roll).abs(), **seen)
        metrics.add(grad_norm=opt.step(lr, c.grad_clip))
        steps.append(metrics)
    return dict(dict(clip_frac=0.0, kl=0.0), **log, **numbers_of(steps))


def numbers_of(steps):
    """Metrics of a rollout's updates -> numbers for the log: of the first update, but for clip_frac, which is the last one's."""
    first = steps[0]
    log = dict(first.sums)
    if "clip_frac" in log:  # in the first update nothing can be clipped
        log["clip_frac"] = steps[-1].sums["clip_frac"]
    gap = first.all("gap")
    log.update(gap=gap.mean().item(), gap_max=gap.max().item(), entropy=first.all("entropy").mean().item())
    if "accept" in first.tokens:
        accept = first.all("accept")
        log.update(accept=accept.mean().item(), accept_p05=accept.quantile(0.05).item())
    return log


def micro_batches(rollout, copies, limit):
    """Indices of the prompts of each micro-batch: as many groups as fit into `limit` packed rows, at least one."""
    parts, used = [], 0
    own = (rollout.lengths - 1).sum(1).tolist()
    for b, prompt in enumerate(rollout.prompts):
        size = len(prompt) + copies * own[b]
        if not parts or used + size > limit:
            parts.append([])
            used = 0
        parts[-1].append(b)
        used += size
    return parts


def decode(tok, rollout):
    """The text of each response, B lists of G."""
    return [[tok.decode(tokens[:n]) for tokens, n in zip(group, lengths)]
            for group, lengths in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]


def facts(rollout, rewards):
    """What the log says of a rollout beside its reward."""
    log = dict(equal=(rewards == rewards[:, :1]).all(1).float().mean().item(),
               truncated=1 - rollout.stopped.float().mean().item(), tokens=rollout.lengths.sum().item())
    log.update({f"kv_{name}": size for name, size in rollout.kv.items()})
    if rewards.is_cuda:
        log["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return log


def evaluate(net, tok, problems, c, eviction):
    """Greedy reward on held-out problems under `eviction`, and how much of the dense policy the sparse one covers, whichever is
    trained. -> dict: reward; if keys are evicted also accept and accept_p05, mean and 5th percentile over tokens of the sum over
    the vocabulary of min(p_dense, p_shadow)"""
    total, overlap = 0.0, []
    for start in range(0, problems.n_eval, c.eval_batch):
        say(f"eval ({'dense' if eviction.method == 'none' else eviction.method} cache) {start}/{problems.n_eval}")
        batch, prompts = problems.get("eval", range(start, min(start + c.eval_batch, problems.n_eval)))
        r = generate(net, prompts, 1, c.max_new_tokens, temperature=0.0, eviction=eviction, stop_ids=tok.stop_ids, seed=c.seed)
        total += sum(reward(p, texts[0]) for p, texts in zip(batch, decode(tok, r)))
        if eviction.method == "none":
            continue
        for part in micro_batches(r, 2, c.micro_rows):
            with torch.no_grad():
                overlap.append(replay(net, r.select(part), stats=True)["accept"][r.mask[part]].cpu())
    say("")
    out = dict(reward=total / problems.n_eval)
    if overlap:
        overlap = torch.cat(overlap)
        out.update(accept=overlap.mean().item(), accept_p05=overlap.quantile(0.05).item())
    return out


def evaluate_both(c, run, net, tok, problems):
    """Evaluate with the compressed and with the dense cache, once a step; log and print it."""
    evals = run.memory.setdefault("evals", [])
    if evals and evals[-1]["step"] == run.step:
        return
    compressed = evaluate(net, tok, problems, c, eviction_of(c))
    dense = evaluate(net, tok, problems, c, Eviction("none"))
    e = dict(step=run.step, eval_compressed=compressed["reward"], eval_dense=dense["reward"])
    overlap = ""
    if "accept" in compressed:
        e.update(eval_accept=compressed["accept"], eval_accept_p05=compressed["accept_p05"])
        overlap = f", accept {e['eval_accept']:.3f} p05 {e['eval_accept_p05']:.3f}"
    evals.append(e)
    run.log(e)
    print(f"eval {run.step:4d} | held-out reward ({problems.n_eval} problems), greedy: compressed cache "
          f"{e['eval_compressed']:.3f}, dense cache {e['eval_dense']:.3f}{overlap}", flush=True)


def settings(argv):
    """-> namespace of all keys, checked for what can be known before a model is loaded. Raises ValueError."""
    c = SimpleNamespace(**configure(DEFAULTS, argv, CHOICES, REFUSED))
    for key, low in AT_LEAST.items():
        if getattr(c, key) < low:
            raise ValueError(f"{key} must be at least {low}, got {getattr(c, key)}")
    for key, (low, high) in BETWEEN.items():
        if not low <= getattr(c, key) <= high:
            raise ValueError(f"{key} must be between {low} and {high}, got {getattr(c, key)}")
    eviction_of(c)
    if c.task not in TASKS and not c.task.endswith(".jsonl"):
        raise ValueError(f"unknown task {c.task!r}: one of {', '.join(TASKS)}, or a .jsonl file")
    if not c.out_dir:
        raise ValueError("out_dir is empty")
    return c


def eviction_of(c):
    """The settings that say which keys a rollout keeps."""
    return Eviction(method=c.evict, budget=c.budget, window=c.window, sinks=c.sinks, pool=c.pool,
                    response_budget=c.response_budget or None, period=c.period, spread=c.spread)


def setup(argv):
    """Everything that can be wrong with a request is found here, before out_dir is touched. -> what the loop needs"""
    c = settings(argv)
    choose_device(c)
    run = Run(c, MAY_CHANGE)
    folder = find_checkpoint(c.model)
    if os.path.realpath(folder) == os.path.realpath(run.path("model")):
        raise ValueError(f"model {c.model!r} is where this run would save its own: choose another --out_dir")
    tok = Tokenizer(folder)
    net = Transformer.from_pretrained(folder, device=c.device, dtype=getattr(torch, c.dtype))
    if len(tok) > net.config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {len(tok)} ids, the model {net.config.vocab_size}")
    net.vocab_used = len(tok)
    if c.prompt_tokens + c.max_new_tokens > net.config.max_pos:
        raise ValueError(f"prompt_tokens {c.prompt_tokens} + max_new_tokens {c.max_new_tokens} exceed the model's context of "
                         f"{net.config.max_pos}")

    def initial():
        """The model as it was before training, also where a run goes on; frozen."""
        model = Transformer.from_pretrained(folder, device=c.device, dtype=net.dtype).requires_grad_(False)
        model.vocab_used = net.vocab_used
        return model

    problems = Problems(c.task, c.seed, c.prompt_tokens, c.eval_problems, tok)
    objective = OBJECTIVES[c.objective](net, c, initial)
    opt = Masters(net, c, objective.value)
    if run.learner:
        opt.load(run.learner)
    run.open()
    introduce(c, folder, net)
    return c, run, net, tok, problems, objective, opt


def introduce(c, folder, net):
    """Print the facts that decide speed and memory."""
    per_token, cuda = net.config.kv_bytes_per_token(net.dtype), c.device.startswith("cuda")
    keys = c.prompt_tokens if c.evict == "none" else min(c.budget, c.prompt_tokens)  # per prompt
    own = c.max_new_tokens - 1  # per sample
    if c.response_budget:
        own = min(own, c.response_budget + c.period)
    kept = c.prompts * keys + c.prompts * c.group * own
    dense = c.prompts * c.group * (c.prompt_tokens + c.max_new_tokens - 1)
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {where}, {c.dtype} weights, fp32 masters, attention by the "
          f"{'Triton kernel' if cuda else 'PyTorch reference'}")
    size = sum(p.numel() for p in net.parameters()) / 1e6
    print(f"{folder}: {net.config.arch}, {size:.2f}M parameters, {per_token:,} KV bytes per token")
    print(f"{c.task}: prompts of up to {c.prompt_tokens} tokens, {keys} keys kept per layer and KV head ({c.evict}); a rollout of "
          f"{c.prompts} x {c.group} samples holds up to {kept * per_token:,} KV bytes, {dense * per_token:,} if each kept all keys")
    if c.objective == "dpo":
        print("a frozen copy of the initial model, the reference, is held beside it")
    # other norms weigh long responses more, and so do corrections: advantages that sum to 0 then do not make the loss 0
    if (c.objective, c.correction, c.norm) == ("grpo", "none", "sequence"):
        print("the policy term of the loss is 0 in value, not in gradient: the ratio is 1 on a rollout's first update")


def show(log):
    """One line per step, fixed width. gap: learner against sampler; accept: overlap of the two policies, mean and 5th percentile;
    ent: entropy of the learner's policy; clip: clipped tokens (of the last update; the rest is of the first); trunc: responses
    cut short; equal: groups whose samples all earned the same; grad: gradient norm; seconds of rollout + update.
    weight, rejected: mean weight of a correction, tokens that it drops; value, value_loss: of ppo; pairs, margin: of dpo."""
    policies = "nothing replayed"
    if "gap" in log:
        policies = f"gap {log['gap']:.1e} max {log['gap_max']:.1e}"
        if "accept" in log:
            policies += f" | accept {log['accept']:.3f} p05 {log['accept_p05']:.3f}"
        policies += f" | ent {log['entropy']:.2f}"
    more = [f"{k} {log[k]:.3f} | " for k in ("weight", "rejected", "value", "value_loss", "pairs", "margin") if k in log]
    return (f"step {log['step']:4d} | reward {log['reward']:.3f} | loss {log['loss']:+.4f} kl {log['kl']:.4f} | {policies} | "
            f"clip {log['clip_frac']:.2f} trunc {log['truncated']:.2f} equal {log['equal']:.2f} | {''.join(more)}"
            f"grad {log['grad_norm']:.2f} | {log['rollout_s']:.1f}+{log['learn_s']:.1f} s")


def write_samples(run, problem, texts, rewards):
    """Two responses to one problem, for the eye."""
    for text, r in list(zip(texts, rewards))[:2]:
        run.append("samples.txt", f"--- step {run.step}\n{problem.text}\n>>> {text!r} (answer {problem.answer}) reward {r:.2f}\n")


def finish(c, run, net):
    """Save the model in Hugging Face format with its tokenizer and say what was reached."""
    target = run.path("model")
    net.save_pretrained(target)
    folder = find_checkpoint(c.model)
    for name in os.listdir(folder):  # tokenizer, chat template, generation_config.json
        if name != "config.json" and name.endswith((".json", ".jinja")) and not name.endswith(".index.json"):
            shutil.copy(os.path.join(folder, name), target)
    print(f"model saved to {target}")
    kv, first, last = run.memory["kv"], run.memory["evals"][0], run.memory["evals"][-1]
    print(f"KV cache of a rollout: {kv['kept']:,} bytes kept, {kv['dense']:,} dense (1/{kv['dense'] / kv['kept']:.1f}), "
          f"{kv['dense_shared']:,} dense with each prompt shared by its group (1/{kv['dense_shared'] / kv['kept']:.1f})")
    print(f"held-out reward with the compressed cache: {first['eval_compressed']:.3f} -> {last['eval_compressed']:.3f} "
          f"(dense cache {first['eval_dense']:.3f} -> {last['eval_dense']:.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
