"""
What eviction does to a prompt, drawn from a real rollout of the embedded checkpoint.

    python -m experiments.draw                       # a line per layer and KV head, every method
    python -m experiments.draw --out=docs/mask.png   # the picture of README.md; needs matplotlib

The picture has two parts. Left: which prompt keys each layer and KV head keeps once the prompt is
read. Right: what one head of the learner sees of the packed row, by the definition itself,

    visible(query i, key j)  =  j <= i < until[layer, kv_head, j]

Left out: response keys that die while decoding; methods other than SnapKV in the picture.
"""
import os

import torch

from data.tasks import problem, prompt_encoder, reward
from data.tokenizer import Tokenizer
from grpo import pack
from kvcache import EVICT
from model import Transformer
from rollout import generate
from support.configurator import Arguments, make_folder
from support.run import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = os.path.join(ROOT, "data", "tiny")
BUDGET, WINDOW, SINKS = 24, 13, 2  # the window is the question; half the keys of the picture stay
LAYER, HEAD = 3, 1                 # the head whose matrix is drawn

# colours that differ in lightness too, from the palette of Okabe and Ito
COLOURS = {"s": "#222222", "k": "#E69F00", "w": "#56B4E9", ".": "#D9D9D9", "r": "#009E73"}
NAMES = {
    "s": "sink",
    "k": "chosen by votes",
    "w": "window (the question)",
    ".": "evicted after the prompt",
    "r": "response",
}
CODE = "#D55E00"


def load():
    """The embedded checkpoint. -> model, tokenizer"""
    return Transformer.from_pretrained(TINY), Tokenizer(TINY)


def roll_out(net, tok, ids, method="snapkv", group=1, temperature=0.0):
    """Sample under the budget of this file. ids: one prompt. -> Rollout"""
    return generate(
        net, [ids], group=group, max_new_tokens=5, temperature=temperature, evict=method,
        budget=BUDGET, window=WINDOW, sinks=SINKS, stop_ids=tok.stop_ids, seed=0,
    )


def responses(tok, rollout):
    """The text of each sample of the first prompt, without stop token."""
    pairs = zip(rollout.tokens[0].tolist(), rollout.lengths[0].tolist())
    return [tok.decode(tokens[:n], special=False) for tokens, n in pairs]


def kinds(kept, P):
    """A letter per prompt key: s sink, k chosen by votes, w window, . evicted. kept: positions."""
    letters = ["."] * P
    for j in kept:
        letters[j] = "k"
        if j < SINKS:
            letters[j] = "s"
        elif j >= P - WINDOW:
            letters[j] = "w"
    return "".join(letters)


def find(ids, part):
    """All positions in ids that belong to an occurrence of part, both lists of token ids."""
    found = []
    for start in range(len(ids) - len(part) + 1):
        if ids[start:start + len(part)] == part:
            found.extend(range(start, start + len(part)))
    return found


def code_in(tok, task, ids):
    """The positions of the code that is asked for, of which the key in the answer is no part."""
    return find(ids, tok.encode(task.answer.split()[-1]))


def visible(until):
    """The mask of one head, written out. until (N,) -> (N, N) bool, a row per query."""
    row = torch.arange(len(until), device=until.device)
    born = row <= row[:, None]                                   # (N, N) key j <= query i
    alive = row[:, None] < until                                 # (N, N) query i < until[j]
    return born & alive


def segments(P, lengths):
    """The parts of a packed group. -> list of (name, first row, row after the last)"""
    parts = [("prompt", 0, P)]
    for policy in ("dense", "shadow"):
        for g, n in enumerate(lengths):
            first = parts[-1][2]
            parts.append((f"{policy} {g + 1}", first, first + n - 1))  # the last token is never fed
    return parts


def print_methods(net, tok):
    """What each method keeps of one prompt, a line per layer and KV head."""
    encode = prompt_encoder(tok)
    task = problem("kv", "eval", seed=0, index=1, tokens=120, encode=encode)
    ids = encode(task.text)
    tell(f"{task.text}\nanswer {task.answer}; {len(ids)} tokens; "
          "s sink, k kept, w window, . dropped; ^ the code that is asked for")
    for method in EVICT:
        rollout = roll_out(net, tok, ids, method)
        kept = rollout.kept[0]                                   # (L, nkv, K)
        answer = responses(tok, rollout)[0]
        tell(f"\n{method}: {kept[0].shape[-1]} keys, greedy answer {answer!r}")
        for layer, heads in enumerate(kept):
            for head, positions in enumerate(heads):
                tell(f"layer {layer} head {head} {kinds(positions.tolist(), len(ids))}")
    marks = [" "] * len(ids)
    for j in code_in(tok, task, ids):
        marks[j] = "^"
    tell(" " * len("layer 0 head 0 ") + "".join(marks))


def example(net, tok):
    """The rollout of the picture: four facts, a question, two samples. -> Problem, ids, Rollout"""
    encode = prompt_encoder(tok)
    task = problem("kv", "eval", seed=0, index=10, tokens=52, encode=encode)
    ids = encode(task.text)
    return task, ids, roll_out(net, tok, ids, group=2, temperature=1.0)


def paint(ax, lines):
    """A square per letter, a row per line, from the top; a blank stays empty."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle
    squares = []
    fills = []
    for y, line in enumerate(lines):
        for x, letter in enumerate(line):
            if letter != " ":
                squares.append(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9))
                fills.append(COLOURS[letter])
    ax.add_collection(PatchCollection(squares, facecolors=fills, linewidths=0, antialiaseds=False))
    ax.set(xlim=(0, len(lines[0])), ylim=(len(lines), 0))
    ax.set_axis_off()


def draw_cache(ax, words, kept, code):
    """A row per prompt token, a column per layer and KV head. kept (L, nkv, K), code: positions."""
    L, nkv = kept.shape[:2]
    P = len(words)
    columns = [kinds(positions.tolist(), P) for positions in kept.flatten(0, 1)]
    paint(ax, ["".join(letters) for letters in zip(*columns)])
    for y, word in enumerate(words):
        style = {"color": CODE, "fontweight": "bold"} if y in code else {}
        ax.text(-0.4, y + 0.76, word, ha="right", fontsize=7.5, **style)
    middle = (code[0] + code[-1] + 1) / 2
    ax.text(-1.9, middle, "code", ha="right", va="center", fontsize=8, color=CODE)
    for layer in range(L):
        ax.text((layer + 0.5) * nkv, -1.4, f"layer {layer}", ha="center", fontsize=8)
        for head in range(nkv):
            x = layer * nkv + head + 0.5
            ax.text(x, -0.35, str(head), ha="center", fontsize=8, color="#555555")
        ax.plot([layer * nkv] * 2, [0, P], color="white", lw=3)
    ax.text(-0.4, -0.35, "KV head", ha="right", fontsize=8, color="#555555")
    x = LAYER * nkv + HEAD                                       # the head of the matrix, framed
    ax.plot([x, x + 1, x + 1, x, x], [0, 0, P, P, 0], color="black", lw=1.6, clip_on=False)


def draw_matrix(ax, until, kept, P, lengths):
    """The mask of one head. until (N,): lifetimes, kept: positions, lengths: of responses."""
    N = len(until)
    letters = kinds(kept, P).ljust(N, "r")
    lines = []
    for seen in visible(until).tolist():
        lines.append("".join(letter if see else " " for letter, see in zip(letters, seen)))
    paint(ax, lines)
    parts = segments(P, lengths)
    for name, first, last in parts:
        ax.text(-0.7, (first + last) / 2, name, ha="right", va="center", fontsize=9)
        ax.text(N + 0.5, first, first, va="center", fontsize=8, color="#555555")
        ax.plot([0, N], [first, first], color="#888888", lw=0.8, clip_on=False)
        ax.plot([first, first], [first and P, N], color="#888888", lw=0.8, clip_on=False)
    ax.text(N + 0.5, N, N, va="center", fontsize=8, color="#555555")
    ax.text(N + 0.5, -1.4, "row", va="center", fontsize=8, color="#555555")
    ax.plot([0, N, N, 0, 0], [N, N, 0, 0, N], color="#888888", lw=0.8, clip_on=False)
    # the lifetimes, one number where neighbouring keys die together and are of one kind
    starts = [first for _, first, _ in parts[1:]]
    first = 0
    for j in range(1, N + 1):
        if j == N or letters[j] != letters[first] or j in starts:
            ax.text((first + j) / 2, N + 1.7, int(until[first]), ha="center", fontsize=9)
            first = j
    ax.text(-0.7, N + 1.7, "until", ha="right", fontsize=9, fontweight="bold")


def draw_picture(net, tok, path):
    """Write the picture to path; the right part is of the layer and KV head named above."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    task, ids, rollout = example(net, tok)
    kept = rollout.kept[0]                                       # (L, nkv, K)
    until = pack(rollout).until[LAYER, HEAD]                     # (N,)
    lengths = rollout.lengths[0].tolist()
    P = len(ids)
    words = []
    for token in ids:
        text = tok.decode([token])
        words.append({" ": "\u2423", "\n": "\\n"}.get(text, text.strip()))

    width, height = 9.0, 7.3  # inches; 200 dots each make 1800 pixels, twice what a page shows
    figure = pyplot.figure(figsize=(width, height))
    left = figure.add_axes((0.9 / width, 0.9 / height, 1.75 / width, 5.45 / height))
    right = figure.add_axes((3.45 / width, 0.9 / height, 5.25 / width, 5.45 / height))
    draw_cache(left, words, kept, code_in(tok, task, ids))
    draw_matrix(right, until, kept[LAYER, HEAD].tolist(), P=P, lengths=lengths)

    def write(x, y, text, **style):
        figure.text(x / width, y / height, text, **style)

    said = []
    for text in responses(tok, rollout):
        verdict = "right" if reward(task, text) == 1 else "wrong"
        said.append(f"{text.strip()} ({verdict})")
    bold = {"fontsize": 11, "fontweight": "bold"}
    write(0.1, 7.0, f"Sampler: {kept.shape[2]} of {P} prompt keys stay", **bold)
    write(0.1, 6.78, "in every layer and KV head, each its own choice", fontsize=9)
    write(3.45, 7.0, f"Learner: what layer {LAYER}, KV head {HEAD} (framed) sees", **bold)
    meaning = "a row per query, a column per key, coloured if the query sees the key"
    write(3.45, 6.78, meaning, fontsize=9)
    _, shadow, _ = segments(P, lengths)[1 + len(lengths)]        # where the shadow copies begin
    note = (
        "One long sequence: the prompt once,\nthen each response twice.\n"
        f"Sample 1: {said[0]}; sample 2: {said[1]}.\n\n"
        "Dense copies see all prompt keys.\nShadow copies see what the sampler saw.\n\n"
        f"A key is seen in rows before its until:\nevicted ones die at row {shadow}."
    )
    right.text(len(until) - 1, 2, note, ha="right", va="top", fontsize=9, linespacing=1.4)
    x = 0.6
    for letter, name in NAMES.items():
        write(x, 0.2, "\u25a0", color=COLOURS[letter], fontsize=14)
        write(x + 0.2, 0.22, name, fontsize=9)
        x += 0.6 + 0.07 * len(name)
    figure.savefig(path, dpi=200, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def main(argv=None):
    a = Arguments(prog="draw", description="draw which prompt keys are kept")
    a.add_argument("--out", type=os.path.expanduser,
                   help="a .png to draw the picture to; without it, lines of text")
    out = a.parse_args(argv).out
    with one_line_errors(ValueError, OSError):
        if out is None:
            print_methods(*load())
            return
        if not out.endswith(".png") or os.path.isdir(out):
            raise ValueError(f"--out must name a .png, got {out!r}")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("the picture needs matplotlib: pip install matplotlib") from None
        make_folder(os.path.dirname(out) or ".")
        draw_picture(*load(), out)
        tell(f"picture written to {out}")


if __name__ == "__main__":
    main()
