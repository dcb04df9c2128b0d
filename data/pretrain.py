"""
Makes the small checkpoint in data/tiny/ from nothing: a tokenizer, a Qwen3-shaped model of 1.1 M parameters, its training.

    python data/pretrain.py [FOLDER]      # data/tiny unless named

The idea. The checkpoint should look up a code in a list of facts, but not surely: RL needs something to improve. On real
prompts right after copying the model stays at "some code of the list". A curriculum helps:
1. copying. Rows of random tokens in which one span stands twice, at other places in every row, until the model continues the
   second occurrence: this forms the induction circuit (what came after this token the last time?).
2. the task with gaps closed. " apple is 4817" answers "apple?" by induction only if nothing stands between key and code. So
   rows first lose all tokens but keys, digits and the stop token, then, as accuracy allows, fewer and fewer kinds of them,
   until they are the real prompts. Each list of facts is asked about several times, to be efficient.
Training ends early on purpose, when a third of the sampled answers to held-out problems (most of the greedy ones) are right.

data/tiny: this command, seed 0, 2 threads, 1,133 steps, 6.8 minutes on two CPU cores, bit for bit the same when repeated at
commit 61f81a6; later ones sum in another order.
Held-out prompts of up to 192 tokens, dense cache: a sampled answer (temperature 1) is right with probability 0.338, the greedy one
in 0.828 of 128 (data/pretrain.log). Another number of threads rounds differently, and the result differs a little.

Left out on purpose: learning-rate decay, validation loss, resuming.
"""
import json
import os
import random
import re
import sys
import time

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from data import tasks  # noqa: E402
from model import Config, Transformer  # noqa: E402
from data.tokenizer import BYTE_OF, Tokenizer  # noqa: E402

seed = 0
shape = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32)
learning_rate, weight_decay, clip, warmup = 2e-3, 0.01, 1.0, 50  # the rate is halved in stage 2
copy_rows, copy_length = 64, 72      # stage 1: rows and tokens per row
copy_until = 0.95                    # ... ends when this fraction of copied tokens is right (running mean)
task_rows, questions = 32, 6         # stage 2: lists of facts per step, questions about each
shortest, longest = 60, 210          # ... prompt lengths in tokens before tokens are removed; the default prompt has 192
fewer_at, fewer = 0.85, 0.01         # ... above this running mean of right answer tokens, each step removes that much less
eval_tokens, target = 192, 0.33      # training ends when sampled answers to held-out prompts of this length reach the target
STOP = "<|end|>"
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")  # Llama-3's: numbers fall into groups of up to three digits


def build_tokenizer():
    """-> tokenizer.json as a dict. Byte-level BPE made by hand: 256 bytes, all numbers of two and three digits, and every
    word that a task writes, letter by letter from its start, so that no merge begins inside a word. Ids are in merge order."""
    char = {b: c for c, b in BYTE_OF.items()}
    vocab, merges = {char[b]: b for b in range(256)}, []

    def merge(a, b):
        if a + b not in vocab:
            vocab[a + b] = len(vocab)
            merges.append([a, b])

    for n in range(100):
        merge(*f"{n:02d}")
    for n in range(1000):
        a, b, c = f"{n:03d}"
        merge(*((a, b + c) if b + c < a + b else (a + b, c)))  # the pair with the lower id merges first
    text = "\n".join([*tasks.FILLER, *(tasks.problem(t, "train", 0, 0, 60, str.split).text for t in tasks.TASKS), "Answer"])
    text += " " + " ".join(tasks.FILLER + tasks.THINGS + tasks.KINDS + tasks.PLACES + tasks.NAMES)
    # words after a space come first: else the merges of words that start a line would be tried inside them
    for word in sorted(set(re.findall(" [A-Za-z]+", text))) + sorted(set(re.findall("^[A-Za-z]+", text, re.M))):
        word = word.replace(" ", char[32])
        for i in range(1, len(word)):
            merge(word[:i], word[i])
    stop = dict(id=len(vocab), content=STOP, special=True, normalized=False, single_word=False, lstrip=False, rstrip=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=SPLIT), behavior="Isolated", invert=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
               byte_fallback=False, ignore_merges=False, vocab=vocab, merges=merges)
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[stop], normalizer=None,
                pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]), post_processor=None,
                decoder=byte_level, model=bpe)


def new_model(raw):
    """Random weights. Embeddings have length about 1, so that a copied token stands out among the logits from the start."""
    model = Transformer(Config.from_dict(raw))
    for name, p in model.named_parameters():
        if p.dim() == 2:  # what a branch adds to the residual is smaller, so that depth does not blow up the sum
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5 * (0.35 if "o_proj" in name or "down_proj" in name else 1.0))
    return model


def attend(rows):
    """Plain causal attention for `rows` sequences of equal length that stand one after the other."""
    def f(layer, q, k, v):
        q, k, v = (x.view(rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))            # (rows, heads, T, hs)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)  # (rows * T, nh, hs)
    return f


def copy_batch(rng, words):
    """Stage 1 -> ids (rows, T), mask (rows, T) of the tokens that repeat what followed before. Lengths and places differ from
    row to row: one fixed distance would be learnt as just that distance."""
    ids = words[torch.randint(len(words), (copy_rows, copy_length), generator=rng)]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, m in zip(ids, mask):
        n = int(torch.randint(10, copy_length // 2, (1,), generator=rng))
        a, b = sorted(torch.randint(copy_length - 2 * n + 1, (2,), generator=rng).tolist())
        row[b + n:b + 2 * n] = row[a:a + n].clone()
        m[b + n + 1:b + 2 * n] = True
    return ids, mask


def task_batch(step, tok, removed, kept):
    """Stage 2 -> ids (rows, T), mask (rows, T) of the answers' tokens. In each row every kind of token that is not in `kept` is
    missing with probability `removed`; the same kinds throughout a row, so that what follows what can be told from it."""
    rng, encode, stop = random.Random(f"{seed}/{step}"), tasks.prompt_encoder(tok), tok.stop_ids[0]
    tokens, rows = rng.randint(shortest, longest), []
    for i in range(task_rows):
        p = tasks.problem("kv", "train", seed, step * task_rows + i, tokens, encode)
        facts, question = p.text.split("\n")
        pairs = re.findall(r"The code for ([^.]+) is (\d+)\.", facts)
        asked = next(pair for pair in pairs if f"for {pair[0]}?" in question)
        row = []  # (token, part of an answer)
        for key, code in [asked] + rng.sample([pair for pair in pairs if pair != asked], min(questions, len(pairs)) - 1):
            text = ("" if row else facts) + "\n" + question.replace(asked[0], key)
            row += [(t, False) for t in encode(text)] + [(t, True) for t in tok.encode(" " + code) + [stop]]
        gone = {t for t in sorted({t for t, _ in row} - kept) if rng.random() < removed}
        rows.append([(t, m) for t, m in row if t not in gone])
    T = max(map(len, rows))
    rows = torch.tensor([row + [(stop, False)] * (T - len(row)) for row in rows])
    return rows[..., 0], rows[..., 1].bool()


def loss_on(model, ids, mask):
    """-> mean cross-entropy of the masked tokens, fraction of them predicted rightly"""
    rows, T = ids.shape
    hidden = model(ids.flatten(), torch.arange(T).repeat(rows), attend(rows)).view(rows, T, -1)
    logits, gold = model.logits(hidden[:, :-1][mask[:, 1:]]), ids[:, 1:][mask[:, 1:]]
    return F.cross_entropy(logits, gold), (logits.argmax(-1) == gold).float().mean().item()


@torch.no_grad()
def evaluate(model, tok, n=128):
    """Held-out problems, dense cache -> mean probability of sampling the answer and its stop token (exact), greedy accuracy."""
    encode, sampled, greedy = tasks.prompt_encoder(tok), 0.0, 0.0
    for i in range(n):
        p = tasks.problem("kv", "eval", seed, i, eval_tokens, encode)
        prompt, answer = encode(p.text), tok.encode(" " + p.answer) + [tok.stop_ids[0]]
        ids = torch.tensor(prompt + answer)
        hidden = model(ids, torch.arange(len(ids)), attend(1))[len(prompt) - 1:-1]
        logp = model.logits(hidden).log_softmax(-1)
        sampled += logp[range(len(answer)), answer].sum().exp().item() / n
        greedy += float(logp.argmax(-1).tolist() == answer) / n
    return sampled, greedy


def write_json(folder):
    """Everything of the checkpoint but its weights. -> config.json as a dict"""
    tokenizer = build_tokenizer()
    stop = len(tokenizer["model"]["vocab"])
    config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", **shape, vocab_size=stop + 1, tie_word_embeddings=True,
                  max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False, hidden_act="silu",
                  eos_token_id=stop)
    os.makedirs(folder, exist_ok=True)
    named = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=STOP, clean_up_tokenization_spaces=False)
    sampling = dict(eos_token_id=stop, do_sample=True, temperature=1.0)
    files = dict(config=config, tokenizer=tokenizer, tokenizer_config=named, generation_config=sampling)
    for name, content in files.items():
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
            json.dump(content, f, indent=None if name == "tokenizer" else 2, ensure_ascii=False)
    return config


def main(out_dir=os.path.join(HERE, "model")):
    torch.manual_seed(seed)
    raw = write_json(out_dir)
    tok, model = Tokenizer(out_dir), new_model(raw)
    keys = {tok.encode(" " + thing)[0] for thing in tasks.THINGS}
    numbers = {tok.encode(f"{n:0{d}d}")[0] for d in (1, 2, 3) for n in range(10 ** d)}
    text = " ".join(tasks.FILLER + tasks.KINDS + tasks.PLACES + tasks.NAMES) + " code for is? Answer:"
    words = torch.tensor(sorted(keys | numbers | set(tok.encode(text))))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tok)} tokens, {len(words)} of them in stage 1")

    opt = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay)
    rng, start = torch.Generator().manual_seed(seed), time.time()
    stage, first, step, mean, removed, sampled = 1, 0, 0, 0.0, 1.0, 0.0
    while sampled < target:
        ids, mask = copy_batch(rng, words) if stage == 1 else task_batch(step, tok, removed, keys | numbers | set(tok.stop_ids))
        loss, right = loss_on(model, ids, mask)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.param_groups[0]["lr"] = learning_rate / stage * min(1, (step - first + 1) / warmup)
        opt.step()
        mean = 0.9 * mean + 0.1 * right
        line = f"step {step:4d}  stage {stage}  loss {loss.item():6.3f}  right tokens {right:.3f}  removed {removed:.2f}"
        line += f"  {(time.time() - start) / 60:4.1f} min"
        if stage == 2 and removed < 0.5:
            sampled, greedy = evaluate(model, tok)
            print(f"{line}  held-out: sampled {sampled:.3f}  greedy {greedy:.3f}", flush=True)
        elif step % 25 == 0:
            print(line, flush=True)
        if stage == 1 and mean > copy_until:
            stage, first, mean = 2, step + 1, 0.0
        elif stage == 2 and mean > fewer_at:
            removed = max(0.0, removed - fewer)
        step += 1
    model.save_pretrained(out_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
