"""The figures show real rollouts and logs, and show them as the definition says."""
import importlib.util
import json
import os
import re
import sys
from statistics import median

import pytest
import torch

from data.tasks import reward
from experiments import draw
from experiments.attention import group_until
from fast.attention import TILE_K, TILE_Q
from grpo import pack, pack_by_hand
from shadow_attn import triton, visible


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


def test_kept_counts(drawn):
    *_, ids, rollout, _ = drawn
    for heads in rollout.kept[0].tolist():
        for kept in heads:
            letters = draw.kinds(kept, len(ids))
            counts = {letter: letters.count(letter) for letter in "skw."}
            chosen = draw.BUDGET - draw.WINDOW - 2
            assert counts == {"s": 2, "k": chosen, "w": draw.WINDOW, ".": len(ids) - draw.BUDGET}


def test_kinds_and_find_on_numbers_by_hand():
    w = draw.WINDOW
    kept = [0, 1, 5, 10, *range(20, 20 + w)]
    assert draw.kinds(kept, 20 + w) == "ss...k....k........." + "w" * w
    assert draw.kinds([0, 5], w + 4) == "s....w" + "." * (w - 2)  # a window that reaches back
    assert draw.find([1, 2, 3, 1, 2, 1], [1, 2]) == [0, 1, 3, 4]
    assert draw.find([1, 2, 3], [2, 1]) == []
    assert draw.segments(4, [2, 3]) == [
        ("prompt", 0, 4),
        ("dense 1", 4, 5),
        ("dense 2", 5, 7),
        ("shadow 1", 7, 8),
        ("shadow 2", 8, 10),
    ]


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


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as e:
        draw.main([f"--out={tmp_path / 'mask.png'}"])
    assert str(e.value) == "error: the picture needs matplotlib: pip install matplotlib"
    assert not (tmp_path / "mask.png").exists()


@pytest.mark.parametrize("argv, says", [
    (["--out=x.pdf"], "--out must name a .png, got 'x.pdf'"), (["row"], "invalid choice: 'row'")])
def test_refused_in_one_line(argv, says):
    with pytest.raises(SystemExit) as e:
        draw.main(argv)
    assert str(e.value).startswith("error: ") and says in str(e.value)
    assert "\n" not in str(e.value)


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


def test_codes_that_are_kept_by_hand():
    kept = torch.tensor([[[0, 3], [1, 2]], [[2, 3], [0, 1]]])
    assert draw.kept_codes(kept, [2, 3]) == [[1, 1], [2, 0]]


# rows

@pytest.fixture(scope="module")
def lived():
    """The rollout of `rows`."""
    return draw.example(*draw.load(), "rows")[2]


def test_bars_end_at_until(lived):
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


def test_bars_without_eviction_of_responses(drawn):
    *_, rollout, _ = drawn
    kinds = {kind for kind, _ in draw.bars(rollout, draw.LAYER, draw.HEAD)}
    assert kinds == set(draw.BARS) - {"gone"}


# tiles

def by_rule(until, tile_q, tile_k):
    """The rule below shadow_attn.py's picture, for keys in row order and sorted. until (N,)
    -> (tiles computed, those that are full) of each order"""
    N = len(until)
    born = torch.arange(-(-N // tile_k) * tile_k)
    dies = torch.zeros_like(born)
    dies[:N] = torch.where(until > born[:N], until, 0)
    first = torch.arange(0, N, tile_q)[:, None]                  # (nq, 1)
    last = (first + tile_q).clamp(max=N) - 1
    counts = []
    for order in (born, dies.argsort(stable=True)):
        b, d = born[order].view(-1, tile_k), dies[order].view(-1, tile_k)  # (nk, tile_k)
        some = (b.amin(1) <= last) & (d.amax(1) > first)         # (nq, nk)
        full = (b.amax(1) <= first) & (d.amin(1) > last)
        counts.append((int(some.sum()), int(full.sum())))
    return counts


@pytest.fixture(scope="module")
def listed(drawn, tmp_path_factory):
    """What `tiles` did: its picture, until (N,) of its head; (born, grid) in row order, and
    sorted."""
    if triton is None:
        pytest.skip("needs triton")
    path = tmp_path_factory.mktemp("tiles") / "tiles.png"
    argv = [f"--out={path}"] if importlib.util.find_spec("matplotlib") else []
    listed, in_interpreter, before = [], draw.in_interpreter, dict(os.environ)

    def first(f, *cases):
        """The others, which are printed only, take long."""
        listed.extend(in_interpreter(f, cases[0]))
        return listed * len(cases)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(draw, "in_interpreter", first)
        draw.main(["tiles", *argv])
    assert dict(os.environ) == before and draw.kernels.TILE_Q == TILE_Q  # nothing stays changed
    until = pack(draw.example(*drawn[:2], "tiles")[2]).until[draw.LAYER, draw.HEAD]
    head = draw.LAYER * drawn[0].config.n_kv_head + draw.HEAD
    return path, until, [(born[head], grid[head]) for born, grid in listed[0]]


def test_the_tiles_are_drawn(listed):
    pytest.importorskip("matplotlib")
    check_picture(listed[0], [colour for colour, _ in draw.PAIRS.values()])


def test_tiles_are_those_of_the_plan(listed):
    _, until, orders = listed
    counts = [draw.counted(grid)[1:] for _, grid in orders]
    assert counts == by_rule(until, draw.TILE_Q, draw.TILE_K)
    assert counts != by_rule(until - 9, draw.TILE_Q, draw.TILE_K)  # control
    assert orders[0][0] == sorted(orders[1][0]) != orders[1][0]


def test_no_pair_is_missed(listed):
    _, until, orders = listed
    pairs = int(visible(until[None]).sum())
    for born, grid in orders:
        lines = draw.pairs(until, born, grid)
        assert len(lines) == len(until) and sum(x in "fp" for line in lines for x in line) == pairs
        dead = [[0] * len(tiles) for tiles in grid]
        with pytest.raises(KeyError):  # control: a tile that should not be dead
            draw.pairs(until, born, dead)


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
    ("acceptance", draw.curves.COLOURS[:3])])
def test_figures_are_drawn(name, colours, tmp_path, capsys):
    """In the place of a link that somebody planted; and the captions have their numbers."""
    pytest.importorskip("matplotlib")
    path, theirs = tmp_path / "new" / f"{name}.png", tmp_path / "theirs"
    theirs.write_text("theirs")
    path.parent.mkdir()
    path.symlink_to(theirs)
    draw.main([name, f"--out={path}"])
    assert theirs.read_text() == "theirs" and not path.is_symlink()
    check_picture(path, colours)
    if name != "mask":
        check_caption(name, capsys.readouterr().out)


def caption(name):
    """The text below the command that draws a figure."""
    with open(os.path.join(draw.ROOT, "docs", "figures.md"), encoding="utf-8") as f:
        part = f.read().split(f"python -m experiments.draw {name} --out=docs/{name}.png\n```")[1]
    return part.split("## ")[0]


def check_caption(name, said):
    """All its numbers are printed."""
    printed = re.findall(r"[\d.]*\d", said)
    text = caption(name).replace("H2O", "").replace("5th", "")
    numbers = re.findall(r"[\d.]*\d", text.replace("1 if they agree", ""))
    assert len(numbers) > 3
    for number in numbers:
        assert number in printed, number
    assert "0.123" not in printed  # control


def test_numbers_of_the_caption_of_tiles(drawn, listed):
    torch.manual_seed(0)
    large = group_until(P=8192, G=8, R=256, budget=1024, nkv=1)[0]
    cases = [(large, TILE_Q, TILE_K), (listed[1], draw.TILE_Q, draw.TILE_K),
             (drawn[-1], draw.TILE_Q, draw.TILE_K)]
    (a, _), (b, _) = by_rule(*cases[0])
    text = " ".join(caption("tiles").split())
    assert f"8 responses of 256 and 1024 keys kept at random it is {a} against {b}" in text
    (a, full), (b, fuller) = by_rule(*cases[1])
    assert f"{a} tiles become {b}, and those that need no mask rise from {full} to {fuller}" in text
    (a, _), (b, _) = by_rule(*cases[2])
    assert f"{a} against {b} for the rollout of the first figure" in text
