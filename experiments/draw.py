"""
Figures that explain, drawn from real rollouts of the embedded checkpoint and from kept logs.

    python -m experiments.draw                       # a line per layer and KV head, every method
    python -m experiments.draw --out=docs/mask.png   # the picture of README.md; needs matplotlib
    python -m experiments.draw rows --out=docs/rows.png

A figure prints the numbers that it shows; without --out it prints them only. docs/figures.md shows
all of them and says what to look at.

    mask         which prompt keys each layer and KV head keeps, and what one head of the learner
                 sees of the packed rows, by  visible(i, j) = j <= i < until[layer, kv_head, j]
    kept         the same prompt keys as text, a panel per layer and KV head
    rows         a bar per key of one head, from its row to its until; response keys are evicted
    tiles        which tiles of one head the kernel computes, keys in row order and sorted
    acceptance   overlap of dense and sparse policy while arms train, from results/ceiling
"""
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import torch
import torch.nn.functional as F

from data.tasks import problem, prompt_encoder, reward
from data.tokenizer import Tokenizer
from experiments import curves
from experiments.attention import group_until
from experiments.logs import load as load_logs
from experiments.logs import over_seeds
from fast import attention as kernels
from grpo import pack
from kvcache import EVICT, Eviction
from model import Transformer
from rollout import generate
from shadow_attn import visible
from support.configurator import Arguments
from support.screen import one_line_errors, tell

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
GREY = "#555555"


def load():
    """The embedded checkpoint. -> model, tokenizer"""
    return Transformer.from_pretrained(TINY), Tokenizer(TINY)


def words(tok, ids):
    """Each token as text that shows a blank and a line's end."""
    texts = [tok.decode([token]) for token in ids]
    return [{" ": "\u2423", "\n": "\\n"}.get(text, text.strip()) for text in texts]


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
        rollout = generate(net, [ids], group=1, max_new_tokens=5, temperature=0.0,
                           eviction=Eviction(method, budget=BUDGET, window=WINDOW, sinks=SINKS),
                           stop_ids=tok.stop_ids)
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


def sampled(net, tok, index, **settings):
    """Responses to a prompt of four facts and a question. settings: see `generate`.
    -> Problem, ids, Rollout"""
    encode = prompt_encoder(tok)
    task = problem("kv", "eval", seed=0, index=index, tokens=52, encode=encode)
    ids = encode(task.text)
    return task, ids, generate(net, [ids], temperature=1.0, stop_ids=tok.stop_ids, **settings)


def example(net, tok):
    """The rollout of the picture: two samples. -> Problem, ids, Rollout"""
    return sampled(net, tok, 62, group=2, max_new_tokens=5,
                   eviction=Eviction("snapkv", budget=BUDGET, window=WINDOW, sinks=SINKS))


def plotter():
    """matplotlib's pyplot, without a screen."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save(figure, path):
    """As a PNG of 256 colours, 200 dots an inch: nine inches make twice the pixels of a page."""
    from PIL import Image
    whole = io.BytesIO()
    figure.savefig(whole, dpi=200)
    plotter().close(figure)
    Image.open(whole).convert("RGB").quantize(256, dither=0).save(path, "PNG", optimize=True)


def paint(ax, lines, colours=COLOURS):
    """A square per letter, a row per line, from the top; a blank stays empty."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle
    squares = []
    fills = []
    for y, line in enumerate(lines):
        for x, letter in enumerate(line):
            if letter != " ":
                squares.append(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9))
                fills.append(colours[letter])
    ax.add_collection(PatchCollection(squares, facecolors=fills, linewidths=0, antialiaseds=False))
    ax.set(xlim=(0, len(lines[0])), ylim=(len(lines), 0))
    ax.set_axis_off()


def draw_cache(ax, texts, kept, code):
    """A row per prompt token, a column per layer and KV head. kept (L, nkv, K), code: positions."""
    L, nkv = kept.shape[:2]
    P = len(texts)
    columns = [kinds(positions.tolist(), P) for positions in kept.flatten(0, 1)]
    paint(ax, ["".join(letters) for letters in zip(*columns)])
    for y, word in enumerate(texts):
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
    for seen in visible(until[None])[0].tolist():    # (N, N)
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
            if j - first > 1:  # there is no room below one column
                ax.text((first + j) / 2, N + 1.7, int(until[first]), ha="center", fontsize=9)
            first = j
    ax.text(-0.7, N + 1.7, "until", ha="right", fontsize=9, fontweight="bold")


def draw_picture(net, tok, path):
    """Write the picture to path; the right part is of the layer and KV head named above."""
    pyplot = plotter()
    task, ids, rollout = example(net, tok)
    kept = rollout.kept[0]                                       # (L, nkv, K)
    until = pack(rollout).until[LAYER, HEAD]                     # (N,)
    lengths = rollout.lengths[0].tolist()
    P = len(ids)

    width, height = 9.0, 7.3  # inches; 200 dots each make 1800 pixels, twice what a page shows
    figure = pyplot.figure(figsize=(width, height))
    left = figure.add_axes((0.9 / width, 0.9 / height, 1.75 / width, 5.45 / height))
    right = figure.add_axes((3.45 / width, 0.9 / height, 5.25 / width, 5.45 / height))
    draw_cache(left, words(tok, ids), kept, code_in(tok, task, ids))
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
    save(figure, path)


def mask(out):
    """What eviction does to a prompt: every method as text, or the picture of one."""
    net, tok = load()
    if out is None:
        print_methods(net, tok)
    else:
        draw_picture(net, tok, out)


# kept: the prompt as text

def kept_codes(kept, code):
    """How many tokens of the code each layer and KV head keeps. kept (L, nkv, K), code: positions.
    -> lists [layer][KV head]"""
    return torch.isin(kept, torch.tensor(code)).sum(2).tolist()


def text_lines(texts):
    """Where each token of a prompt stands: a line per sentence. -> list of (x, y, text)"""
    x = y = 0
    places = []
    for j, text in enumerate(texts):
        if text == "\n" or (j and texts[j - 1] == "."):
            x, y = 0, y + (x > 0)
            text = text.replace("\n", "\u21b5").removeprefix(" ")
        places.append((x, y, text))
        x += len(text)
    return places


def draw_text(ax, places, letters, code):
    """The prompt of one head, a box behind what it keeps. letters: see `kinds`."""
    from matplotlib.patches import Rectangle
    for j, (x, y, text) in enumerate(places):
        colour = {"s": "white", ".": GREY}.get(letters[j], "black")
        if letters[j] != ".":
            ax.add_patch(Rectangle((x, y + 0.04), len(text), 0.92, color=COLOURS[letters[j]], lw=0))
        weight = "bold" if j in code else "normal"
        ax.text(x, y + 0.52, text, family="monospace", fontsize=10.5, va="center", color=colour,
                fontweight=weight)
    boxes = [(places[j][0], len(places[j][2])) for j in code]
    left, right = boxes[0][0], boxes[-1][0] + boxes[-1][1]
    y = places[code[0]][1]
    ax.add_patch(Rectangle((left, y + 0.04), right - left, 0.92, fill=False, color=CODE, lw=2,
                           zorder=3))


def draw_kept(path, texts, kept, code):
    """A panel for each layer and KV head. texts: of the tokens, kept (L, nkv, K)."""
    places = text_lines(texts)
    columns = max(x + len(text) for x, _, text in places)
    rows = max(y for _, y, _ in places) + 1
    L, nkv = kept.shape[:2]
    width, height = 9.0, 1.2 + 1.5 * L
    wide = columns * 0.602 * 10.5 / 72                           # inches; a letter is 0.602 em wide
    figure = plotter().figure(figsize=(width, height))
    counts = kept_codes(kept, code)
    for layer in range(L):
        for head in range(nkv):
            x, y = 0.15 + head * (wide + 0.9), height - 0.4 - 1.5 * (layer + 1)
            ax = figure.add_axes((x / width, y / height, wide / width, 1.12 / height))
            ax.set(xlim=(0, columns), ylim=(rows, 0))
            ax.set_axis_off()
            draw_text(ax, places, kinds(kept[layer, head].tolist(), len(texts)), code)
            said = {0: "the code is gone", len(code): "keeps the code"}.get(
                counts[layer][head], "keeps a part of the code")
            ax.set_title(f"layer {layer}, KV head {head}: {said}", loc="left", fontsize=9.5,
                         fontweight="bold", pad=3)
    figure.text(0.15 / width, (height - 0.32) / height, f"What each head keeps: {kept.shape[2]} of "
                f"{len(texts)} prompt keys", fontsize=12, fontweight="bold")
    legend = [("\u25a0", COLOURS[letter], NAMES[letter]) for letter in "skw"]
    legend += [("", GREY, "grey text: evicted"), ("\u25a1", CODE, "the code that is asked for")]
    for (mark, colour, name), x in zip(legend, (0.15, 0.85, 2.3, 4.3, 6.5)):
        figure.text(x / width, 0.25 / height, mark, color=colour, fontsize=14)
        ink = "black"
        if not mark:
            ink = GREY
        figure.text((x + 0.2) / width, 0.28 / height, name, fontsize=9.5, color=ink)
    save(figure, path)


def kept(out):
    """The prompt of `mask` as text."""
    net, tok = load()
    task, ids, rollout = example(net, tok)
    code = code_in(tok, task, ids)
    counts = sum(kept_codes(rollout.kept[0], code), [])
    whole, none = counts.count(len(code)), counts.count(0)
    tell(f"{len(ids)} prompt keys; each head keeps {BUDGET}: {SINKS} sinks, {WINDOW} of the "
         f"question, {BUDGET - SINKS - WINDOW} by votes\nof {len(counts)} heads {whole} keep the "
         f"whole code, {none} nothing of it, {len(counts) - whole - none} a part")
    if out:
        draw_kept(out, [tok.decode([token]) for token in ids], rollout.kept[0], code)


# rows: what lives how long

BARS = {  # colour, name
    "kept": ("#E69F00", "prompt key that the sampler keeps"),
    "evicted": ("#CFCFCF", "prompt key that it evicts: dies where the shadow copies begin"),
    "dense": ("#009E73", "response key in a dense copy: dies with its copy"),
    "shadow": ("#0072B2", "response key in a shadow copy: dies with its copy"),
    "gone": ("#000000", "response key that the sampler evicts: dies at that step"),
}


def example_rows(net, tok):
    """Two samples of which one is long enough to lose keys. -> Problem, ids, Rollout"""
    return sampled(net, tok, 12, group=2, max_new_tokens=9, seed=1, eviction=Eviction(
        method="h2o", budget=24, window=1, sinks=1, response_budget=2, period=1))


def bars(rollout, layer, head):
    """Each key of the first group in one head, in row order. -> list of (kind, until)"""
    until = pack(rollout).until[layer, head].tolist()            # (N,)
    P, lengths = len(rollout.prompts[0]), rollout.lengths[0].tolist()
    stay = set(rollout.kept[0][layer][head].tolist())
    found = []
    for name, first, last in segments(P, lengths):
        for j in range(first, last):
            kind = name.split()[0]
            if kind == "prompt":
                kind = "kept" if j in stay else "evicted"
            elif kind == "shadow" and until[j] < last:
                kind = "gone"
            found.append((kind, until[j]))
    return found


def draw_bars(ax, keys, texts, parts):
    """A bar per key, its token to the left, sections above. parts: see `segments`."""
    N = len(keys)
    for name, first, last in parts:
        if first:
            ax.axvline(first, color="#999999", lw=0.8, zorder=0)
        ax.text((first + last) / 2, -1.9, name.replace(" ", "\n"), ha="center", va="center",
                fontsize=9)
        for j in range(first, last):
            kind, dies = keys[j]
            ax.barh(j + 0.5, dies - j, left=j, height=0.76, color=BARS[kind][0], lw=0)
            ax.text(j - 0.3, j + 0.5, texts[j], ha="right", va="center", fontsize=8)
            ax.text(N + 1.9, j + 0.5, dies, ha="right", va="center", fontsize=7.5, color=GREY)
            if kind == "gone":
                ax.plot([dies, last], [j + 0.5] * 2, color="black", lw=1, ls=":")
    ax.axvline(N, color="#999999", lw=0.8, zorder=0)
    ax.text(N + 1.9, -1, "until", ha="right", va="center", fontsize=9, color=GREY)
    edges = [first for _, first, _ in parts] + [N]
    ax.set(xlim=(-3, N + 2), ylim=(N, 0), xticks=edges, yticks=[])
    ax.tick_params(axis="x", labelsize=9, length=3)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)


def rows(out):
    """The packed rows of a group and the lifetimes of its keys in one head."""
    net, tok = load()
    task, ids, rollout = example_rows(net, tok)
    keys = bars(rollout, LAYER, HEAD)
    lengths = rollout.lengths[0].tolist()
    parts = segments(len(ids), lengths)
    said = responses(tok, rollout)
    tell(f"{len(keys)} rows: " + ", ".join(f"{n} {a} to {b - 1}" for n, a, b in parts))
    tell(f"samples {said}, rewards {[reward(task, text) for text in said]}")
    tell(f"layer {LAYER}, KV head {HEAD}:")
    for kind, (_, name) in BARS.items():
        ends = [dies for what, dies in keys if what == kind]
        tell(f"{len(ends):3d} x {name}; until {sorted(set(ends))}")
    if out is None:
        return
    texts = [text.replace("\u2423", "(space)") for text in words(tok, pack(rollout).ids.tolist())]
    width, height = 9.0, 8.4
    figure = plotter().figure(figsize=(width, height))
    ax = figure.add_axes((0.01, 0.06, 0.98, 0.82))
    draw_bars(ax, keys, texts, parts)
    figure.text(0.015, 0.965, f"How long each key lives: layer {LAYER}, KV head {HEAD}",
                fontsize=12, fontweight="bold")
    figure.text(0.015, 0.94, "a bar per key, from its own row to its until; the query of row i "
                "sees the keys whose bars cover i", fontsize=9)
    for i, (kind, (colour, name)) in enumerate(BARS.items()):
        ax.text(-2, 50 + 2.6 * i, "\u25a0", color=colour, fontsize=14, va="center")
        count = sum(what == kind for what, _ in keys)
        ax.text(0, 50 + 2.6 * i, f"{count} x {name}", fontsize=9, va="center")
    for g, text in enumerate(said):
        ax.text(0, 64 + 2.2 * g, f"sample {g + 1}:{text}", fontsize=9, va="center")
    ax.set_xlabel("row", fontsize=9)
    save(figure, out)


# tiles: what the kernel computes

TILE_Q, TILE_K = 8, 4  # rows and keys of a tile; the kernel's are 16 times as large, both
ORDERS = "keys in row order", "keys sorted by until"
PAIRS = {  # colour, name
    "f": ("#0072B2", "seen, in a full tile: no mask"),
    "p": ("#E69F00", "seen, in a partial tile: with a mask"),
    "h": ("#DCDCDC", "not seen, computed and masked"),
}


def example_tiles(net, tok):
    """Eight samples, and a method that keeps scattered keys. -> Problem, ids, Rollout"""
    return sampled(net, tok, 52, group=8, max_new_tokens=5, eviction=Eviction(
        method="h2o", budget=24, window=1, sinks=1))


def in_interpreter(f, *cases):
    """f of each case, in a process of its own, where Triton's interpreter runs kernels on CPU."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(f, cases))
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def list_tiles(case):
    """What the kernel lists, by its own preparation, for keys in row order and sorted. To be called
    by `in_interpreter`, as it changes the kernel's tiles. case: until as lists, a row per head, the
    rows and the keys of a tile.
    -> a pair for each order: born[head], grid[head][query tile][key tile], of 0 dead, 1 partial, 2
    full"""
    until, kernels.TILE_Q, kernels.TILE_K = case
    until = torch.tensor(until, dtype=torch.int32)               # (heads, N)
    heads, N = until.shape
    plan = kernels.make_plan(until, backward=False)
    born = torch.arange(plan.born.shape[1]).int().expand(heads, -1)  # (heads, nk * TILE_K)
    dies = F.pad(until, (0, born.shape[1] - N))                  # (heads, nk * TILE_K)
    dies = torch.where(dies > born, dies, 0)
    bounds = []
    for x in (born, dies):
        bounds += x.unflatten(1, (-1, kernels.TILE_K)).aminmax(dim=2)  # (heads, nk) each
    in_order, = kernels.tile_lists(bounds, N, 1, by_key=False)
    return [(born.tolist(), grids(in_order)), (plan.born.tolist(), grids(plan.by_query))]


def grids(listed):
    """TileLists -> lists [head][query tile][key tile] of 0, 1 or 2."""
    heads, nq, nk = listed.lists.shape
    grid = torch.zeros(heads, nq, nk, dtype=torch.int64)
    for h in range(heads):
        for i in range(nq):
            partial, visible = listed.n_partial[h, i], listed.n_visible[h, i]
            met = listed.lists[h, i].long()
            grid[h, i, met[:partial]] = 1
            grid[h, i, met[partial:visible]] = 2
    return grid.tolist()


def counted(grid):
    """-> tiles, those computed, those of them that are full"""
    flat = sum(grid, [])
    return len(flat), len(flat) - flat.count(0), flat.count(2)


def pairs(until, born, grid):
    """A line per query, a letter per key in the order of born: see PAIRS; blank where the tile is
    dead. until (N,). KeyError if a dead tile has a pair that is seen, a full one a hidden pair."""
    letters = {(2, True): "f", (1, True): "p", (1, False): "h", (0, False): " "}
    seen = F.pad(visible(until[None])[0], (0, len(born) - len(until)))  # (N, keys)
    lines = []
    for i, row in enumerate(seen[:, born].tolist()):
        met = grid[i // TILE_Q]
        lines.append("".join(letters[met[c // TILE_K], see] for c, see in enumerate(row)))
    return lines


def draw_tiles(ax, until, born, grid, stay):
    """One panel. until (N,), born: the order of keys, grid: of tiles, stay: is a prompt
    key kept?"""
    N, wide = len(until), len(born)
    paint(ax, pairs(until, born, grid), {letter: colour for letter, (colour, _) in PAIRS.items()})
    ax.set(xlim=(-0.3, wide + 0.3), ylim=(N + 0.3, -4.5))
    for i, met in enumerate(grid):
        for c, tile in enumerate(met):
            x, y = [c * TILE_K, (c + 1) * TILE_K], [i * TILE_Q, min((i + 1) * TILE_Q, N)]
            style = {"color": "#D0D0D0", "lw": 0.5, "zorder": 2}
            if tile:
                style = {"color": "black", "lw": 0.8, "zorder": 3}
            ax.plot([x[0], x[1], x[1], x[0], x[0]], [y[0], y[0], y[1], y[1], y[0]], **style)
    for c, j in enumerate(born):  # what each prompt key is, above the panel
        if j < len(stay):
            colour = "black"
            if stay[j]:
                colour = "#A0A0A0"
            ax.plot([c + 0.1, c + 0.9], [-1.7] * 2, color=colour, lw=4, solid_capstyle="butt")


def print_tiles(cases, orders):
    """Counts of tiles. cases: (name, until, head), orders: what `list_tiles` said of each."""
    for (name, until, head), listed in zip(cases, orders):
        tell(f"{name}, {len(until[0])} rows:")
        for order, (_, grid) in zip(ORDERS, listed):
            every, computed, full = counted(grid[head])
            line = f"  {order}: {computed} of {every} tiles computed, {full} of them full"
            if len(grid) > 1:
                _, computed, full = map(sum, zip(*map(counted, grid)))
                line += f"; all {len(grid)} heads: {computed}, {full} full"
            tell(line)


def tiles(out):
    """Which tiles the kernel computes."""
    if kernels.triton is None:
        raise ValueError("tiles are listed by the kernel's own code, which needs triton")
    net, tok = load()
    _, _, rollout = example_tiles(net, tok)
    until = pack(rollout).until.flatten(0, 1)                    # (L * nkv, N)
    other = pack(example(net, tok)[2]).until.flatten(0, 1)       # (L * nkv, N)
    torch.manual_seed(0)
    large = group_until(P=8192, G=8, R=256, budget=1024, nkv=1)
    head = LAYER * net.config.n_kv_head + HEAD
    cases = [(f"tiles of {TILE_Q} x {TILE_K}, layer {LAYER}, KV head {HEAD}", until.tolist(), head),
             ("the same of the rollout of mask", other.tolist(), head),
             (f"tiles of {kernels.TILE_Q} x {kernels.TILE_K}, the kernel's; prompt 8192, 8 "
              "responses of 256, 1024 keys kept at random", large.tolist(), 0)]
    sizes = [(TILE_Q, TILE_K)] * 2 + [(kernels.TILE_Q, kernels.TILE_K)]
    orders = in_interpreter(list_tiles, *((u, *size) for (_, u, _), size in zip(cases, sizes)))
    print_tiles(cases, orders)
    if out is not None:
        mine = [(born[head], grid[head]) for born, grid in orders[0]]
        draw_orders(out, rollout, until[head], mine)


def draw_orders(path, rollout, until, orders):
    """Both orders of the keys of one head, side by side. until (N,), orders: pairs born, grid."""
    P = len(rollout.prompts[0])
    stay = torch.isin(torch.arange(P), rollout.kept[0][LAYER, HEAD]).tolist()
    figure = plotter().figure(figsize=(9.0, 5.4))
    parts = segments(P, rollout.lengths[0].tolist())
    for i, (born, grid) in enumerate(orders):
        x = 0.07 + 0.475 * i
        ax = figure.add_axes((x, 0.12, 0.45, 0.75))
        draw_tiles(ax, until, born, grid=grid, stay=stay)
        every, computed, full = counted(grid)
        figure.text(x, 0.955, ORDERS[i].capitalize(), fontsize=11, fontweight="bold")
        figure.text(x, 0.915, f"{computed} of {every} tiles computed, {full} of them without a "
                    "mask", fontsize=9)
        for policy in ("prompt", "dense", "shadow"):
            mine = [part for part in parts if part[0].startswith(policy)]
            first, last = mine[0][1], mine[-1][2]
            ax.plot([-0.9] * 2, [first + 0.4, last - 0.4], color=GREY, lw=1.5, clip_on=False)
            ax.text(-2, (first + last) / 2, policy, ha="right", va="center", rotation=90,
                    fontsize=8)
    legend = [*PAIRS.values(), ("black", "above: evicted prompt key"),
              ("#A0A0A0", "above: kept prompt key")]
    places = (0.045, 0.065), (0.3, 0.065), (0.6, 0.065), (0.045, 0.02), (0.3, 0.02)
    for (colour, name), (x, y) in zip(legend, places):
        figure.text(x, y - 0.005, "\u25a0", color=colour, fontsize=13)
        figure.text(x + 0.02, y, name, fontsize=9)
    save(figure, path)


# acceptance: both policies while arms train

ARMS = os.path.join(ROOT, "results", "ceiling")
SHOWN = ["naive lr=1e-4", "shadow lr=3e-4", "smd lr=1e-3"]
OVERLAP = {"eval_accept": "mean", "eval_accept_p05": "5th percentile"}


def acceptance(out):
    """Held-out acceptance by step, its mean and its lower tail over tokens."""
    arms = load_logs(ARMS, SHOWN)
    for name, a in arms.items():
        for key, what in OVERLAP.items():
            tell(f"{name}, {len(a['logs'])} seeds, {what} of tokens, by step: median (lowest to "
                 "highest seed)")
            tell("  " + ", ".join(f"{step}: {median(x):.3f} ({min(x):.3f} to {max(x):.3f})"
                                  for step, x in zip(*over_seeds(a, key))))
    if out is None:
        return
    pyplot = plotter()
    with pyplot.rc_context(curves.PAGE):
        figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
        for ax, (key, what) in zip(panels, OVERLAP.items()):
            thin = curves.spread_of(ax, arms, key)
            ax.set(xlabel="step", xlim=(0, 100), title=f"{what.capitalize()} of tokens{thin}")
        panels[0].set(ylabel="held-out acceptance")
        panels[1].set(ylabel="held-out acceptance, logarithmic", yscale="log")
        panels[1].set_yticks([0.001, 0.01, 0.1], ["0.001", "0.01", "0.1"])
        for _ in range(2):  # labels decide how much room is left, its height where they stand
            for ax, key in zip(panels, OVERLAP):
                curves.label(ax, draw_medians(ax, arms, key))
            figure.draw_without_rendering()
        save(figure, out)


def draw_medians(ax, arms, key):
    """A line for each arm, the median of its seeds. -> ends for `curves.label`"""
    ends = []
    for name, style in curves.looks(arms).items():
        steps, values = over_seeds(arms[name], key)
        middle = [*map(median, values)]
        ax.plot(steps, middle, **style)
        ends.append((name, style["color"], (steps[-1], middle[-1])))
    return ends


FIGURES = {f.__name__: f for f in (mask, kept, rows, tiles, acceptance)}


def main(argv=None):
    a = Arguments(prog="draw", description="print the numbers of a figure, or draw it")
    a.add_argument("figure", nargs="?", choices=[*FIGURES], default="mask",
                   help="mask, of all methods if it is printed; " + ", ".join([*FIGURES][1:]))
    a.add_argument("--out", type=os.path.expanduser,
                   help="a .png to draw to; without it, lines of text")
    a = a.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        if a.out is not None:
            curves.check_out(a.out)
        FIGURES[a.figure](a.out)
        if a.out is not None:
            tell(f"picture written to {a.out}")


if __name__ == "__main__":
    main()
