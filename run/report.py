"""What a run says and leaves: a line per step, samples, checkpoints, models, its last lines."""
import torch

from data.rewards import means
from support import parallel
from support.screen import progress, tell

IDLE = 20  # steps in a row without a gradient after which a run says so


def facts(rollout, parts):
    """What a rollout says of itself, for the log. parts: of rewards, by name."""
    rewards = rollout.rewards
    equal = (rewards == rewards[:, :1]).all(1)                            # (B,)
    log = dict(
        reward=rewards.mean().item(), equal=equal.float().mean().item(),
        truncated=1 - rollout.stopped.float().mean().item(),
        tokens=rollout.lengths.sum().item(),
        length=rollout.lengths.float().mean().item(), **means(parts))
    log.update({f"kv_{name}": size for name, size in rollout.kv.items()})
    if rewards.is_cuda:
        log["peak_gb"] = max(parallel.gather(torch.cuda.max_memory_allocated() / 1e9))
    return log


# columns of a step's line, what tells most first: name in the log, name in the line, form
COLUMNS = [
    ("reward", "reward", ".3f"), ("gap", "gap", ".1e"), ("accept", "accept", ".3f"),
    ("kl", "kl", ".4f"), ("loss", "loss", "+.4f"), ("gap_max", "gap_max", ".1e"),
    ("accept_p05", "p05", ".3f"), ("entropy", "ent", ".2f"),
    ("clip_frac", "clip", ".2f"), ("truncated", "trunc", ".2f"),
    ("equal", "equal", ".2f"),
    *((name, name, ".3f") for name in (
        "weight", "rejected", "value", "value_loss", "pairs", "margin", "ref_kl"))]


def show(log):
    """One line per step. gap, gap_max: learner against sampler, mean and largest; accept, p05:
    overlap of the two policies, mean and 5th percentile; ent: entropy of the learner's policy;
    clip: clipped tokens; trunc: responses cut short; equal: groups whose samples all earned the
    same; grad: gradient norm; seconds of rollout + update. weight, rejected: mean weight of a
    correction, tokens that it drops; value, value_loss: of ppo; pairs, margin: of dpo; ref_kl: KL
    to the initial model; skipped: updates left out, as a gradient of float16 was not finite."""
    named = [(name, name, ".3f") for name in log if name.startswith("reward_")]
    parts = [f"step {log['step']:4d}"]
    parts += [f"{short} {log[name]:{form}}" for name, short, form in [*COLUMNS, *named]
              if name in log]
    if "gap" not in log:
        parts.insert(2, "nothing replayed")
    if log.get("skipped"):
        parts.insert(1, f"skipped {log['skipped']:.0f}: gradient beyond float16, loss "
                        f"scale now {log['loss_scale']:,.0f}")
    parts.append(f"grad {log['grad_norm']:.2f}")
    parts.append(f"{log['rollout_s']:.1f}+{log['learn_s']:.1f} s")
    return " | ".join(parts)


def report(job, problem, rollout, log):
    """Log and print a step; on a terminal each tenth stays, or more of them where a run has fewer
    than 200: about 20 lines at least. problem: the first of the rollout."""
    run = job.run
    steps = job.config.steps
    run.log("step", log)
    stays = run.step % max(1, min(10, steps // 20)) == 0 or run.step == steps - 1
    stays = stays or log.get("skipped", 0) > 0
    progress(show(log), end=f"eta {run.minutes_left():.1f} min", stays=stays)
    if run.step % job.config.save_every == 0 or run.step == steps - 1:
        prompt = job.tok.decode(rollout.prompts[0])
        for text in two_samples(job.tok, problem, rollout):
            run.append("samples.txt", f"--- step {run.step}\n{prompt}\n{text}")
    run.memory["kv"] = rollout.kv
    if "skipped" in log:
        run.memory["skipped"] = run.memory.get("skipped", 0) + int(log["skipped"])
    watch_idle(job, problem, rollout, log)


def sample(problem, text, x):
    """A response with its reward x, for the eye."""
    return f">>> {text!r} (answer {problem.answer}) reward {x:.2f}\n"


def two_samples(tok, problem, rollout, longest=None):
    """Two responses to the first problem of a rollout. longest: at most so many letters of each."""
    texts = [tok.decode(tokens[:n], special=True)[:longest] for tokens, n in zip(
        rollout.tokens[0, :2].tolist(), rollout.lengths[0, :2].tolist())]
    return [sample(problem, text, x)
            for text, x in zip(texts, rollout.rewards[0, :2].tolist())]


def watch_idle(job, problem, rollout, log):
    """Count the steps whose gradient was exactly 0; where many follow each other, say once what
    that may mean."""
    memory = job.run.memory
    if log["grad_norm"] or log.get("skipped"):
        memory["in_a_row"] = 0
        return
    memory["idle"] = memory.get("idle", 0) + 1
    memory["in_a_row"] = memory.get("in_a_row", 0) + 1
    if memory["in_a_row"] != IDLE:
        return
    mean = rollout.rewards.mean()
    why = "is the task too easy?"
    if mean <= 0:
        why = ("do the responses have the form that the reward asks for, is the task "
               "too hard?")
    texts = two_samples(job.tok, problem, rollout, longest=200)
    texts = "".join(f"  {text}" for text in texts)
    tell(f"{IDLE} steps in a row have changed nothing: in each, all samples of a "
         f"prompt earned the same ({mean:.3f} on average now); {why} For "
         f"example:\n{texts.rstrip()}")


# what stays

def save(job):
    """Write the checkpoint where it is due, then the model where it is the best so far: a run that
    is cut between the two comes back to the same step and writes it again."""
    run = job.run
    run.agree()
    best = run.memory.get("best", {})
    is_best = best.get("step") == run.step
    due = run.step % job.config.save_every == 0
    if (is_best or due or run.finished or run.interrupted) and run.unsaved:
        parallel.check_equal(job.opt.whole(), "the weights")
        run.save(job.opt.state())
    if is_best:
        write_models(job, ("best", "adapter-best"), reward=best["eval_compressed"])
    parallel.gather(None)  # it is there for all ranks


def write_models(job, names, reward):
    """Write the model in Hugging Face format with its tokenizer and, with LoRA, what it adds to the
    initial one. names: of their folders."""
    job.run.write_model(names[0], job.net, reward)
    if job.config.lora_rank:
        job.run.write_model(names[1], job.opt, reward)


def finish(job):
    """Save the model and say what was reached."""
    run = job.run
    evals = run.memory["evals"]
    first = evals[0]
    last = evals[-1]
    best = run.memory["best"]
    write_models(job, names=("model", "adapter"), reward=last["eval_compressed"])
    tell(f"model saved to {run.path('model')}: step {last['step']}, held-out reward "
         f"{last['eval_compressed']:.3f} with the compressed cache")
    what = f"step {best['step']}, {best['eval_compressed']:.3f}"
    if best["eval_compressed"] == 0:
        what = f"all earned 0, so it is the first one, of step {best['step']}"
    tell(f"best of {len(evals)} evaluations saved to {run.path('best')}: {what}")
    sizes = run.memory["kv"]
    kept, dense, shared = (sizes[name] for name in ("kept", "dense", "dense_shared"))
    tell(f"KV cache of a rollout: {kept:,} bytes kept, 1/{dense / kept:.1f} of "
         f"{dense:,} dense, 1/{shared / kept:.1f} of {shared:,} dense with each prompt "
         "shared by its group")
    idle = run.memory.get("idle", 0)
    if idle:
        so = "these steps changed nothing"
        if idle == run.step:
            so = "nothing was learned"
        tell(f"in {idle} of {run.step} steps the gradient was exactly 0, as when all "
             f"samples of each prompt earn the same: {so}")
    skipped = run.memory.get("skipped", 0)
    if skipped:
        tell(f"{skipped} of {run.step * job.config.updates} updates were skipped, as "
             "their gradients went beyond float16; the scale of the loss is now "
             f"{job.opt.scale:,.0f}")
    tell_answers(*run.memory["answers"])
    tell("held-out reward with the compressed cache: "
         f"{first['eval_compressed']:.3f} -> {last['eval_compressed']:.3f} "
         f"(dense cache {first['eval_dense']:.3f} -> {last['eval_dense']:.3f})")


def tell_answers(before, after):
    """Print the first held-out problem's answers from both caches, before and after training."""
    tell(f"the first held-out problem: {before['question']}")
    tell(f"  right answer          {before['answer']}")
    for when, found in (("before", before), ("after", after)):
        for cache in ("compressed", "dense"):
            tell(f"  {when + ', ' + cache:20}  {found[cache].strip()[:200]!r}, reward "
                 f"{found['reward_' + cache]:.2f}")
