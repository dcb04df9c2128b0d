"""support/checkpoint.py and what of a run's folder goes through it: nothing outside is written,
whatever stands there."""
import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from conftest import (
    HELD,
    TINY,
    at_call,
    contents,
    copy_of,
    read_checkpoint,
    read_log,
    train_here,
)
from support.checkpoint import (
    UNFINISHED,
    new_file,
    open_to_append,
    remove,
    sync,
    write_checkpoint,
    write_tensors,
    write_text,
)
from support.run import Run, hold, read_beside

# links in a run's folder

def planted(out, name, victim):
    """A checkpoint that says the log and the samples were empty, and a link at name."""
    state = read_checkpoint(out)
    state["sizes"] = dict.fromkeys(state["sizes"], 0)
    write_checkpoint(str(out / "ckpt.pt"), state)
    if (out / name).is_dir():
        shutil.rmtree(out / name)
    elif os.path.lexists(out / name):
        if name == "ckpt.pt":
            shutil.copy(out / name, victim)
        (out / name).unlink()
    os.symlink(victim, out / name)


@pytest.mark.parametrize("name", [
    "samples.txt", "ckpt.pt", "ckpt-previous.pt" + UNFINISHED, "model/run.json" + UNFINISHED,
    "best/tokenizer.json", "model", "adapter-best", "tensorboard"])
def test_no_link_is_followed(name, finished, tmp_path):
    """Refused by name, whether the run goes on or begins anew; what it leads to stays, also a
    folder with a list of files that a run would remove."""
    out, victim = copy_of(finished[0], tmp_path), tmp_path / "victim"
    victim.mkdir()
    if "." in name:
        (victim / "file").write_text("theirs\n")
    else:
        shutil.copytree(out / "model", victim, dirs_exist_ok=True)
    planted(out, name, victim / "file" if "." in name else victim)
    before = contents(victim)
    for say in ("--resume=True", "--overwrite=True"):
        with pytest.raises(SystemExit, match=f"^error: out_dir '.*out' holds {name}, which (is a l|"
                           "no run of this)[^\n]*choose another --out_dir$"):
            train_here(say, "--steps=5", f"--out_dir={out}")
        assert contents(victim) == before and os.path.islink(out / name)
    if name == "samples.txt":  # the control: the checkpoint says that the log was empty
        (out / name).unlink()
        train_here("--resume=True", "--steps=5", f"--out_dir={out}")
        assert len(read_log(out)[1]) == 1


def test_a_second_name_of_a_file(finished, tmp_path):
    """A hard link would be written through as well."""
    out, victim = copy_of(finished[0], tmp_path), tmp_path / "victim"
    victim.write_text("theirs\n")
    (out / "samples.txt").unlink()
    os.link(victim, out / "samples.txt")
    with pytest.raises(SystemExit, match="samples.txt has another hard link, and is not written"):
        train_here("--resume=True", "--steps=5", f"--out_dir={out}")
    assert victim.read_text() == "theirs\n"


@pytest.mark.parametrize("name", ["samples.txt", "ckpt.pt" + UNFINISHED, "model"])
def test_links_that_come_later(name, tmp_path, monkeypatch):
    """Planted while the run samples: what it leads to stays, and the run says which name it is
    where it would write through it; a temporary name is taken over."""
    out, victim = tmp_path / "out", tmp_path / "victim"

    def plant():
        shutil.rmtree(out / name, ignore_errors=True)
        if os.path.lexists(out / name):
            os.remove(out / name)
        os.symlink(victim, out / name)

    at_call(4, plant, monkeypatch.setattr)  # in the second step
    if "." in name:
        victim.write_text("theirs\n")
    else:
        victim.mkdir()
    ask = ["--steps=2", "--eval_every=2", "--save_every=1", f"--out_dir={out}"]
    if name.endswith(UNFINISHED):
        train_here(*ask)
        assert not os.path.lexists(out / name)
    else:
        with pytest.raises(SystemExit, match=f"{name} is a link, or leads through one, and noth"):
            train_here(*ask)
    if "." in name:
        assert victim.read_text() == "theirs\n"
    else:
        assert os.listdir(victim) == []


def test_only_below_a_folder_that_is_held(tmp_path):
    """Somebody's own out_dir may be a link, and so may what leads there; nothing in it."""
    there, out = tmp_path / "there", tmp_path / "out"
    (there / "inner").mkdir(parents=True)
    out.symlink_to(there)
    write_text(str(out / "inner" / "file"), "x")  # nobody holds it
    (there / "link").symlink_to(there / "inner")
    hold(str(out))
    write_text(str(out / "inner" / "file"), "y")
    assert (there / "inner" / "file").read_text() == "y"
    before = os.listdir(there / "inner")
    for act in (lambda path: write_text(path, "z"), open_to_append, remove):
        with pytest.raises(OSError, match="out/link is a link, or leads through one"):
            act(str(out / "link" / "file"))
    assert (there / "inner" / "file").read_text() == "y" and os.listdir(there / "inner") == before
    with open_to_append(str(out / "inner" / "file")) as f:
        f.write(b"z")
    assert (there / "inner" / "file").read_text() == "yz"
    os.close(HELD.popitem()[1])


# what is copied with a model

def test_only_what_belongs_to_a_model_is_copied(tmp_path):
    """No file that happens to end in .json; no file behind a link out of the folder, whatever its
    name. The hub's own links, into its store beside the snapshot, are followed."""
    model, secret = tmp_path / "M", tmp_path / "secret"
    shutil.copytree(TINY, model)
    secret.write_text('{"token": "secret"}')
    for name in ("notes.json", "adapter_config.json", "x.jinja"):
        (model / name).write_text("{}")
    (model / "x.json").symlink_to(secret)
    want = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert read_beside(model).keys() == want
    (model / "adapter_config.json").unlink()
    out = tmp_path / "out"
    train_here(f"--model={model}", "--steps=1", "--eval_every=9", f"--out_dir={out}")
    assert set(os.listdir(out / "model")) == want | {"config.json", "model.safetensors", "run.json"}
    (model / "special_tokens_map.json").symlink_to(secret)
    with pytest.raises(SystemExit, match="special_tokens_map.json is a link out of the model's"):
        train_here(f"--model={model}", "--steps=1", f"--out_dir={tmp_path / 'other'}")
    assert not (tmp_path / "other").exists()
    (model / "special_tokens_map.json").unlink()
    (model / "special_tokens_map.json").symlink_to("notes.json")  # in the folder: the control
    assert read_beside(model)["special_tokens_map.json"] == b"{}"
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    assert read_beside(snapshot) == {"tokenizer.json": b"{}"}
    (snapshot / "vocab.json").symlink_to(secret)
    with pytest.raises(ValueError, match="vocab.json is a link out of"):
        read_beside(snapshot)


# what a checkpoint holds

SHAPES = dict(evals=[dict(step=int, eval_dense=float)], best=dict(step=int), kv=dict(kept=int),
              answers=(dict(question=str), dict(question=str)))
SHAPES.update({"idle?": int, "wandb?": str})


def test_memory_of_another_kind(finished, tmp_path):
    """Each entry is checked, down to the last, before it is used."""
    out = copy_of(finished[0], tmp_path)
    state = read_checkpoint(out)
    c = SimpleNamespace(**dict(state["config"], out_dir=str(out), resume=True))

    def resumed(**changes):
        write_checkpoint(str(out / "ckpt.pt"), {**state, **changes})
        try:
            Run(c, vars(c).keys(), shapes=SHAPES)
        finally:
            os.close(HELD.popitem()[1])

    resumed()  # the controls
    resumed(step=0, memory={})
    for say, change in (
            ("memory.evals must be a list, got an object", dict(evals={})),
            ("memory.evals.0 must be an object, got 3", dict(evals=[3])),
            ("memory.evals.0.step must be an integer, got 'x'", dict(evals=[dict(step="x")])),
            ("memory.best must be an object, got a list", dict(best=[])),
            ("memory.evals.1.eval_dense is missing or null",
             dict(evals=[dict(step=0, eval_dense=1), dict(step=1)])),
            ("memory.kv is missing or null", dict(kv=None)),
            ("memory.answers must have 2 items, got 1", dict(answers=[dict(question="x")])),
            ("memory.idle must be an integer, got true", dict(idle=True)),
            ("memory.wandb must be text, got 5", dict(wandb=5)),
            ("Object of type Tensor is not JSON serializable", dict(other=torch.ones(2))),
            ("Out of range float values", dict(other=float("nan")))):
        with pytest.raises(ValueError, match="resume: .*ckpt.pt: memory is not what a run keeps: "
                                             f".*{say}.*; .*rename it to ckpt.pt") as e:
            resumed(memory={**state["memory"], **change})
        assert "\n" not in str(e.value)


# the pieces

def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name before the next thing happens; sync does the same for a file that stands."""
    path, did = tmp_path / "x", []

    def noted(what, call):
        def act(*args, **kwargs):
            kind = ""
            if what == "sync":
                kind = " folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else " file"
            did.append(what + kind)
            return call(*args, **kwargs)
        return act

    for name, what in dict(fsync="sync", replace="rename").items():
        monkeypatch.setattr(os, name, noted(what, getattr(os, name)))
    write_text(str(path), "new")
    assert did == ["sync file", "rename", "sync folder"] and path.read_text() == "new"
    sync(str(path))
    assert did[3:] == ["sync file"]
    with pytest.raises(FileExistsError):  # nobody's file is taken for a new one
        new_file(str(path), None)
    assert path.read_text() == "new"


def test_tensors_are_written_as_safetensors_writes_them(tmp_path):
    """Byte for byte, whatever dtypes, shapes, order and layout."""
    g = torch.Generator().manual_seed(0)
    many = dict(b=torch.randn(3, 5, generator=g).t(), a=torch.randn(4, generator=g).bfloat16(),
                c=torch.zeros(0, 3), z=torch.tensor(1.5), d=torch.randn(2, generator=g).double(),
                h=torch.randn(3, generator=g).half(), n10=torch.ones(2, 2)[1:], n9=torch.ones(1),
                part=torch.arange(12.0).view(4, 3)[1:3])
    for name, tensors in dict(many=many, one=dict(x=torch.ones(1).bfloat16()), none={}).items():
        write_tensors(str(tmp_path / name), tensors)
        save_file({k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors.items()},
                  tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / name).read_bytes() == (tmp_path / "theirs").read_bytes(), name
