"""The figures show real rollouts and logs, and show them as the definition says."""
import json
import os
import re
import sys
from itertools import product
from statistics import median

import pytest
import torch

from conftest import DEVICE, beside_interpreter, kernel
from data.tasks import reward
from experiments import draw
from experiments.attention import group_until
from fast.attention import TILE_K, TILE_Q, make_plan
from grpo import pack, pack_by_hand
from shadow_attn import visible


@pytest.fixture(scope="module")
def drawn():
    """model, tokenizer, problem, ids, rollout, until of the head that is drawn"""
    net, tok = draw.load()
    task, ids, rollout = draw.example(net, tok, "mask")
    return net, tok, task, ids, rollout, pack(rollout).until[draw.LAYER, draw.HEAD]


def keys_from(first, seen):
    """Positions, from first on, that are True."""
    return [j for j in seen.nonzero().flatten().tolist() if j >= first]


def test_what_the_picture_says_about_this_rollout(drawn):
    _, tok, task, ids, rollout, until = drawn
    P = len(ids)
    lengths = rollout.lengths[0].tolist()
    kept = rollout.kept[0][draw.LAYER, draw.HEAD].tolist()
    parts = {name: (first, last) for name, first, last in draw.segments(P, lengths)}
    assert list(parts) == ["prompt", "dense 1", "dense 2", "shadow 1", "shadow 2"]
    assert parts["shadow 2"][1] == len(until)
    seen = visible(until[None])[0]                               # (N, N)
    for g, n in enumerate(lengths):
        dense_first, dense_last = parts[f"dense {g + 1}"]
        shadow_first, shadow_last = parts[f"shadow {g + 1}"]
        assert dense_last - dense_first == shadow_last - shadow_first == n - 1
        for row in range(dense_first, dense_last):
            assert seen[row, :P].all()
            assert keys_from(P, seen[row]) == list(range(dense_first, row + 1))
        for row in range(shadow_first, shadow_last):
            assert keys_from(0, seen[row, :P]) == kept
            assert keys_from(P, seen[row]) == list(range(shadow_first, row + 1))
    evicted = sorted(set(range(P)) - set(kept))
    assert until[evicted].unique().tolist() == [parts["shadow 1"][0]]
    assert until[kept].unique().tolist() == [len(until)]
    # the code stands where the picture says, and the head that is drawn keeps it
    at = draw.code_in(tok, task, ids)
    assert task.answer == f"candle {tok.decode([ids[j] for j in at])}" == "candle 6535"
    assert set(at) <= set(kept)
    said = draw.responses(tok, rollout)
    assert said == [" candle 1665", " candle 6535"]
    assert [reward(task, text) for text in said] == [0, 1]
    question = "\nRepeat each word with its code: candle.\nAnswer:"
    assert tok.decode(ids[-draw.WINDOW:]) == question
    assert (draw.BUDGET, P) == (24, 49)


def test_kinds_and_segments_on_numbers_by_hand():
    w = draw.WINDOW
    kept = [0, 1, 5, 10, *range(20, 20 + w)]
    assert draw.kinds(kept, 20 + w) == "ss...k....k........." + "w" * w
    assert draw.kinds([0, 5], w + 4) == "s....w" + "." * (w - 2)  # a window that reaches back
    assert draw.segments(4, [2, 3]) == [
        ("prompt", 0, 4), ("dense 1", 4, 5), ("dense 2", 5, 7), ("shadow 1", 7, 8),
        ("shadow 2", 8, 10)]


def test_every_method_is_printed(drawn, capsys):
    net, tok, *_ = drawn
    draw.print_methods(net, tok)
    lines = capsys.readouterr().out.splitlines()
    for method in draw.EVICT:
        at = [i for i, line in enumerate(lines) if line.startswith(f"{method}: ")]
        assert len(at) == 1
        heads = lines[at[0] + 1:at[0] + 1 + net.config.n_layer * net.config.n_kv_head]
        for line in heads:
            letters = line.split()[-1]
            assert letters.startswith("ss") and letters.endswith("w" * draw.WINDOW)
            held = len(letters) - letters.count(".")
            assert f"{method}: {held} keys" in lines[at[0]]
            assert held == (len(letters) if method == "none" else draw.BUDGET)
    assert lines[-1].count("^") == len(tok.encode("4768"))


def check_picture(path, colours):
    """Twice the width of a page, small enough, and every kind is to be seen."""
    from matplotlib import image
    pixels = image.imread(path)[:, :, :3]
    assert pixels.shape[1] == 1800 and pixels[0, 0].tolist() == [1, 1, 1]
    assert os.path.getsize(path) < 300_000
    for colour in colours:
        rgb = torch.tensor([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        off = (torch.from_numpy(pixels.copy()) - rgb).abs().amax(-1)
        assert (off < 0.02).sum() > 500, colour


@pytest.mark.parametrize("argv, says", [
    (["--out=x.pdf"], "--out must name a .png, got 'x.pdf'"), (["row"], "invalid choice: 'row'"),
    (["--out=new/mask.png"], "the picture needs matplotlib: pip install matplotlib")])
def test_refused_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{re.escape(says)}[^\n]*$"):
        draw.main(argv)
    assert not os.path.exists("new")


# kept

def test_the_prompt_as_text(drawn):
    _, tok, task, ids, rollout, _ = drawn
    places = draw.text_lines([tok.decode([token]) for token in ids])
    lines = {}
    for x, y, text in places:
        assert x == len(lines.get(y, ""))  # tokens stand next to each other
        lines[y] = lines.get(y, "") + text
    whole = "".join(lines.values()).replace("\u21b5", "\n")
    assert whole == task.text.replace(". ", ".") + "\nAnswer:"
    assert lines[0] == "The code for train is 4466." and lines[5] == "\u21b5Answer:"


# rows

@pytest.fixture(scope="module")
def lived():
    """The rollout of `rows`."""
    return draw.example(*draw.load(), "rows")[2]


def test_bars_end_at_until(drawn, lived):
    want = pack_by_hand(lived).until
    P, (first, second) = len(lived.prompts[0]), (lived.lengths[0] - 1).tolist()
    shadow = P + first + second
    for layer, heads in enumerate(want.tolist()):
        for head, until in enumerate(heads):
            keys = draw.bars(lived, layer, head)
            assert [dies for _, dies in keys] == until
            kept = [j for j, (kind, _) in enumerate(keys) if kind == "kept"]
            assert kept == lived.kept[0][layer, head].tolist()
            assert {dies for kind, dies in keys if kind == "evicted"} == {shadow}
            assert [kind for kind, _ in keys[P:shadow]] == ["dense"] * (first + second)
            steps = lived.until[layer, head, 0]                  # (G, R)
            gone = (steps[0, :first] < first).tolist() + (steps[1, :second] < second).tolist()
            assert [kind == "gone" for kind, _ in keys[shadow:]] == gone
            assert {kind for kind, _ in keys} == set(draw.BARS)  # the picture has them all
    kinds = {kind for kind, _ in draw.bars(drawn[4], draw.LAYER, draw.HEAD)}
    assert kinds == set(draw.BARS) - {"gone"}  # no response key was evicted


# tiles

KERNELS = "counted"  # tests that run in the interpreter


@kernel
def test_tiles_that_are_counted_are_those_of_the_plan():
    until = group_until(P=300, G=4, R=51, budget=60, nkv=2)      # (nkv, N)
    plan = make_plan(until.to(DEVICE), backward=False)
    lists, partial, visible, _ = (x.cpu() for x in plan.by_query)
    (_, in_order), (born, grid) = draw.meet(until, TILE_Q, TILE_K)
    assert torch.equal(plan.born.cpu(), born.int())
    listed = torch.zeros_like(grid)
    for h, i in product(*map(range, partial.shape)):
        listed[h, i, lists[h, i, :visible[h, i]].long()] = 2
        listed[h, i, lists[h, i, :partial[h, i]].long()] = 1
    assert torch.equal(listed, grid)
    for other in (in_order, draw.meet(until - TILE_Q, TILE_Q, TILE_K)[1][1]):  # controls
        assert not torch.equal(listed, other)


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()


def test_no_pair_is_missed(drawn):
    until = drawn[-1]
    seen = int(visible(until[None]).sum())
    for born, grid in draw.meet(until[None], draw.TILE_Q, draw.TILE_K):
        lines = draw.pairs(until, born[0], grid[0])
        assert len(lines) == len(until) and sum(x in "fp" for line in lines for x in line) == seen
        with pytest.raises(KeyError):  # control: a tile that should not be dead
            draw.pairs(until, born[0], 0 * grid[0])


# acceptance, and what the page says

def test_medians_are_of_the_logs(capsys):
    draw.main(["acceptance"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(draw.SHOWN)
    last = []
    for seed in range(7):
        with open(os.path.join(draw.ARMS, f"smd,lr=1e-3-{seed}.jsonl")) as f:
            last.append(json.loads(f.readlines()[-1])["eval_accept_p05"])
    said = f"100: {median(last):.3f} ({min(last):.3f} to {max(last):.3f})"
    assert lines[-1].endswith(said) and not lines[-3].endswith(said)


@pytest.mark.parametrize("name, colours", [
    ("mask", [colour for colour, _ in draw.KINDS.values()]),
    ("kept", [draw.KINDS[letter][0] for letter in "skw"] + [draw.CODE]),
    ("rows", [colour for colour, _ in draw.BARS.values()]),
    ("tiles", [colour for colour, _ in draw.PAIRS.values()]),
    ("acceptance", draw.curves.COLOURS[:3])])
def test_figures_are_drawn(name, colours, tmp_path, capsys):
    """And the captions have their numbers."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"{name}.png"
    draw.main([name, f"--out={path}"])
    check_picture(path, colours)
    if name != "mask":
        check_caption(name, capsys.readouterr().out)


def check_caption(name, said):
    """All numbers of the text below the command that draws a figure are printed."""
    with open(os.path.join(draw.ROOT, "docs", "figures.md"), encoding="utf-8") as f:
        part = f.read().split(f"python -m experiments.draw {name} --out=docs/{name}.png\n```")[1]
    text = re.sub("H2O|5th|1 if they agree", "", part.split("## ")[0])
    numbers, printed = (re.findall(r"[\d.]*\d", x) for x in (text, said))
    assert len(numbers) > 3 and {*numbers} <= {*printed}, {*numbers} - {*printed}
    assert "0.123" not in printed  # control
