"""
Is a request for a rollout, and the log of one, what it claims to be? One line that names the
culprit where it is not.

A log may come from a file or from another program, and a wrong one still gives log-probs: those of
another policy. So the learner asks before it packs. What takes values from a card is asked for
once, as each question stalls it.
"""
import operator

import torch

INF = float("inf")


def check_request(model, prompts, group, max_new_tokens, temperature, prefill_rows,
                  stop_ids, seed, part):
    """-> prompts, stop_ids as lists of ints; number of the first sample, of all. Raises ValueError,
    naming the culprit, for a request that cannot be served as asked."""
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            f"prompts must be a list of lists of token ids, got {prompts!r:.80}")
    if not prompts or group < 1 or max_new_tokens < 1:
        raise ValueError("need at least one prompt, sample and new token: got "
                         f"{len(prompts)}, {group}, {max_new_tokens}")
    if not 0 <= temperature < INF:
        raise ValueError(
            f"temperature must be finite and not negative, got {temperature}")
    first, count = part or (0, len(prompts))
    if not 0 <= first <= count - len(prompts):
        raise ValueError(f"part must be (number of the first prompt, of all), with "
                         f"{len(prompts)} prompts here, got {part}")
    if prefill_rows < 1:
        raise ValueError(f"prefill_rows must be at least 1, got {prefill_rows}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")
    vocab_size, context = model.config.vocab_size, model.config.max_pos
    prompts = [token_ids(f"prompt {b}", prompt, vocab_size)
               for b, prompt in enumerate(prompts)]
    for b, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {b} is empty")
        if len(prompt) + max_new_tokens > context:
            raise ValueError(f"prompt {b} has {len(prompt)} tokens; with "
                             f"{max_new_tokens} new ones that exceeds the context of "
                             f"{context}")
    stop_ids = token_ids("stop_ids", stop_ids, vocab_size)
    return prompts, stop_ids, (first * group, count * group)


def token_ids(name, ids, vocab_size):
    """ids as a list of ints. Raises ValueError, saying whose they are, if they are none."""
    try:
        ids = [operator.index(token) for token in ids]
    except TypeError:
        raise ValueError(
            f"{name} must be a list of token ids, got {ids!r:.80}") from None
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds token id {token}, the vocabulary has {vocab_size}")
    return ids


def check_log(rollout):
    """Raise ValueError for a log that does not fit its rollout. -> its kept_keys, which take a
    card some time to find"""
    grid = B, G, R = rollout.tokens.shape
    until, lengths = rollout.until.shape, rollout.lengths.shape
    prompts, kept = len(rollout.prompts), len(rollout.kept)
    if (prompts, kept, until[2:], lengths) != (B, B, grid, grid[:2]):
        raise ValueError(f"the log does not fit {B} prompts x {G} samples x {R} "
                         f"tokens: {prompts} prompts, kept for {kept}, until "
                         f"{tuple(until)}, lengths {tuple(lengths)}")
    if not B:
        raise ValueError("the rollout holds no prompts")
    L, nkv = until[:2]
    for layers in rollout.kept:
        if torch.is_tensor(layers) and layers.shape[:2] == (L, nkv):
            continue
        if len(layers) != L or any(len(heads) != nkv for heads in layers):
            raise ValueError(f"kept is not given for {L} layers and {nkv} KV heads")
    check_integers(tokens=rollout.tokens, lengths=rollout.lengths, until=rollout.until)
    temperature = rollout.temperature
    if not isinstance(temperature, (int, float)) or not 0 <= temperature < INF:
        raise ValueError(
            f"temperature must be finite and not negative, got {temperature!r}")
    sizes = [len(prompt) for prompt in rollout.prompts]
    for b, (size, sampled) in enumerate(zip(sizes, rollout.sizes or sizes)):
        if size < 1 or size != sampled:
            raise ValueError(f"prompt {b} has {size} tokens, at sampling it had "
                             f"{sampled}")
    for kept in rollout.kept:
        check_integers(kept=kept)
    prompt, head, position = kept_keys(rollout)                 # (n,) each
    size = torch.tensor(sizes, device=prompt.device)[prompt]
    sound = (position >= 0) & (position < size)
    slot = (prompt * (L * nkv) + head) * max(sizes) + position
    sound[1:] &= slot.diff() > 0  # ascending
    born = torch.arange(R, device=rollout.until.device)
    lives = (rollout.until > born) | ~rollout.mask
    asked = *rollout.lengths.aminmax(), lives.all(), sound.all()
    shortest, longest, lives, good = torch.stack([x.long() for x in asked]).tolist()
    if shortest < 1 or longest > R:
        raise ValueError(
            f"response lengths must be 1 to {R}, got {shortest} to {longest}")
    if not lives:
        raise ValueError(
            "until of response token t must be above t: its own query sees its key")
    if not good:
        b = prompt[~sound][0].item()
        raise ValueError(f"kept of prompt {b}: positions must be ascending and "
                         f"within its {sizes[b]} tokens")
    return prompt, head, position


def kept_keys(rollout):
    """The kept keys of all prompts: number of the prompt, KV head, counted on from layer to
    layer, and position, (n,) each."""
    heads = rollout.until.shape[0] * rollout.until.shape[1]
    found, counts = [], []
    for kept in rollout.kept:
        if torch.is_tensor(kept):  # all keep equally many
            found.append(kept.flatten())
            counts += [kept.shape[2]] * heads
        else:
            found += [position for layer in kept for position in layer]
            counts += [len(position) for layer in kept for position in layer]
    position = torch.cat(found)
    counts = torch.tensor(counts, device=position.device)
    head = torch.repeat_interleave(counts, output_size=len(position))
    return head // heads, head % heads, position


def check_model(rollout, model):
    """Raise ValueError for a log of another model's layers or heads, for more tokens than its
    context, and for ids of which it has no embedding, or, of responses, no logit."""
    config = model.config
    got, need = rollout.until.shape[:2], (config.n_layer, config.n_kv_head)
    if got != need:
        raise ValueError("the log holds lifetimes of (layers, KV heads) = "
                         f"{tuple(got)}, the model needs {need}")
    prompts = rollout.prompts
    longest = max(map(len, prompts)) + rollout.tokens.shape[2]
    if longest > config.max_pos:
        raise ValueError(f"prompt and response have up to {longest} tokens, the "
                         f"model's context is {config.max_pos}")
    tokens = rollout.tokens                                     # (B, G, R)
    sampled = torch.where(rollout.mask, tokens, tokens[..., :1])
    least, most = torch.stack(sampled.aminmax()).tolist()
    lowest = min(least, *map(min, prompts))
    highest = max(most, *map(max, prompts))
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(f"the rollout holds token ids {lowest} to {highest}, the "
                         f"vocabulary has {config.vocab_size}")
    if least < 0 or most >= model.vocab_used:
        raise ValueError(f"the responses hold token ids {least} to {most}, the model "
                         f"samples ids below {model.vocab_used}")


def check_integers(**tensors):
    """Raise ValueError unless each is a tensor of integers, or a list of lists of them."""
    for name, found in tensors.items():
        some = [found]
        if isinstance(found, list):
            some = [tensor for inner in found for tensor in inner]
        for tensor in some:
            if not torch.is_tensor(tensor) or tensor.is_floating_point():
                got = tensor.dtype if torch.is_tensor(tensor) else type(tensor).__name__
                raise ValueError(f"{name} must be a tensor of integers, got {got}")
