"""The picture of the mask shows a real rollout, and shows it as the definition says."""
import os
import subprocess
import sys

import pytest
import torch

from data.tasks import reward
from experiments import draw
from grpo import pack


@pytest.fixture(scope="module")
def drawn():
    """model, tokenizer, problem, ids, rollout, until of the head that is drawn"""
    net, tok = draw.load()
    task, ids, rollout = draw.example(net, tok)
    return net, tok, task, ids, rollout, pack(rollout).until[draw.LAYER, draw.HEAD]


def test_visible_is_the_definition(drawn):
    *_, until = drawn
    got = draw.visible(until)
    for i in range(len(until)):
        for j in range(len(until)):
            assert got[i, j].item() == (j <= i < until[j].item()), (i, j)
    causal = torch.ones_like(got).tril()
    assert not torch.equal(got, causal)  # control: keys do die


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
    seen = draw.visible(until)
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
    assert task.answer == f"hammer {tok.decode([ids[j] for j in at])}" == "hammer 4934"
    assert set(at) <= set(kept)
    said = draw.responses(tok, rollout)
    assert said == [" hammer 4934", " hammer 2796"]
    assert [reward(task, text) for text in said] == [1, 0]
    question = "\nRepeat each word with its code: hammer.\nAnswer:"
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


def test_the_picture_is_written(drawn, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image
    net, tok, *_ = drawn
    path = str(tmp_path / "mask.png")
    draw.draw_picture(net, tok, path)
    pixels = image.imread(path)
    assert pixels.shape[1] == 1800 and pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert os.path.getsize(path) < 200_000
    for colour in draw.COLOURS.values():  # every kind of key is to be seen
        rgb = torch.tensor([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        off = (torch.from_numpy(pixels[:, :, :3].copy()) - rgb).abs().amax(-1)
        assert (off < 0.01).sum() > 1000


def test_without_matplotlib_one_line_says_so(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.draw", f"--out={tmp_path / 'mask.png'}"]
    result = subprocess.run(command, cwd=draw.ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: the picture needs matplotlib: pip install matplotlib\n"
    assert not (tmp_path / "mask.png").exists()
