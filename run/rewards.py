"""
What responses earn: their text, where it ends, and the reward that a rule or a function of one's
own gives it.
"""
import functools
from dataclasses import replace

import torch

from data.rewards import RewardError
from data.tasks import before_stop, judge, stop_end
from rollout import join
from support import parallel


def ids_of(rollout):
    """The tokens of each response: B lists of G lists of ids."""
    return [[tokens[:n] for tokens, n in zip(*group)]
            for group in zip(rollout.tokens.tolist(), rollout.lengths.tolist())]


def decode(tok, rollout, special=True):
    """The text of each response: B lists of G. special: with stop tokens and the like."""
    return [[tok.decode(ids, special=special) for ids in group]
            for group in ids_of(rollout)]


def cut_at(tok, rollout, stops):
    """The rollout whose responses end with the token whose text completes a stop string: what
    stands behind is neither rewarded nor learned from."""
    if not stops:
        return rollout
    plain = functools.partial(tok.decode, special=False)
    ends = [[stop_end(plain, ids, stops) for ids in group] for group in ids_of(rollout)]
    return rollout.cut(torch.tensor(ends, device=rollout.lengths.device))


def judged(tok, rollout, batch, split, first, stops):
    """-> the rollout, cut at stop strings; what data.tasks.judge says of its responses without stop
    tokens and stop strings: rewards, B lists of G, and numbers of responses by name"""
    rollout = cut_at(tok, rollout, stops)
    texts = [[before_stop(text, stops) for text in group]
             for group in decode(tok, rollout, special=False)]
    found = judge(batch, texts, split, first=first, tokens=ids_of(rollout))
    return rollout, *found


def rewarded(tok, rollout, batch, first, stops=()):
    """Judge the responses to a batch of training problems. first: number of the first problem.
    -> of all ranks: the rollout, cut at stop strings, with rewards (B, G); numbers of responses by
    name"""
    work = functools.partial(
        judged, tok, rollout, batch, split="training", first=first, stops=stops)
    rollout, rewards, parts = parallel.attempt(RewardError, work)
    rewards = torch.tensor(rewards, device=rollout.tokens.device)         # (prompts, G)
    rollouts, rewards, parts = zip(*parallel.gather((rollout, rewards, parts)))
    return replace(join(rollouts), rewards=torch.cat(rewards)), join_parts(parts)


def join_parts(several):
    """Dicts of lists, one of each rank, None of one that judged nothing, as one. Raises ValueError
    where their names differ."""
    several = [parts for parts in several if parts is not None] or [{}]
    for parts in several:
        if set(parts) != set(several[0]):
            here, there = (", ".join(each) or "none" for each in (parts, several[0]))
            raise ValueError(f"the reward returned the names {here} on one rank, "
                             f"{there} on another: they must be the same each time")
    return {name: sum((parts[name] for parts in several), []) for name in several[0]}
