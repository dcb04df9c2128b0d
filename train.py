"""
Reinforcement learning with a compressed KV cache: rollout, GRPO, PPO or DPO under the Shadow Mask, distillation, in one loop.

    python train.py                                        # the embedded checkpoint on whatever is there, CPU or GPU
    python train.py config/smollm2.py --out_dir=out/mine   # a config file, then --key=value, each overriding what came before

The idea. The sampler decodes from an evicted cache, so it is a sparse policy. What was evicted is logged and replayed in
the learner's attention, so the policy that is updated is the policy that sampled (learner = "shadow"), and a KL term
lets the dense policy learn from it (distill_to = "dense") or the other way round:

    loss = objective(shadow) + distill * KL(dense || stop-gradient(shadow))

The usual repair, weights for a sampler that was not the learner (correction), is here too, to be compared with.

Left out on purpose: several GPUs, a KL to a reference model (grpo.reference_kl has the formula).
All randomness of a step is a function of (seed, step), so a checkpoint needs no RNG state beyond those two numbers.
"""
import json
import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import torch

try:
    import fcntl
except ImportError:  # Windows: two processes with one out_dir go unnoticed
    fcntl = None

from support.configurator import configure
from grpo import (advantages, best_and_worst, correction as correction_weights, dpo_loss, gae, policy_loss, replay, token_scale,
                  value_loss, whiten)
from kvcache import EVICT, check_eviction
from support.optimizer import Masters
from model import Transformer, find_checkpoint
from rollout import generate
from data.tasks import HOLD_OUT, TASKS, file_problem, problem, prompt_encoder, read_problems, reward
from data.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------------------------
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
format_bonus = 0.0        # reward for answering with a bare number, right or wrong; 0 .. 0.1
# rollout
prompts = 16              # prompts per step; 4 .. 128
group = 8                 # samples per prompt; 2 .. 64, and 1 will do for ppo
max_new_tokens = 5        # longest response in tokens
temperature = 1.0         # of the sampler, and of every log-prob; above 0
evict = "snapkv"          # none, snapkv, rkv, h2o, recent, random: the names in kvcache.EVICT
budget = 24               # prompt keys kept per layer and KV head, window (16) and sinks (2) included: votes choose only 6 here
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
# ---------------------------------------------------------------------------------------------------------------------
DEFAULTS = {k: v for k, v in globals().items() if isinstance(v, (bool, int, float, str)) and k[0].islower()}  # no constants of other files
CHOICES = dict(evict=list(EVICT), objective=["grpo", "ppo", "dpo"], learner=["shadow", "dense"], distill_to=["dense", "shadow"],
               correction=["none", "tis", "mis", "sparse_rl"], norm=["sequence", "token", "constant"],
               dtype=["auto", "float32", "bfloat16"])
REFUSED = dict.fromkeys(("top_p", "top_k", "min_p"), "it cuts the support the learner scores, so every ratio would be biased")
MAY_CHANGE = {"resume", "overwrite", "out_dir", "device", "steps", "eval_every", "eval_problems", "eval_batch", "save_every",
              "micro_rows", "checkpointing"}  # on resume; the last two because a run may end for want of memory


def settings(argv):
    """-> namespace of all keys, checked for what can be known before a model is loaded. Raises ValueError."""
    c = SimpleNamespace(**configure(DEFAULTS, argv, CHOICES, REFUSED))
    check_eviction(c.evict, c.budget, c.window, c.sinks, c.pool, c.response_budget or None, c.period)
    at_least = dict.fromkeys(("prompts", "prompt_tokens", "max_new_tokens", "period", "updates", "micro_rows", "steps", "eval_every",
                              "eval_problems", "eval_batch", "save_every"), 1) | dict(warmup=0, response_budget=0)
    between = dict(format_bonus=(0, 0.1), temperature=(1e-2, 100), distill=(0, 100), clip=(0, 1), clip_high=(0, 100), lr=(1e-12, 1),
                   gamma=(0, 1), lam=(0, 1), value_coef=(0, 100), beta=(1e-6, 100),
                   beta2=(0, 0.9999), weight_decay=(0, 1), grad_clip=(1e-6, 1e6), seed=(0, 2**40))
    for key, low in at_least.items():
        if getattr(c, key) < low:
            raise ValueError(f"{key} must be at least {low}, got {getattr(c, key)}")
    for key, (low, high) in between.items():
        if not low <= getattr(c, key) <= high:
            why = ": a greedy group holds one answer G times" if key == "temperature" else ""
            raise ValueError(f"{key} must be between {low} and {high}, got {getattr(c, key)}{why}")
    least = 1 if c.objective == "ppo" else 2
    if c.group < least:
        raise ValueError(f"group must be at least {least}, got {c.group}" + ": samples of one prompt are compared" * (least - 1))
    if c.correction != "none" and c.evict == "none":
        raise ValueError(f"correction={c.correction} weighs a sampler that was not the learner, evict=none makes them one and all weights 1")
    if c.correction != "none" and c.learner == "shadow":
        raise ValueError(f"correction={c.correction} weighs a sampler that was not the learner, learner=shadow replays the sampler and all "
                         "weights would be 1: say --learner=dense")
    if c.correction != "none" and c.objective == "dpo":
        raise ValueError(f"correction={c.correction} weighs tokens of the clipped surrogate, which objective=dpo does not have")
    if c.task not in TASKS and not c.task.endswith(".jsonl"):
        raise ValueError(f"unknown task {c.task!r}: one of {', '.join(TASKS)}, or a .jsonl file")
    if not c.out_dir:
        raise ValueError("out_dir is empty")
    return c


def write_whole(path, write):
    """write(temporary path), then rename: a crash, a kill or a full disk in the middle leaves what was there before."""
    try:
        write(path + ".tmp")
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        if os.path.isfile(path + ".tmp"):
            os.remove(path + ".tmp")
        raise OSError(f"could not write {path}: {' '.join(str(e).split())}; what was there is untouched") from None


def write_text(path, text):
    def write(tmp):
        with open(tmp, "w", encoding="utf-8") as f:
            f.write(text)
    write_whole(path, write)


def read_checkpoint(c):
    """The state that out_dir/ckpt.pt holds. Raises ValueError if it is damaged or belongs to a run with other settings."""
    path = os.path.join(c.out_dir, "ckpt.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"resume: {path} does not exist; a run that has not saved yet starts again with --overwrite=True")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        was, done, _ = state["config"], state["step"], (state["evals"], state["kv"])
    except Exception as e:  # a damaged file raises whatever its first wrong byte leads to
        raise ValueError(f"resume: {path} cannot be read: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None
    for k in DEFAULTS:
        if k not in MAY_CHANGE and was.get(k) != getattr(c, k):
            raise ValueError(f"resume: {k} was {was.get(k)!r} in the run in {c.out_dir!r}, now it is {getattr(c, k)!r}")
    if done > c.steps:
        raise ValueError(f"resume: the run in {c.out_dir!r} has done {done} steps already, steps={c.steps}")
    return state


HELD = {}  # out_dir -> its file descriptor, open until this process ends


def hold(out_dir):
    """Lock out_dir for this process until it ends, however it ends. Raises ValueError if another one has it: two would mix their logs."""
    where = os.path.realpath(out_dir)
    if fcntl is None or where in HELD:
        return
    folder = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise ValueError(f"out_dir {out_dir!r} is in use by another process") from None
    HELD[where] = folder


def prepare_out(c, state):
    """Make out_dir, clear it of an old run if that was asked for, cut the log back to the step that is resumed."""
    path = lambda name: os.path.join(c.out_dir, name)
    os.makedirs(path("model"), exist_ok=True)
    hold(c.out_dir)
    if not state:
        for name in ("ckpt.pt", "log.jsonl", "samples.txt", "model/model.safetensors"):
            if os.path.lexists(path(name)):
                os.remove(path(name))
    elif os.path.exists(path("log.jsonl")):
        with open(path("log.jsonl"), "rb") as f:
            lines = [line.decode() for line in f if line.endswith(b"\n")]  # a kill may leave half a line
        write_text(path("log.jsonl"), "".join(line for line in lines if json.loads(line)["step"] < state["step"]))
    write_text(path("config.json"), json.dumps(vars(c), indent=2))


class Problems:
    """Problems of the configured task and their prompts as token ids, by index. A file is checked as a whole at the start."""

    def __init__(self, c, tok):
        self.c, self.encode = c, prompt_encoder(tok)
        self.file = None if c.task in TASKS else read_problems(c.task)
        some = [self.get(split, [0])[0][0] for split in ("eval", "train")]
        self.n_eval = c.eval_problems if self.file is None else min(c.eval_problems, -(-len(self.file) // HOLD_OUT))
        for i, p in enumerate(self.file or some):
            n = len(self.encode(p.text))
            if not 0 < n <= c.prompt_tokens:
                raise ValueError(f"problem {i + 1} of {c.task} has {n} tokens, prompt_tokens is {c.prompt_tokens}")

    def get(self, split, indices):
        """-> problems, their prompts"""
        c = self.c
        out = [problem(c.task, split, c.seed, i, c.prompt_tokens, self.encode) if self.file is None else
               file_problem(self.file, split, c.seed, i) for i in indices]
        return out, [self.encode(p.text) for p in out]


def evaluate(net, tok, problems, c, evict):
    """Greedy reward on held-out problems under eviction method `evict`, and how much of the dense policy the sparse one covers, whichever
    is trained. -> mean reward; if keys are evicted, mean and 5th percentile of sum over the vocabulary of min(p_dense, p_shadow)"""
    total, overlap = 0.0, []
    for start in range(0, problems.n_eval, c.eval_batch):
        say(f"eval ({'dense' if evict == 'none' else evict} cache) {start}/{problems.n_eval}")
        batch, ids = problems.get("eval", range(start, min(start + c.eval_batch, problems.n_eval)))
        own = None if evict == "none" else c.response_budget or None
        r = generate(net, ids, 1, c.max_new_tokens, 0.0, evict, c.budget, c.window, c.sinks, own, c.period, tok.stop_ids, c.seed, c.pool)
        total += sum(reward(p, tok.decode(r.tokens[i, 0, :r.lengths[i, 0]].tolist())) for i, p in enumerate(batch))
        for part in split_rows(r, 2, c.micro_rows) if evict != "none" else []:
            with torch.no_grad():
                overlap.append(replay(net, r.select(part), stats=True)["accept"][r.mask[part]].cpu())
    say("")
    overlap = torch.cat(overlap) if overlap else None
    return total / problems.n_eval, *((overlap.mean().item(), overlap.quantile(0.05).item()) if overlap is not None else ())


def split_rows(rollout, copies, limit):
    """Indices of the prompts of each micro-batch: as many groups as fit into `limit` packed rows, at least one."""
    parts, used = [], 0
    sizes = [len(p) + copies * n for p, n in zip(rollout.prompts, (rollout.lengths - 1).sum(1).tolist())]
    for b, size in enumerate(sizes):
        if not parts or used + size > limit:
            parts, used = parts + [[]], 0
        parts[-1].append(b)
        used += size
    return parts


@torch.no_grad()
def before_updates(net, rollout, parts, signal, c, aux):
    """What takes the whole batch, computed once before the first update, so that micro-batches of any size give the same gradient.
    -> tensors of which each micro-batch takes its prompts, numbers for the log"""
    mask, n = rollout.mask, rollout.mask.sum().item()
    x, log = dict(adv=signal, scale=token_scale(mask, c.norm)), {}
    if c.objective == "grpo" and c.correction == "none":
        return x, log  # the learner's own log-probs come with the first update
    say("scoring")
    model, value = (aux, None) if c.objective == "dpo" else (net, aux)
    outs = [replay(model, rollout.select(part), (c.learner,), value=value) for part in parts]
    logp = torch.cat([out[c.learner] for out in outs])  # (B, G, R)
    if c.objective == "dpo":
        return dict(x, ref=logp), dict(pairs=len(rollout.prompts))
    if c.correction != "none":
        x["weight"] = correction_weights(c.correction, logp, rollout.logp_roll, mask)
        log.update(weight=x["weight"].sum().item() / n, rejected=((x["weight"] == 0) & mask).sum().item() / n)
    if c.objective == "ppo":
        x["values"] = torch.cat([out["value"] for out in outs])
        at_end = torch.zeros_like(logp).scatter(2, rollout.lengths[..., None] - 1, signal[..., None])  # (B, G, R)
        adv, x["returns"] = gae(at_end, x["values"], mask, c.gamma, c.lam)
        x["adv"] = whiten(adv, mask)
        log["value"] = x["values"].sum().item() / n
    return x, log


def objective_loss(out, r, x, old, c, whole):
    """One micro-batch r of the rollout `whole`. out: what replay returned; x: its part of before_updates; old: the learner's log-probs
    before its first update, None in that. -> loss (), numbers; both add up over micro-batches"""
    logp = out[c.learner]
    if c.objective == "dpo":
        losses, margin = dpo_loss(logp, x["ref"], r.mask, c.beta)
        return losses.sum() / len(whole.prompts), dict(margin=margin.sum().item() / len(whole.prompts))
    # first update after a rollout: the ratio is exactly 1, and with norm "sequence" grpo's loss 0; the gradient is not
    loss, stats = policy_loss(logp, old, x["adv"], r.mask, c.clip, c.clip_high, c.norm, x.get("weight"), x["scale"])
    numbers = dict(clip_frac=stats["clipped"].item() * r.mask.sum().item() / whole.mask.sum().item())
    if c.objective == "ppo":
        error = value_loss(out["value"], x["values"], x["returns"], r.mask, c.clip, x["scale"])
        loss, numbers["value_loss"] = loss + c.value_coef * error, error.item()
    return loss, numbers


def learn(net, opt, rollout, signal, c, lr, aux=None):
    """`updates` optimizer steps on one rollout. -> numbers for the log

    signal (B, G): advantages for grpo, rewards for ppo and dpo. aux: ppo's value head, dpo's frozen reference."""
    if c.objective == "dpo":
        rollout = best_and_worst(rollout, signal)
        if not rollout.prompts:  # nothing to learn from: the weights stay as they are
            return dict.fromkeys(("loss", "kl", "clip_frac", "grad_norm", "pairs"), 0.0)
    both, other = c.distill > 0, "dense" if c.learner == "shadow" else "shadow"
    policies = (other, c.learner) if both else (c.learner,)  # replay gives entropy and values of the last
    parts, old, log, first = split_rows(rollout, len(policies), c.micro_rows), {}, {}, {}
    batch, extra = before_updates(net, rollout, parts, signal, c, aux)
    for update in range(c.updates):
        sums = dict(loss=0.0, kl=0.0, clip_frac=0.0)
        for i, part in enumerate(parts):
            say(f"update {update + 1}/{c.updates}, micro-batch {i + 1}/{len(parts)}")
            r, x = rollout.select(part), {k: v[part] for k, v in batch.items()}
            out = replay(net, r, policies, distill_to=c.distill_to if both else None, stats=update == 0,
                         checkpointing=c.checkpointing, value=aux if c.objective == "ppo" else None)
            loss, numbers = objective_loss(out, r, x, old.get(i), c, rollout)
            if both:
                kl = (x["scale"] * out["kl"]).sum()
                numbers["kl"] = kl.item()
                loss = loss + c.distill * kl
            for k, v in dict(numbers, loss=loss.item()).items():
                sums[k] = sums.get(k, 0.0) + v
            loss.backward()
            logp = out[c.learner].detach()
            old.setdefault(i, logp)
            if update == 0:
                out["gap"] = (logp - r.logp_roll).abs()
                for k in {"gap", "entropy", "accept"} & out.keys():
                    first.setdefault(k, []).append(out[k][r.mask])
        sums["grad_norm"] = opt.step(lr, c.grad_clip)
        log = log or sums
    if c.updates > 1:
        log["clip_frac"] = sums["clip_frac"]  # of the last update: in the first one nothing can be clipped
    first = {k: torch.cat(x).float() for k, x in first.items()}
    log.update(extra, gap=first["gap"].mean().item(), gap_max=first["gap"].max().item(), entropy=first["entropy"].mean().item())
    if "accept" in first:
        log.update(accept=first["accept"].mean().item(), accept_p05=first["accept"].quantile(0.05).item())
    return log


def say(text, width=70):
    """What is going on now, on a terminal only; the next line replaces it."""
    if sys.stderr.isatty():
        sys.stderr.write("\r" + text[:width].ljust(width) + ("" if text else "\r"))
        sys.stderr.flush()


def append(c, name, text):
    """Add text to a file in out_dir."""
    with open(os.path.join(c.out_dir, name), "a", encoding="utf-8", errors="backslashreplace") as f:
        f.write(text)


def choose_device(c):
    """Replace "auto" in c.device and c.dtype by what it means here. Raises ValueError for a device that is not there."""
    if c.device == "auto":
        c.device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = c.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal() or (kind == "cpu" and index):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {c.device!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={c.device} was asked for, but torch finds no CUDA or no such card ({torch.cuda.device_count()} found)")
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))  # what is asked below, such as the peak, is asked of the current card
    if c.dtype == "auto":
        c.dtype = "bfloat16" if kind == "cuda" else "float32"


def setup(argv):
    """Everything that can be wrong with a request is found here, before out_dir is touched. -> what the loop needs"""
    c = settings(argv)
    choose_device(c)
    path = lambda name: os.path.join(c.out_dir, name)
    if not (c.resume or c.overwrite) and any(os.path.exists(path(name)) for name in ("config.json", "ckpt.pt", "log.jsonl")):
        raise ValueError(f"out_dir {c.out_dir!r} holds another run: say --resume=True, --overwrite=True, or another --out_dir")
    if os.path.isdir(c.out_dir):
        hold(c.out_dir)
    state = read_checkpoint(c) if c.resume else None
    folder = find_checkpoint(c.model)
    if os.path.realpath(folder) == os.path.realpath(path("model")):
        raise ValueError(f"model {c.model!r} is where this run would save its own: choose another --out_dir")
    tok = Tokenizer(folder)
    net = Transformer.from_pretrained(folder, device=c.device, dtype=getattr(torch, c.dtype))
    if len(tok) > net.config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {len(tok)} ids, the model {net.config.vocab_size}")
    net.vocab_used = len(tok)
    if c.prompt_tokens + c.max_new_tokens > net.config.max_pos:
        raise ValueError(f"prompt_tokens {c.prompt_tokens} + max_new_tokens {c.max_new_tokens} exceed the model's context of "
                         f"{net.config.max_pos}")
    problems, aux = Problems(c, tok), None
    if c.objective == "ppo":  # starts at 0; its weights are in the checkpoint, not in the saved model
        aux = torch.nn.Linear(net.config.width, 1, device=c.device)
        for p in aux.parameters():
            torch.nn.init.zeros_(p)
    opt = Masters(net, c, aux)
    if c.objective == "dpo":  # the initial weights, also where a run goes on
        aux = Transformer.from_pretrained(folder, device=c.device, dtype=net.dtype).requires_grad_(False)
        aux.vocab_used = net.vocab_used
    if state:
        opt.load(state)
    prepare_out(c, state)
    return c, folder, tok, net, problems, opt, state, aux


def introduce(c, folder, net):
    """Print the facts that decide speed and memory."""
    per_token, cuda = net.config.kv_bytes_per_token(net.dtype), c.device.startswith("cuda")
    keys = c.prompt_tokens if c.evict == "none" else min(c.budget, c.prompt_tokens)  # per prompt
    own = min(c.max_new_tokens - 1, c.response_budget + c.period if c.response_budget else c.max_new_tokens)  # per sample
    kept = c.prompts * keys + c.prompts * c.group * own
    dense = c.prompts * c.group * (c.prompt_tokens + c.max_new_tokens - 1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else f'{torch.get_num_threads()} CPU threads'}, {c.dtype} "
          f"weights, fp32 masters, attention by the {'Triton kernel' if cuda else 'PyTorch reference'}")
    size = sum(p.numel() for p in net.parameters()) / 1e6
    print(f"{folder}: {net.config.arch}, {size:.2f}M parameters, {per_token:,} KV bytes per token")
    print(f"{c.task}: prompts of up to {c.prompt_tokens} tokens, {keys} keys kept per layer and KV head ({c.evict}); a rollout of "
          f"{c.prompts} x {c.group} samples holds up to {kept * per_token:,} KV bytes, {dense * per_token:,} if each kept all keys")
    if c.objective == "dpo":
        print("a frozen copy of the initial model, the reference, is held beside it")
    # other norms weigh long responses more, and so do corrections: advantages that sum to 0 then do not make the loss 0
    if (c.objective, c.correction, c.norm) == ("grpo", "none", "sequence"):
        print("the policy term of the loss is 0 in value, not in gradient: the ratio is 1 on a rollout's first update")


def main(argv):
    interrupted = []

    def on_interrupt(signum, frame):
        if interrupted:
            sys.exit(130)
        interrupted.append(True)
        print("\ninterrupt: finishing this step, then saving; once more quits at once", file=sys.stderr)

    try:
        c, folder, tok, net, problems, opt, state, aux = setup(argv)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    introduce(c, folder, net)
    signal.signal(signal.SIGINT, on_interrupt)
    step0, evals, kv = (state["step"], state["evals"], state["kv"]) if state else (0, [], None)
    try:
        step, kv = loop(c, tok, net, problems, opt, aux, step0, evals, kv, interrupted)
        if step == c.steps:
            finish(c, folder, net, evals, kv)
    except (OSError, FloatingPointError) as e:  # a disk that is full, an update that is not finite: what was saved stays
        sys.exit(f"error: {e}")
    if step < c.steps:
        print(f"saved in {c.out_dir}; go on with the same command and --resume=True" if step > step0 else "no step was finished: nothing saved")
        sys.exit(130)


def show(log):
    """One line per step, fixed width. gap: learner against sampler; accept: overlap of the two policies, mean and 5th percentile;
    ent: entropy of the learner's policy; clip: clipped tokens (of the last update; the rest is of the first); trunc: responses
    cut short; equal: groups whose samples all earned the same; grad: gradient norm; seconds of rollout + update.
    weight, rejected: mean weight of a correction, tokens that it drops; value, value_loss: of ppo; pairs, margin: of dpo."""
    accept = f"accept {log['accept']:.3f} p05 {log['accept_p05']:.3f} | " if "accept" in log else ""
    more = "".join(f"{k} {log[k]:.3f} | " for k in ("weight", "rejected", "value", "value_loss", "pairs", "margin") if k in log)
    gap = f"gap {log['gap']:.1e} max {log['gap_max']:.1e} | {accept}ent {log['entropy']:.2f}" if "gap" in log else "nothing replayed"
    return (f"step {log['step']:4d} | reward {log['reward']:.3f} | loss {log['loss']:+.4f} kl {log['kl']:.4f} | {gap} | "
            f"clip {log['clip_frac']:.2f} trunc {log['truncated']:.2f} equal {log['equal']:.2f} | {more}grad {log['grad_norm']:.2f} | "
            f"{log['rollout_s']:.1f}+{log['learn_s']:.1f} s")


def loop(c, tok, net, problems, opt, aux, step0, evals, kv, interrupted):
    """The algorithm, from step0 to c.steps or to the step during which `interrupted` fills. kv: bytes of the last rollout's cache.
    -> steps done, kv"""
    step, start = step0, time.time()
    while True:
        # 0. evaluate on held-out problems, also before the first step and after the last
        if (step % c.eval_every == 0 or step == c.steps) and not (evals and evals[-1]["step"] == step):
            e = dict(zip(("eval_compressed", "eval_accept", "eval_accept_p05"), evaluate(net, tok, problems, c, c.evict)))
            e["eval_dense"], = evaluate(net, tok, problems, c, "none")
            evals.append(dict(step=step, **e))
            append(c, "log.jsonl", json.dumps(evals[-1]) + "\n")
            overlap = f", accept {e['eval_accept']:.3f} p05 {e['eval_accept_p05']:.3f}" if "eval_accept" in e else ""
            print(f"eval {step:4d} | held-out reward ({problems.n_eval} problems), greedy: compressed cache {e['eval_compressed']:.3f}, "
                  f"dense cache {e['eval_dense']:.3f}{overlap}", flush=True)
        if step >= c.steps or interrupted:
            return step, kv
        t0 = time.time()
        # 1. sample prompts; their index is the position in the data
        batch, ids = problems.get("train", range(step * c.prompts, (step + 1) * c.prompts))
        # 2. roll out under the compressed cache
        say(f"step {step}: rollout")
        rollout = generate(net, ids, c.group, c.max_new_tokens, c.temperature, c.evict, c.budget, c.window, c.sinks,
                           c.response_budget or None, c.period, tok.stop_ids, c.seed * 1_000_003 + step, c.pool)
        kv = rollout.kv
        # 3. reward the decoded text; what was sampled is never encoded again
        texts = [[tok.decode(t[:n]) for t, n in zip(*row)] for row in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]
        rewards = torch.tensor([[reward(p, t) for t in row] for p, row in zip(batch, texts)], device=net.device)
        t1 = time.time()
        # 4. advantages within each group; ppo and dpo learn from the rewards themselves
        signal = advantages(rewards, c.norm) if c.objective == "grpo" else rewards  # (B, G)
        # 5. replay under the logged mask and update
        log = learn(net, opt, rollout, signal, c, c.lr * min(1.0, (step + 1) / (c.warmup + 1)), aux)
        t2 = time.time()
        # 6. log and save
        log = dict(step=step, reward=rewards.mean().item(), **log, equal=(rewards == rewards[:, :1]).all(1).float().mean().item(),
                   truncated=1 - rollout.stopped.float().mean().item(), tokens=rollout.lengths.sum().item(),
                   **{f"kv_{k}": v for k, v in kv.items()}, rollout_s=t1 - t0, learn_s=t2 - t1)
        if c.device.startswith("cuda"):
            log["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        append(c, "log.jsonl", json.dumps(log) + "\n")
        eta = (time.time() - start) / (step + 1 - step0) * (c.steps - step - 1) / 60
        print(show(log) + f" | eta {eta:.1f} min", flush=True)
        if step % c.save_every == 0 or step == c.steps - 1:
            for text, r in list(zip(texts[0], rewards[0].tolist()))[:2]:
                append(c, "samples.txt", f"--- step {step}\n{batch[0].text}\n>>> {text!r} (answer {batch[0].answer}) reward {r:.2f}\n")
        step += 1
        if step % c.save_every == 0 or step == c.steps or interrupted:
            state = dict(opt.state(), step=step, evals=evals, config=vars(c), kv=kv)
            write_whole(os.path.join(c.out_dir, "ckpt.pt"), lambda tmp: torch.save(state, tmp))


def finish(c, folder, net, evals, kv):
    """Save the model in Hugging Face format with its tokenizer and say what was reached."""
    target = os.path.join(c.out_dir, "model")
    net.save_pretrained(target)
    for name in os.listdir(folder):  # tokenizer, chat template, generation_config.json
        if name != "config.json" and name.endswith((".json", ".jinja")) and not name.endswith(".index.json"):
            shutil.copy(os.path.join(folder, name), target)
    print(f"model saved to {target}")
    print(f"KV cache of a rollout: {kv['kept']:,} bytes kept, {kv['dense']:,} dense (1/{kv['dense'] / kv['kept']:.1f}), "
          f"{kv['dense_shared']:,} dense with each prompt shared by its group (1/{kv['dense_shared'] / kv['kept']:.1f})")
    print(f"held-out reward with the compressed cache: {evals[0]['eval_compressed']:.3f} -> {evals[-1]['eval_compressed']:.3f} "
          f"(dense cache {evals[0]['eval_dense']:.3f} -> {evals[-1]['eval_dense']:.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
