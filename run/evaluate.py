"""Held-out problems under the compressed and under the dense cache, and which step did best."""
import functools
from dataclasses import replace

import torch

from data.rewards import RewardError, means
from data.tasks import stop_strings
from grpo import replay
from kvcache import Eviction
from rollout import generate
from run.learn import asked, micro_batches, overlap
from run.report import sample
from run.rewards import decode, join_parts, judged
from run.settings import eviction_of_evaluation, problems_at
from support import parallel
from support.run import step_of
from support.screen import say, tell


def evaluate(net, tok, problems, config, eviction, n, run=None):
    """Greedy reward on the first n held-out problems under `eviction`, the same for every seed.
    -> dict of reward, length (mean, in tokens), samples (problem, response, reward of each), a
    reward_NAME for each number that a function of one's own names and, if keys are evicted, accept
    and accept_p05: how much of the dense policy the sparse one covers, the sum over the vocabulary
    of min(p_dense, p_shadow), mean and 5th percentile over tokens. None if a signal comes between
    two batches."""
    work = functools.partial(
        evaluate_share, net, tok, problems, config=config, eviction=eviction, n=n,
        run=run)
    found = parallel.gather(parallel.attempt(RewardError, work))
    say("")
    if None in found:
        return None
    samples, tokens, accept, parts = zip(*found)
    samples = sum(samples, [])
    rewards = [x for _, _, x in samples]
    log = dict(reward=sum(rewards) / n, length=sum(tokens) / n, samples=samples,
               **means(join_parts(parts)))
    accept = sum(accept, [])
    if accept:
        log.update(asked(overlap(torch.cat(accept))))
    return log


def evaluate_share(net, tok, problems, config, eviction, n, run):
    """This rank's share of `evaluate`. -> samples, number of tokens, overlaps of batches of tokens,
    what else the reward returns by name; None if a signal comes between two batches"""
    dense = eviction.method == "none"
    cache = "dense" if dense else eviction.method
    stops = stop_strings(config.stop)
    samples = []
    accept = []
    tokens = 0
    parts = {}
    mine = parallel.share(n)
    for start in range(mine.start, mine.stop, config.eval_batch):
        if run and run.signal:
            return None
        say(f"eval ({cache} cache) {start}/{n}")
        end = min(start + config.eval_batch, mine.stop)
        batch, prompts = problems.get("eval", range(start, end))
        rollout = generate(
            net, prompts, 1, config.max_new_tokens, temperature=0.0, eviction=eviction,
            stop_ids=tok.stop_ids, seed=0)
        rollout, rewards, found = judged(
            tok, rollout, batch, "held-out", first=start, stops=stops)
        for name, xs in found.items():
            parts.setdefault(name, []).extend(xs)
        for problem, (text,), (x,) in zip(batch, decode(tok, rollout), rewards):
            samples.append((replace(problem, rule=str(problem.rule)), text, x))
        tokens += rollout.lengths.sum().item()
        for indices in micro_batches(rollout, 2, config.micro_rows):
            if not dense:
                with torch.no_grad():
                    out = replay(net, rollout.select(indices), stats=True)
                accept.append(out["accept"][rollout.mask[indices]].cpu())
    return samples, tokens, accept, parts if samples else None


def evaluate_both(job):
    """Evaluate with a compressed and with the dense cache, once a step; log and print it, unless a
    signal cuts it short: then it is done again after a resume."""
    run = job.run
    config = job.config
    evals = run.memory.setdefault("evals", [])
    if evals and evals[-1]["step"] == run.step:
        return
    n = min(problems_at(config, run.step), job.problems.n_eval)
    under = functools.partial(
        evaluate, job.net, job.tok, job.problems, config=config, n=n, run=run)
    sparse = under(eviction=eviction_of_evaluation(config))
    dense = under(eviction=Eviction("none"))
    if sparse is None or dense is None:
        return
    row = dict(
        step=run.step, problems=n, eval_compressed=sparse["reward"],
        eval_dense=dense["reward"], eval_accept=sparse["accept"],
        eval_accept_p05=sparse["accept_p05"],
        eval_length=sparse["length"], eval_length_dense=dense["length"])
    for cache, found in (("compressed", sparse), ("dense", dense)):
        row.update({name.replace("reward", f"eval_{cache}", 1): x
                    for name, x in found.items() if name.startswith("reward_")})
        lines = "".join(sample(*response) for response in found["samples"])
        run.append("samples.txt", f"--- eval {run.step}, {cache} cache\n{lines}")
    best = run.memory.get("best")
    if best is None or row["eval_compressed"] > best["eval_compressed"]:
        run.memory["best"] = row
    evals.append(row)
    texts = side_by_side(sparse["samples"], dense["samples"])
    run.memory.setdefault("answers", [texts[0], None])[1] = texts[0]  # before and after
    run.log("eval", dict(row, texts=texts))
    named = "".join(f"{name} {x:.3f}, " for name, x in row.items()
                    if name.startswith(("eval_compressed_", "eval_dense_")))
    tell(f"eval {run.step:4d} | held-out reward ({n} problems), greedy: compressed "
         f"cache {row['eval_compressed']:.3f}, dense cache {row['eval_dense']:.3f}, "
         f"{named}accept {row['eval_accept']:.3f} p05 {row['eval_accept_p05']:.3f}")


def side_by_side(sparse, dense, n=4):
    """The first n held-out problems with their responses under either cache, for the log."""
    texts = []
    for (problem, compressed, earned), (_, text, x) in list(zip(sparse, dense))[:n]:
        question = problem.text.strip().splitlines()[-1][:500]
        texts.append(dict(
            question=question, answer=problem.answer, compressed=compressed,
            reward_compressed=earned, dense=text, reward_dense=x))
    return texts


def check_best(run):
    """After a resume: forget the best evaluation where best/ holds the model of another step, as it
    does if a later checkpoint was given up, or none, and no more is known of it."""
    names = ("best", "adapter-best") if run.config.lora_rank else ("best",)
    evals = run.memory.get("evals", [])
    best = run.memory.get("best")
    if best and best["step"] in (run.step, step_of(run.path(""), names)):
        return
    if best:
        places = " with ".join(str(run.path(name)) for name in names)
        tell(f"{places} does not hold the model of step {best['step']}, the best so "
             "far: the search for the best starts anew")
        del run.memory["best"]
    if evals and evals[-1]["step"] == run.step:  # its model is here
        run.memory["best"] = evals[-1]
