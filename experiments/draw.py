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
import os
from functools import partial
from itertools import groupby
from math import nan
from statistics import fmean, median

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
# the window is the question; half the keys of the picture stay
BUDGET, WINDOW, SINKS = 24, 13, 2
LAYER, HEAD = 3, 1  # the head whose matrix is drawn

# colours that differ in lightness too, from the palette of Okabe and Ito
KINDS = {
    "s": ("#222222", "sink"),
    "k": (curves.ORANGE, "chosen by votes"),
    "w": (curves.SKY, "window (the question)"),
    ".": ("#D9D9D9", "evicted after the prompt"),
    "r": (curves.GREEN, "response")}
CODE = curves.RED
DARK, LIGHT = "#555555", "#888888"

# prompts of four facts and a question: problem, samples and longest response, what is evicted
EXAMPLES = {
    "mask": (62, dict(group=2, max_new_tokens=5), Eviction(
        method="snapkv", budget=BUDGET, window=WINDOW, sinks=SINKS)),
    # one response is long enough to lose keys
    "rows": (12, dict(group=2, max_new_tokens=9, seed=1), Eviction(
        method="h2o", budget=24, window=1, sinks=1, response_budget=2, period=1)),
    # a method that keeps scattered keys
    "tiles": (52, dict(group=8, max_new_tokens=5), Eviction(
        method="h2o", budget=24, window=1, sinks=1))}


def load():
    """The embedded checkpoint. -> model, tokenizer"""
    return Transformer.from_pretrained(TINY), Tokenizer(TINY)


def example(net, tok, name):
    """The rollout of a figure, one of EXAMPLES. -> Problem, ids, Rollout"""
    index, settings, eviction = EXAMPLES[name]
    encode = prompt_encoder(tok)
    task = problem("kv", "eval", seed=0, index=index, tokens=52, encode=encode)
    ids = encode(task.text)
    return task, ids, generate(net, [ids], temperature=1.0, stop_ids=tok.stop_ids,
                               eviction=eviction, **settings)


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


def code_in(tok, task, ids):
    """The positions of the code that is asked for, of which the key in the answer is no part."""
    code = tok.encode(task.answer.split()[-1])
    return [j for start in range(len(ids)) if ids[start:start + len(code)] == code
            for j in range(start, start + len(code))]


def segments(P, lengths):
    """The parts of a packed group. -> list of (name, first row, row after the last)"""
    parts = [("prompt", 0, P)]
    for policy in ("dense", "shadow"):
        for g, n in enumerate(lengths):
            first = parts[-1][2]
            # the last token is never fed
            parts.append((f"{policy} {g + 1}", first, first + n - 1))
    return parts


# drawing

def paint(ax, lines, kinds):
    """A square per letter, a row per line, from the top; a blank stays empty. kinds: {letter:
    (colour, name)}; ticks stand above and to the left, without a line."""
    from matplotlib.colors import ListedColormap
    number = {letter: i for i, letter in enumerate(kinds)}
    cells = [[number.get(letter, nan) for letter in line] for line in lines]
    ax.pcolormesh(cells, cmap=ListedColormap([colour for colour, _ in kinds.values()]),
                  vmin=-0.5, vmax=len(kinds) - 0.5, edgecolors="white",
                  linewidth=30 / len(lines))
    ax.set(xticks=[], yticks=[], ylim=(len(lines), 0), frame_on=False)
    ax.tick_params(length=0, pad=1, labeltop=True, labelbottom=False)


def write(ax, x, y, text, **style):
    ax.text(x, y, text, **dict(ha="center", va="center", fontsize=8) | style)


def frame(x, y, width, height, **style):
    from matplotlib.patches import Rectangle
    return Rectangle((x, y), width, height, fill=False, **style)


def heading(figure, x, title, note=""):
    """At the top, from x, a share of the width."""
    inch = 1 / figure.get_figheight()
    figure.text(x, 1 - 0.3 * inch, title, fontsize=11, fontweight="bold")
    figure.text(x, 1 - 0.52 * inch, note, fontsize=9)


def legend(on, kinds, **place):
    """kinds: (colour, name) of each; on: a figure or axes"""
    from matplotlib.patches import Patch
    handles = [Patch(facecolor=colour, edgecolor=colour, label=name)
               for colour, name in kinds]
    return on.legend(handles=handles, frameon=False, handlelength=1, handleheight=1, **{
        "fontsize": 9, "loc": "lower center", "columnspacing": 2.5, **place})


# mask: what is kept, what is seen

def print_methods(net, tok):
    """What each method keeps of one prompt, a line per layer and KV head."""
    encode = prompt_encoder(tok)
    task = problem("kv", "eval", seed=0, index=1, tokens=120, encode=encode)
    ids = encode(task.text)
    tell(f"{task.text}\nanswer {task.answer}; {len(ids)} tokens; "
          "s sink, k kept, w window, . dropped; ^ the code that is asked for")
    for method in EVICT:
        rollout = generate(net, [ids], group=1, max_new_tokens=5, temperature=0.0,
                           stop_ids=tok.stop_ids, eviction=Eviction(
                               method, budget=BUDGET, window=WINDOW, sinks=SINKS))
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


def draw_cache(ax, texts, kept, code):
    """A row per prompt token, a column per layer and KV head. kept (L, nkv, K), code: positions."""
    P, nkv = len(texts), kept.shape[1]
    columns = [kinds(positions, P) for positions in kept.flatten(0, 1).tolist()]
    paint(ax, ["".join(letters) for letters in zip(*columns)], KINDS)
    ax.set_yticks([y + 0.5 for y in range(P)], texts, fontsize=7.5)
    for y in code:
        ax.get_yticklabels()[y].set(color=CODE, fontweight="bold")
    write(ax, -1.9, fmean(code) + 0.5, "code", ha="right", color=CODE)
    for x in range(len(columns)):
        write(ax, x + 0.5, -0.6, x % nkv, color=DARK)
    write(ax, -0.4, -0.6, "KV head", ha="right", color=DARK)
    for x in range(0, len(columns), nkv):
        write(ax, x + nkv / 2, -1.7, f"layer {x // nkv}")
        ax.axvline(x, color="white", lw=3)
    ax.add_patch(frame(LAYER * nkv + HEAD, 0, 1, P, lw=1.6, zorder=3, clip_on=False))


def draw_matrix(ax, until, kept, P, lengths):
    """The mask of one head. until (N,): lifetimes, kept: positions, lengths: of responses."""
    N = len(until)
    letters = kinds(kept, P).ljust(N, "r")
    paint(ax, ["".join(letter if see else " " for letter, see in zip(letters, seen))
               for seen in visible(until[None])[0].tolist()], KINDS)
    parts = segments(P, lengths)
    names, firsts, lasts = zip(*parts)
    ax.set_yticks([fmean(ends) for ends in zip(firsts, lasts)], names, fontsize=9)
    ax.hlines([*firsts, N], 0, N, color=LIGHT, lw=0.8, clip_on=False)
    ax.vlines([0, N], 0, N, color=LIGHT, lw=0.8, clip_on=False)
    ax.vlines(firsts[1:], P, N, color=LIGHT, lw=0.8)
    for row in [*firsts, N]:
        write(ax, N + 0.5, row, row, ha="left", color=DARK)
    write(ax, N + 0.5, -1.4, "row", ha="left", color=DARK)
    # the lifetimes, one number where neighbouring keys die together and are of one kind
    def kind(j):
        return letters[j], sum(j >= first for first in firsts)

    for run in (list(keys) for _, keys in groupby(range(N), kind)):
        if len(run) > 1:  # there is no room below one column
            write(ax, fmean(run) + 0.5, N + 1.4, int(until[run[0]]), fontsize=9)
    write(ax, -0.7, N + 1.4, "until", ha="right", fontsize=9, fontweight="bold")


def mask(out):
    """What eviction does to a prompt: every method as text, or the picture of one, whose right part
    is of the layer and KV head named above."""
    net, tok = load()
    if out is None:
        print_methods(net, tok)
        return
    task, ids, rollout = example(net, tok, "mask")
    kept = rollout.kept[0]                                       # (L, nkv, K)
    until = pack(rollout).until[LAYER, HEAD]                     # (N,)
    lengths = rollout.lengths[0].tolist()
    P = len(ids)
    figure, (left, right) = curves.plotter().subplots(
        1, 2, figsize=(9, 7.3), width_ratios=(1.75, 5.25),
        gridspec_kw=dict(left=0.1, right=0.966, bottom=0.123, top=0.87, wspace=0.23))
    draw_cache(left, words(tok, ids), kept, code_in(tok, task, ids))
    draw_matrix(right, until, kept[LAYER, HEAD].tolist(), P=P, lengths=lengths)
    heading(figure, 0.011, f"Sampler: {kept.shape[2]} of {P} prompt keys stay",
            "in every layer and KV head, each its own choice")
    heading(figure, 0.383, f"Learner: what layer {LAYER}, KV head {HEAD} (framed) sees",
            "a row per query, a column per key, coloured if the query sees the key")
    said = [f"{text.strip()} ({'right' if reward(task, text) == 1 else 'wrong'})"
            for text in responses(tok, rollout)]
    _, shadow, _ = segments(P, lengths)[1 + len(lengths)]  # where shadow copies begin
    note = (
        "One long sequence: the prompt once,\nthen each response twice.\n"
        f"Sample 1: {said[0]}; sample 2: {said[1]}.\n\n"
        "Dense copies see all prompt keys.\nShadow copies see what the sampler saw.\n\n"
        f"A key is seen in rows before its until:\nevicted ones die at row {shadow}."
    )
    write(right, len(until) - 1, 2, note, ha="right", va="top", fontsize=9,
          linespacing=1.4)
    legend(figure, KINDS.values(), ncols=len(KINDS))
    curves.save(figure, out)


# kept: the prompt as text

LETTER = 0.602 * 10.5 / 72  # inches, of the monospaced font in its size


def text_lines(texts):
    """Where each token of a prompt stands: a line per sentence. -> list of (x, y, text)"""
    x = y = 0
    places = []
    for j, text in enumerate(texts):
        if text == "\n" or (j and texts[j - 1] == "."):
            x, y = 0, y + 1
            text = text.replace("\n", "\u21b5").removeprefix(" ")
        places.append((x, y, text))
        x += len(text)
    return places


def draw_text(ax, places, letters, code):
    """The prompt of one head, a box behind what it keeps. letters: see `kinds`."""
    for j, (x, y, text) in enumerate(places):
        ink = {"s": "white", ".": DARK}.get(letters[j], "black")
        if letters[j] != ".":
            ax.barh(y + 0.5, len(text), 0.92, left=x, color=KINDS[letters[j]][0], lw=0)
        weight = "bold" if j in code else "normal"
        write(ax, x, y + 0.52, text, ha="left", family="monospace", fontsize=10.5,
              color=ink, fontweight=weight)
    x, y, _ = places[code[0]]
    wide = sum(len(places[j][2]) for j in code)
    ax.add_patch(frame(x, y + 0.04, wide, 0.92, ec=CODE, lw=2, zorder=3))


def kept(out):
    """The prompt of `mask` as text, a panel for each layer and KV head."""
    net, tok = load()
    task, ids, rollout = example(net, tok, "mask")
    code = code_in(tok, task, ids)
    heads = rollout.kept[0].flatten(0, 1).tolist()
    counts = [len({*code} & {*keys}) for keys in heads]
    whole, none = counts.count(len(code)), counts.count(0)
    tell(f"{len(ids)} prompt keys; each head keeps {BUDGET}: {SINKS} sinks, {WINDOW} "
         f"of the question, {BUDGET - SINKS - WINDOW} by votes\n"
         f"of {len(counts)} heads {whole} keep the whole code, {none} nothing of it, "
         f"{len(counts) - whole - none} a part")
    if out is None:
        return
    places = text_lines([tok.decode([token]) for token in ids])
    L, nkv = rollout.kept[0].shape[:2]
    height = 1.2 + 1.5 * L
    figure, panels = curves.plotter().subplots(
        L, nkv, figsize=(9, height), gridspec_kw=dict(
            left=0.017, right=1, top=1 - 0.78 / height, bottom=0.8 / height,
            hspace=0.34))
    for i, (ax, keys, count) in enumerate(zip(panels.flat, heads, counts)):
        said = {0: "the code is gone", len(code): "keeps the code"}.get(
            count, "keeps a part of the code")
        ax.set_title(f"layer {i // nkv}, KV head {i % nkv}: {said}", loc="left", pad=3,
                     fontsize=9.5, fontweight="bold")
        ax.set(xlim=(0, ax.get_position().width * 9 / LETTER),
               ylim=(max(y for _, y, _ in places) + 1, 0))
        ax.set_axis_off()
        draw_text(ax, places, kinds(keys, len(ids)), code)
    heading(figure, 0.017, f"What each head keeps: {BUDGET} of {len(ids)} prompt keys")
    shown = legend(figure, [
        *(KINDS[letter] for letter in "skw"), ("none", "grey text: evicted"),
        (CODE, "the code that is asked for")], ncols=5)
    shown.get_patches()[-1].set_facecolor("none")
    curves.save(figure, out)


# rows: what lives how long

BARS = {  # colour, name
    "kept": (curves.ORANGE, "prompt key that the sampler keeps"),
    "evicted": ("#CFCFCF",
                "prompt key that it evicts: dies where the shadow copies begin"),
    "dense": (curves.GREEN, "response key in a dense copy: dies with its copy"),
    "shadow": (curves.BLUE, "response key in a shadow copy: dies with its copy"),
    "gone": (curves.BLACK, "response key that the sampler evicts: dies at that step")}


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
    edges = [first for _, first, _ in parts] + [N]
    ax.vlines(edges[1:], 0, N, color="#999999", lw=0.8, zorder=0)
    for name, first, last in parts:
        write(ax, (first + last) / 2, -1.9, name.replace(" ", "\n"), fontsize=9)
        for j in range(first, last):
            kind, dies = keys[j]
            ax.barh(j + 0.5, dies - j, 0.76, left=j, color=BARS[kind][0], lw=0)
            write(ax, j - 0.3, j + 0.5, texts[j], ha="right")
            write(ax, N + 1.9, j + 0.5, dies, ha="right", fontsize=7.5, color=DARK)
            if kind == "gone":
                ax.hlines(j + 0.5, dies, last, color="black", lw=1, ls=":")
    write(ax, N + 1.9, -1, "until", ha="right", fontsize=9, color=DARK)
    ax.set(xlim=(-3, N + 2), ylim=(N, 0), xticks=edges, yticks=[])
    ax.set_xlabel("row", fontsize=9)
    ax.tick_params(axis="x", labelsize=9, length=3)
    ax.spines[["left", "right", "top"]].set_visible(False)


def rows(out):
    """The packed rows of a group and the lifetimes of its keys in one head."""
    net, tok = load()
    task, ids, rollout = example(net, tok, "rows")
    keys = bars(rollout, LAYER, HEAD)
    parts = segments(len(ids), rollout.lengths[0].tolist())
    said = responses(tok, rollout)
    tell(f"{len(keys)} rows: " + ", ".join(f"{n} {a} to {b - 1}" for n, a, b in parts))
    tell(f"samples {said}, rewards {[reward(task, text) for text in said]}")
    tell(f"layer {LAYER}, KV head {HEAD}:")
    entries = []
    for kind, (colour, name) in BARS.items():
        ends = [dies for what, dies in keys if what == kind]
        tell(f"{len(ends):3d} x {name}; until {sorted(set(ends))}")
        entries.append((colour, f"{len(ends)} x {name}"))
    if out is None:
        return
    texts = [text.replace("\u2423", "(space)")
             for text in words(tok, pack(rollout).ids.tolist())]
    figure = curves.plotter().figure(figsize=(9.0, 8.4))
    ax = figure.add_axes((0.01, 0.06, 0.98, 0.82))
    draw_bars(ax, keys, texts, parts)
    heading(figure, 0.015, f"How long each key lives: layer {LAYER}, KV head {HEAD}",
            "a bar per key, from its own row to its until; the query of row i sees the "
            "keys whose bars cover i")
    entries += [("none", f"sample {g + 1}:{text}") for g, text in enumerate(said)]
    legend(ax, entries, loc=(0.015, 0.08), labelspacing=1)
    curves.save(figure, out)


# tiles: what the kernel computes

TILE_Q, TILE_K = 8, 4  # rows and keys of a tile, each a 16th of the kernel's
ORDERS = "keys in row order", "keys sorted by until"
PAIRS = {  # colour, name
    "f": (curves.BLUE, "seen, in a full tile: no mask"),
    "p": (curves.ORANGE, "seen, in a partial tile: with a mask"),
    "h": ("#DCDCDC", "not seen, computed and masked"),
}
ABOVE = {True: ("#A0A0A0", "above: kept prompt key"),
         False: ("black", "above: evicted prompt key")}


def meet(until, tile_q, tile_k):
    """Which tiles the kernel computes, by its rule: a key tile's smallest and largest born and dies
    against the rows of a query tile. Sorted, keys stand in the order in which they die, those that
    nobody sees first. until (heads, N)
    -> for keys in row order and sorted: born (heads, keys), grid (heads, query tiles, key tiles) of
    0 dead, 1 partial, 2 full"""
    N = until.shape[1]
    born = torch.arange(-(-N // tile_k) * tile_k).expand(len(until), -1)   # (heads, keys)
    dies = F.pad(until, (0, born.shape[1] - N))                            # (heads, keys)
    dies = torch.where(dies > born, dies, 0)
    first = torch.arange(0, N, tile_q)                                     # (nq,)
    last = (first + tile_q).clamp(max=N) - 1
    found = []
    for order in (born, dies.argsort(dim=1, stable=True)):
        (born_min, born_max), (dies_min, dies_max) = (
            x.gather(1, order).unflatten(1, (-1, 1, tile_k)).aminmax(dim=3)
            for x in (born, dies))                                         # (heads, nk, 1) each
        seen = (born_min <= last) & (dies_max > first)                     # (heads, nk, nq)
        full = (born_max <= first) & (dies_min > last)
        found.append((order, (seen.int() + full.int()).mT))
    return found


def counted(grid):
    """-> tiles, those computed, those of them that are full"""
    return grid.numel(), int((grid > 0).sum()), int((grid == 2).sum())


def pairs(until, born, grid):
    """A line per query, a letter per key in the order of born: see PAIRS; blank where the tile is
    dead. until (N,). KeyError if a dead tile has a pair that is seen, a full one a hidden pair."""
    letters = {(2, True): "f", (1, True): "p", (1, False): "h", (0, False): " "}
    seen = F.pad(visible(until[None])[0], (0, len(born) - len(until)))     # (N, keys)
    tiles = grid.repeat_interleave(TILE_Q, 0).repeat_interleave(TILE_K, 1)
    return ["".join(letters[pair] for pair in zip(*row))
            for row in zip(tiles.tolist(), seen[:, born].tolist())]


def draw_tiles(ax, until, born, grid, stay):
    """One panel. until (N,), born: the order of keys, grid: of tiles, stay: is a prompt
    key kept?"""
    N, wide = len(until), len(born)
    paint(ax, pairs(until, born, grid), PAIRS)
    ax.set(xlim=(-0.3, wide + 0.3), ylim=(N + 0.3, -4.5))
    for i, met in enumerate(grid):
        for c, tile in enumerate(met):
            style = dict(ec="#D0D0D0", lw=0.5, zorder=2)
            if tile:
                style = dict(ec="black", lw=0.8, zorder=3)
            rows = min(TILE_Q, N - i * TILE_Q)
            ax.add_patch(frame(c * TILE_K, i * TILE_Q, TILE_K, rows, **style))
    columns = [c for c, j in enumerate(born) if j < len(stay)]
    ax.hlines([-1.7] * len(columns), [c + 0.1 for c in columns],
              [c + 0.9 for c in columns], lw=4,
              colors=[ABOVE[stay[born[c]]][0] for c in columns])


def tiles(out):
    """Which tiles the kernel computes."""
    net, tok = load()
    _, _, rollout = example(net, tok, "tiles")
    until = pack(rollout).until.flatten(0, 1)                    # (L * nkv, N)
    other = pack(example(net, tok, "mask")[2]).until.flatten(0, 1)       # (L * nkv, N)
    torch.manual_seed(0)
    large = group_until(P=8192, G=8, R=256, budget=1024, nkv=1)
    head = LAYER * net.config.n_kv_head + HEAD
    small, tuned = (TILE_Q, TILE_K), (kernels.TILE_Q, kernels.TILE_K)
    tile = "tiles of {} x {}".format
    cases = [(f"{tile(*small)}, layer {LAYER}, KV head {HEAD}", until, head, small),
             ("the same of the rollout of mask", other, head, small),
             (f"{tile(*tuned)}, the kernel's; prompt 8192, 8 responses of 256, 1024 "
              "keys kept at random", large, 0, tuned)]
    for name, case, at, size in cases:
        tell(f"{name}, {case.shape[1]} rows:")
        for order, (_, grid) in zip(ORDERS, meet(case, *size)):
            every, computed, full = counted(grid[at])
            line = (f"  {order}: {computed} of {every} tiles computed, {full} of "
                    "them full")
            if len(grid) > 1:
                _, computed, full = counted(grid)
                line += f"; all {len(grid)} heads: {computed}, {full} full"
            tell(line)
    if out is not None:
        orders = [(born[head], grid[head]) for born, grid in meet(until, *small)]
        draw_orders(out, rollout, until[head], orders)


def draw_orders(path, rollout, until, orders):
    """Both orders of the keys of one head, side by side. until (N,), orders: pairs born, grid."""
    P = len(rollout.prompts[0])
    stay = torch.isin(torch.arange(P), rollout.kept[0][LAYER, HEAD]).tolist()
    parts = segments(P, rollout.lengths[0].tolist())
    sections = []  # of the rows: all copies of a policy
    for policy in ("prompt", "dense", "shadow"):
        mine = [part for part in parts if part[0].startswith(policy)]
        sections.append((policy, mine[0][1], mine[-1][2]))
    names, firsts, lasts = zip(*sections)
    figure, panels = curves.plotter().subplots(
        1, 2, figsize=(9, 5.4), gridspec_kw=dict(
            left=0.07, right=0.995, bottom=0.12, top=0.87, wspace=0.06))
    for ax, order, (born, grid) in zip(panels, ORDERS, orders):
        draw_tiles(ax, until, born, grid=grid, stay=stay)
        ax.set_yticks([fmean(ends) for ends in zip(firsts, lasts)], names, rotation=90,
                      va="center", fontsize=8)
        ax.vlines([-0.9] * 3, [x + 0.4 for x in firsts], [x - 0.4 for x in lasts],
                  color=DARK, lw=1.5, clip_on=False)
        every, computed, full = counted(grid)
        heading(figure, ax.get_position().x0, order.capitalize(),
                f"{computed} of {every} tiles computed, {full} of them without a mask")
    legend(figure, [*PAIRS.values(), *ABOVE.values()], ncols=3)
    curves.save(figure, path)


# acceptance: both policies while arms train

ARMS = os.path.join(ROOT, "results", "ceiling")
SHOWN = ["naive lr=1e-4", "shadow lr=3e-4", "smd lr=1e-3"]
OVERLAP = {"eval_accept": "mean", "eval_accept_p05": "5th percentile"}


def acceptance(out):
    """Held-out acceptance by step, its mean and its lower tail over tokens."""
    arms = load_logs(ARMS, SHOWN)
    for name, arm in arms.items():
        for key, what in OVERLAP.items():
            tell(f"{name}, {len(arm['logs'])} seeds, {what} of tokens, by step: median "
                 "(lowest to highest seed)")
            tell("  " + ", ".join(
                f"{step}: {median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
                for step, values in zip(*over_seeds(arm, key))))
    if out is None:
        return

    def panel(ax, key, **axis):
        thin = curves.spread_of(ax, arms, key)
        ends = curves.curve(ax, arms, key, middle=median)
        ax.set(title=f"{OVERLAP[key].capitalize()} of tokens{thin}", **axis)
        ax.yaxis.set_major_formatter("{x:g}")
        return ends

    said = "held-out acceptance"
    panels = dict(A=partial(panel, key="eval_accept", ylabel=said),
                  B=partial(panel, key="eval_accept_p05", yscale="log",
                            ylabel=f"{said}, logarithmic"))
    curves.write_panels(out, panels, curves.by_step(100), mosaic="AB", figsize=(9, 3.9))


FIGURES = {f.__name__: f for f in (mask, kept, rows, tiles, acceptance)}


def main(argv=None):
    args = Arguments("draw", "print the numbers of a figure, or draw it")
    args.add_argument("figure", nargs="?", choices=[*FIGURES], default="mask",
                      help="which one, as docs/figures.md shows them")
    args.add_argument("--out", type=os.path.expanduser,
                      help="a .png to draw to; without it, lines of text")
    args = args.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        if args.out is not None:
            curves.check_out(args.out)
        FIGURES[args.figure](args.out)
        if args.out is not None:
            tell(f"picture written to {args.out}")


if __name__ == "__main__":
    main()
