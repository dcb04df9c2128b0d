"""
Makes the small checkpoint in data/tiny/ from nothing: a tokenizer, a Qwen3-shaped model of 1.1 M
parameters, its training.

    python -m data.pretrain [FOLDER]      # data/tiny unless named

The idea. RL should have something to teach, so the checkpoint is a base model that can nearly do
the tasks kv, kv4 and kv16: it finds a code in a list of facts, but does not yet know the form of an
answer with several codes. On real prompts right after copying a small model stays at "some code of
the list". A curriculum helps:
1. copying. Rows of random tokens in which one span stands twice, at other places in every row,
   until the model continues the second occurrence: this forms the induction circuit (what came
   after this token the last time?).
2. the task with gaps closed. " apple is 4817" answers " apple" by induction only if nothing stands
   between key and code. So rows first lose all tokens but keys, digits and the stop token, then, as
   accuracy allows, fewer and fewer kinds of them, until they are the real prompts. Each list of
   facts is asked about several times, to be efficient. Codes are found first; the order of the keys
   in long answers comes last.
It ends in the middle of that: at the first step, looked at every 5 once the prompts are whole, at
which sampled answers to kv4 earn `target`. Then some reward is there to learn from, and the form is
not. Later snapshots know the form: then the full cache has nothing left to learn (docs/results.md).

data/tiny: seed 0 on one H200 (data/pretrain.log; twice with equal bits). On CPU, or with another
number of threads, sums are taken in another order, and the result is a sibling.

The vocabulary is that of data/words.txt, whatever tasks there are.

Left out on purpose: learning-rate decay, validation loss, resuming.
"""
import argparse
import json
import os
import random
import re
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from data import tasks
from data.tokenizer import BYTE_OF, Tokenizer
from kvcache import Eviction
from model import Config, Transformer
from rollout import generate
from support.run import choose_device
from support.screen import one_line_errors

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "tiny")

shape = dict(hidden_size=128, intermediate_size=384,
             num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32)
learning_rate = 3e-3
weight_decay = 0.01
clip = 1.0               # largest gradient norm
warmup = 50              # steps of each stage
# stage 1
copy_rows = 64
copy_length = 72         # tokens per row
copy_until = 0.95        # it ends when this fraction of copied tokens is right (running mean)
# stage 2: of each task the codes asked for at once, how often it is drawn, prompt lengths before
# any token is removed, codes asked for in a row
mixture = {
    "kv": (1, 1, (60, 210), 6),
    "kv4": (4, 1, (185, 290), 12),
    "kv16": (16, 2, (640, 740), 32)}
task_tokens = 8000       # per step
fewer_at = 0.7           # above this running mean of right numbers ...
fewer = 0.01             # ... each step removes that much less
# it ends when sampled answers to held-out prompts of kv4, from the dense cache, earn this
target = 0.1
check_every = 5          # steps, once no token is missing
check_problems, check_group = 128, 8
max_steps = 2000         # without it by then: an error
eval_every = 50          # steps between looks at all three tasks, once most tokens are there
eval_tokens = {"kv": 192, "kv4": 256, "kv16": 704}

STOP = "<|end|>"
HELD_OUT = 10**6          # number of the first held-out problem here: no run is judged by these
# Llama-3's: numbers fall into groups of up to three digits
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def words():
    """The words of the vocabulary, those after a space first: else the merges of words that start a
    line would be tried inside them."""
    with open(os.path.join(HERE, "words.txt"), encoding="utf-8") as f:
        inside, first = f.read().split("\n\n")
    return [" " + word for word in inside.split()] + first.split()


def merged_tokens():
    """-> vocabulary (token -> id), merges: byte-level BPE made by hand. 256 bytes, all numbers of
    two and three digits, and every word of words.txt, letter by letter from its start, so that no
    merge begins inside a word. Ids are in merge order."""
    char = {b: c for c, b in BYTE_OF.items()}
    vocab, merges = {char[b]: b for b in range(256)}, []

    def merge(a, b):
        if a + b not in vocab:
            vocab[a + b] = len(vocab)
            merges.append([a, b])

    for number in range(100):
        merge(*f"{number:02d}")
    for number in range(1000):
        a, b, c = f"{number:03d}"
        if b + c < a + b:  # the pair with the lower id merges first
            merge(a, b + c)
        else:
            merge(a + b, c)
    for word in words():
        spelt = word.replace(" ", char[32])
        for at in range(1, len(spelt)):
            merge(spelt[:at], spelt[at])
    return vocab, merges


def build_tokenizer():
    """-> tokenizer.json as a dict"""
    vocab, merges = merged_tokens()
    stop = dict(id=len(vocab), content=STOP, special=True, normalized=False,
                single_word=False, lstrip=False, rstrip=False)
    split = dict(type="Split", pattern=dict(Regex=SPLIT), behavior="Isolated",
                 invert=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False,
                      trim_offsets=True, use_regex=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None,
               continuing_subword_prefix=None, end_of_word_suffix=None,
               fuse_unk=False, byte_fallback=False, ignore_merges=False,
               vocab=vocab, merges=merges)
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[stop],
                normalizer=None,
                pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
                post_processor=None, decoder=byte_level, model=bpe)


def new_model(raw):
    """Random weights. Embeddings have length about 1, so that a copied token stands out among the
    logits from the start."""
    model = Transformer(Config.from_dict(raw))
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        std = weight.shape[1] ** -0.5
        # what a branch adds to the residual is smaller, so that depth does not blow up the sum
        if "o_proj" in name or "down_proj" in name:
            std *= 0.35
        torch.nn.init.normal_(weight, std=std)
    return model


def causal(rows):
    """Plain causal attention for `rows` sequences of equal length that stand one after the
    other."""
    def attend(layer, q, k, v):
        # (rows, heads, T, hs), keys and values repeated for the query heads that share them
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel(SDPBackend.MATH):  # sums in one order, on a GPU too
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)                               # (rows * T, nh, hs)
    return attend


def copy_batch(rng, words):
    """Stage 1 -> ids (rows, T), mask (rows, T) of the tokens that repeat what followed before.
    Lengths and places differ from row to row: one fixed distance would be learnt as just that."""
    ids = words[torch.randint(len(words), (copy_rows, copy_length), generator=rng)]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, marks in zip(ids, mask):
        length = int(torch.randint(10, copy_length // 2, (1,), generator=rng))
        starts = torch.randint(copy_length - 2 * length + 1, (2,), generator=rng)
        first, second = sorted(starts.tolist())
        row[second + length:second + 2 * length] = row[first:first + length].clone()
        marks[second + length + 1:second + 2 * length] = True
    return ids, mask


def task_row(rng, problem, tok, removed, kept):
    """One list of facts and several questions about it, no fact asked for twice -> list of (token,
    part of an answer?). Every kind of token that is not in `kept` is missing with probability
    `removed`; the same kinds throughout the row, so that what follows what can be told from it."""
    encode, stop = tasks.prompt_encoder(tok), tok.stop_ids[0]
    asked, _, _, at_most = mixture[problem.task]
    facts, question = problem.text.split("\n")
    pairs = re.findall(r"The code for ([^.]+) is (\d+)\.", facts)
    named = ", ".join(re.findall(r"(\D+?) \d+ ?", problem.answer))
    rng.shuffle(pairs)
    row = []
    for at in range(0, min(len(pairs), at_most) - asked + 1, asked):
        some = pairs[at:at + asked]
        text = "\n" + question.replace(named, ", ".join(key for key, _ in some))
        if not row:
            text = facts + text
        row += [(token, False) for token in encode(text)]
        answer = "".join(f" {key} {code}" for key, code in some)
        row += [(token, True) for token in tok.encode(answer) + [stop]]
    gone = {token for token in sorted({token for token, _ in row} - kept)
            if rng.random() < removed}
    return [(token, answer) for token, answer in row if token not in gone]


def task_batch(seed, step, tok, removed, kept):
    """Stage 2 -> ids (rows, T), mask (rows, T) of the answers' tokens."""
    rng, encode = random.Random(f"{seed}/{step}"), tasks.prompt_encoder(tok)
    task, = rng.choices(list(mixture), [weight for _, weight, _, _ in mixture.values()])
    tokens, rows, used = rng.randint(*mixture[task][2]), [], 0
    while used < task_tokens:
        index = step * 1000 + len(rows)
        problem = tasks.problem(task, "train", seed, index, tokens=tokens,
                                encode=encode)
        rows.append(task_row(rng, problem, tok, removed=removed, kept=kept))
        used += tokens
    T = max(map(len, rows))
    padding = (tok.stop_ids[0], False)
    both = torch.tensor([row + [padding] * (T - len(row)) for row in rows])  # (rows, T, 2)
    return both[..., 0], both[..., 1].bool()


def loss_on(model, ids, mask, counted):
    """-> mean cross-entropy of the masked tokens, fraction of right ones among those that are
    `counted` (V,)"""
    rows, T = ids.shape
    pos = torch.arange(T, device=ids.device).repeat(rows)
    hidden = model(ids.flatten(), pos, causal(rows))                           # (rows * T, C)
    mask = mask[:, 1:]
    hidden = hidden.view(rows, T, -1)[:, :-1][mask]                            # (masked, C)
    gold = ids[:, 1:][mask]                                                    # (masked,)
    logits = model.logits(hidden)                                              # (masked, V)
    right = (logits.argmax(-1) == gold)[counted[gold]]
    return F.cross_entropy(logits, gold), right.float().mean().item()


def evaluate(model, tok, task, n, group, temperature):
    """Answers to n held-out problems from the dense cache, `group` to each -> mean reward, fraction
    that have the form (codes may be wrong)."""
    encode = tasks.prompt_encoder(tok)
    problems = [
        tasks.problem(task, "eval", 0, index, tokens=eval_tokens[task], encode=encode)
        for index in range(HELD_OUT, HELD_OUT + n)]
    longest = max(len(tok.encode(" " + problem.answer)) for problem in problems) + 1
    exact = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # sampling has its own generator
    rollout = generate(
        model, [encode(problem.text) for problem in problems], group, longest,
        temperature=temperature, eviction=Eviction("none"), stop_ids=tok.stop_ids)
    torch.use_deterministic_algorithms(exact)
    earned, form = [], []
    for problem, group_ids, lengths in zip(
            problems, rollout.tokens.tolist(), rollout.lengths.tolist()):
        for ids, length in zip(group_ids, lengths):
            text = tok.decode(ids[:length], special=False)
            earned.append(tasks.reward(problem, text))
            said, gold = (re.sub(r"\d{4}", "", each)
                          for each in (text, " " + problem.answer))
            form.append(said == gold)
    return sum(earned) / len(earned), sum(form) / len(form)


def write_json(folder):
    """Everything of the checkpoint but its weights. -> config.json as a dict"""
    tokenizer = build_tokenizer()
    stop = len(tokenizer["model"]["vocab"])
    config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3",
                  **shape, vocab_size=stop + 1,
                  tie_word_embeddings=True, max_position_embeddings=2048,
                  rms_norm_eps=1e-6, rope_theta=10000.0,
                  attention_bias=False, hidden_act="silu", eos_token_id=stop)
    named = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=STOP,
                 clean_up_tokenization_spaces=False)
    sampling = dict(eos_token_id=stop, do_sample=True, temperature=1.0)
    files = dict(config=config, tokenizer=tokenizer, tokenizer_config=named,
                 generation_config=sampling)
    os.makedirs(folder, exist_ok=True)
    for name, content in files.items():
        indent = None if name == "tokenizer" else 2
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
            json.dump(content, f, indent=indent, ensure_ascii=False)
    return config


def training(model, tok, seed):
    """Train `model` on and on -> after each step (step, are the prompts whole?)"""
    keys = {tok.encode(" " + thing)[0] for thing in tasks.THINGS}
    numbers = {tok.encode(f"{n:0{d}d}")[0] for d in (1, 2, 3) for n in range(10 ** d)}
    kept = keys | numbers | set(tok.stop_ids)  # in stage 2, whatever is removed
    text = " ".join(tasks.FILLER + tasks.KINDS + tasks.PLACES + tasks.NAMES)
    text += " code for is . Repeat each word with its code: a, b. Answer:"
    copied = torch.tensor(sorted(keys | numbers | set(tok.encode(text))))
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size:,} parameters, {len(tok)} tokens, {len(copied)} of them in stage 1")
    device = model.device
    every = torch.ones(len(tok), dtype=torch.bool, device=device)
    number = torch.isin(torch.arange(len(tok)),
                        torch.tensor(sorted(numbers))).to(device)

    opt = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98),
                            weight_decay=weight_decay)
    rng, start = torch.Generator().manual_seed(seed), time.time()
    stage, first, mean, removed = 1, 0, 0.0, 1.0  # first: the step at which the stage began
    for step in range(max_steps):
        if stage == 1:
            ids, mask = copy_batch(rng, copied)
        else:
            ids, mask = task_batch(seed, step, tok, removed=removed, kept=kept)
        counted = every if stage == 1 else number
        loss, right = loss_on(model, ids.to(device), mask.to(device), counted)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.param_groups[0]["lr"] = learning_rate * min(1, (step - first + 1) / warmup)
        opt.step()
        mean = 0.9 * mean + 0.1 * right
        if step % 25 == 0:
            print(f"step {step:4d}  stage {stage}  loss {loss.item():6.3f}  right "
                  f"{right:.3f}  removed {removed:.2f}  "
                  f"{(time.time() - start) / 60:4.1f} min", flush=True)
        if stage > 1 and removed < 0.5 and step % eval_every == 0:
            for task in mixture:
                earned, form = evaluate(model, tok, task, n=32, group=1,
                                        temperature=0.0)
                print(f"    held-out {task}, greedy: reward {earned:.3f}  form "
                      f"{form:.3f}",
                      flush=True)
        yield step, stage == 2 and removed == 0
        if stage == 1 and mean > copy_until:
            stage, first, mean = 2, step + 1, 0.0
        elif stage == 2 and mean > fewer_at:
            removed = max(0.0, removed - fewer)


def main(out_dir=TINY, device="cpu", seed=0, stop=None):
    """Raises ValueError, before a file is written, if the end is not reached."""
    # the same sums in the same order each time, on a GPU too
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = new_model(write_json(folder))
        tok = Tokenizer(folder)
    model.to(device)
    for step, whole in training(model, tok, seed):
        enough = False
        if whole and step % check_every == 0 and stop is None:
            earned, form = evaluate(model, tok, "kv4", check_problems,
                                    group=check_group, temperature=1.0)
            print(f"step {step:4d}  held-out kv4, sampled: reward {earned:.4f}  form "
                  f"{form:.4f}",
                  flush=True)
            enough = earned >= target
        if enough or step == stop:
            write_json(out_dir)
            model.save_pretrained(out_dir)
            print(f"step {step}: saved to {out_dir}")
            return
    raise ValueError(f"after {max_steps} steps sampled answers to kv4 do not earn "
                     f"{target}")


if __name__ == "__main__":
    a = argparse.ArgumentParser(prog="python -m data.pretrain",
                                description="make the embedded checkpoint again")
    a.add_argument("folder", nargs="?", default=TINY)
    a.add_argument("--device", default="cpu", help="on a GPU it takes two minutes")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--stop", type=int,
                   help="write the model of this step, whatever it can do")
    a = a.parse_args()
    with one_line_errors(ValueError, OSError):
        choose_device(a)
        main(a.folder, a.device, a.seed, a.stop)
