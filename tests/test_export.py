"""What a run leaves, out/model and out/best: transformers reads it and computes the same, and
experiments/generate.py keeps what the run kept."""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TINY, copy_of, read_checkpoint, train_here
from data.tasks import Problems
from data.tokenizer import Tokenizer
from experiments import generate as command
from kvcache import EVICT, Eviction
from model import Transformer
from rollout import generate
from shadow_attn import shadow_attention
from support.run import read_list


@torch.no_grad()
def our_logits(model, ids):
    """(n, V) of one dense sequence."""
    n = len(ids)
    until = torch.full((model.config.n_kv_head, n), n, dtype=torch.int32)

    def attend(layer, q, k, v):
        return shadow_attention(q, k, v, until, impl="ref")
    return model.logits(model(torch.tensor(ids), torch.arange(n), attend))


@torch.no_grad()
def their_logits(folder, ids):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return hf(input_ids=torch.tensor([ids])).logits[0]


def trained(folder, out):
    """The model of `folder` with the weights of out's checkpoint."""
    model = Transformer.from_pretrained(folder)
    with torch.no_grad():
        for p, master in zip(model.parameters(), read_checkpoint(out)["learner"]["masters"]):
            p.copy_(master)
    return model


def a_prompt(tok):
    return Problems("kv", tok, seed=0, tokens=64, n_eval=1).get("eval", [0])[1][0]


def test_transformers_computes_what_the_run_did(finished):
    """Logits of the last weights, of the best, and the same greedy tokens. The control: weights of
    before the run, which the best ones are here."""
    out = finished[0]
    tok = Tokenizer(TINY)
    ids = a_prompt(tok)
    last, start = trained(TINY, out), Transformer.from_pretrained(TINY)
    assert [read_list(os.path.join(out, name))[0] for name in ("model", "best")] == [4, 0]
    moved = (our_logits(last, ids) - our_logits(start, ids)).abs().max()
    assert moved > 1e-2
    for name, model in (("model", last), ("best", start)):
        folder = os.path.join(out, name)
        gap = (their_logits(folder, ids) - our_logits(model, ids)).abs().max()
        assert gap <= 1e-4 < moved / 10
        hf = AutoModelForCausalLM.from_pretrained(folder)
        assert hf.dtype == torch.float32
        theirs = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8)[0, len(ids):]
        r = generate(model, [ids], 1, 8, temperature=0.0, eviction=Eviction("none"),
                     stop_ids=tok.stop_ids)
        assert theirs.tolist() == r.tokens[0, 0, :r.lengths[0, 0]].tolist()


def test_the_tokenizer_goes_along(finished):
    """It reads and writes as the one that the run began with; so does what stops a response."""
    folder, ours = os.path.join(finished[0], "model"), Tokenizer(TINY)
    text = "The code for pin is 4817.\nRepeat each word with its code: pin."
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == ours.encode(text) == Tokenizer(folder).encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert Tokenizer(folder).stop_ids == ours.stop_ids
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        with open(os.path.join(folder, name)) as a, open(os.path.join(TINY, name)) as b:
            assert a.read() == b.read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_written_as_they_were_sampled(dtype, tmp_path):
    """The masters rounded, not the masters; config.json names the type."""
    out = str(tmp_path / "out")
    name_of_it = str(dtype).removeprefix("torch.")
    train_here(f"--dtype={name_of_it}", "--steps=1", "--lr=1e-2", f"--out_dir={out}")
    found = load_file(os.path.join(out, "model", "model.safetensors"))
    masters = trained(TINY, out).tensors()
    assert {x.dtype for x in found.values()} == {dtype}
    assert len(found) == len(masters)
    for name, master in masters.items():
        assert torch.equal(found["model." + name], master.to(dtype))
    assert not all(torch.equal(m, m.to(dtype).float()) for m in masters.values())
    with open(os.path.join(out, "model", "config.json")) as f:
        assert json.load(f)["dtype"] == name_of_it
    hf = AutoModelForCausalLM.from_pretrained(os.path.join(out, "model"))
    assert hf.dtype == dtype


# generating from them

@pytest.fixture
def saved(finished, tmp_path):
    """A folder of a run, to be changed."""
    return copy_of(finished[0], tmp_path)


def ran_with(saved, **changes):
    """The run's settings are others than they were."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | changes))


def printed(capsys, *args):
    asked = ["--prompt=" + "The code for pin is 4817. " * 5, "--device=cpu", "--max_new_tokens=3"]
    command.main([*asked, *args])
    return capsys.readouterr().out.splitlines()


def prompt_length(*args):
    """Tokens of the prompt, as the last line says."""
    return int(printed(*args)[-1].split()[0][1:])


def test_generate_keeps_what_the_run_kept(saved, capsys):
    """Said in one line; what is asked for wins; a folder without a run has the usual defaults."""
    for name in ("model", "best"):
        lines = printed(capsys, f"--model={saved / name}")
        assert lines[0].startswith("[as in the run that saved it: --evict=snapkv --budget=24 ")
        assert "--window=16" in lines[0] and " 24 kept per layer" in lines[-1]
    lines = printed(capsys, f"--model={saved / 'model'}", "--budget=30", "--window=8")
    assert " 30 kept" in lines[-1] and "--budget" not in lines[0] and "--window" not in lines[0]
    shutil.move(saved / "model", saved.parent / "model")
    lines = printed(capsys, f"--model={saved.parent / 'model'}", "--budget=40", "--sinks=2")
    assert " 40 kept" in lines[-1] and not any("as in the run" in line for line in lines)


def test_generate_takes_the_runs_template(saved, capsys):
    (saved / "model" / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if not short %} code code{% endif %}")
    model = f"--model={saved / 'model'}"
    before = prompt_length(capsys, model)
    ran_with(saved, template='{"short": true}')
    assert prompt_length(capsys, model) == before - 2
    assert "--template" in printed(capsys, model)[0]


def test_generate_says_that_examples_are_missing(saved, capsys):
    ran_with(saved, shots=3)
    lines = printed(capsys, f"--model={saved / 'model'}")
    assert lines[0] == ("[the run that saved it had 3 solved examples in front of each prompt "
                        "(--shots=3), here are none]")
    assert lines[1].startswith("[as in the run") and "shots" not in lines[1]
    ran_with(saved, shots=0)  # the control
    assert printed(capsys, f"--model={saved / 'model'}") == lines[1:]
    ran_with(saved, shots="3")
    with pytest.raises(SystemExit, match="config.json: shots expects int, got str '3'"):
        printed(capsys, f"--model={saved / 'model'}")


def test_generate_takes_text_as_it_stands(saved, capsys):
    """If asked to, or if the run did: "\\nAnswer:" is left out."""
    def tokens(*args):
        return prompt_length(capsys, f"--model={saved / 'model'}", *args)

    whole, raw = tokens(), tokens("--raw_text=True")
    ran_with(saved, raw_text=True)
    assert tokens() == raw < whole == tokens("--raw_text=False")
    with pytest.raises(SystemExit, match="error: argument --raw_text: .*'maybe'"):
        tokens("--raw_text=maybe")


def test_generate_evicts_by_a_method_of_ones_own(saved, capsys, monkeypatch):
    """As the run that saved the model did, or as the command line says, which wins before anything
    is looked for. Control: without its module the method of the run is an error."""
    name = "own_method:newest"
    monkeypatch.chdir(saved)
    monkeypatch.setitem(EVICT, name, None)  # forgotten afterwards
    model = f"--model={saved / 'model'}"
    ran_with(saved, evict=name, budget="many")
    assert "(snapkv)" in printed(capsys, model, "--evict=snapkv", "--budget=24")[-1]
    ran_with(saved, evict=name, budget=24)
    with pytest.raises(SystemExit, match="^error: evict: cannot import own_method .*PYTHONPATH"):
        printed(capsys, model)
    (saved / "own_method.py").write_text(
        "import torch\n\ndef newest(q, k, e, elsewhere=None):\n"
        "    return torch.arange(len(k), dtype=torch.float32).expand(k.shape[1], -1)\n")
    lines = printed(capsys, model)
    assert f"--evict={name}" in lines[0] and f" 24 kept per layer and KV head ({name})" in lines[-1]
    ran_with(saved, evict="snapkv")
    assert printed(capsys, model, f"--evict={name}")[1:] == lines[1:]
    for wrong, says in (("own_method:oldest", "does not define 'oldest'"),
                        ("best", "choose from none, snapkv")):
        with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}"):
            printed(capsys, model, f"--evict={wrong}")


def test_generate_loads_what_was_saved_in_float16_as_that(tmp_path):
    """On a card; under either name. A CPU computes in float32, and bfloat16 is for all others."""
    for saved, want in ((dict(torch_dtype="float16"), torch.float16),
                        (dict(dtype="float16"), torch.float16),
                        (dict(torch_dtype="float32"), torch.bfloat16),
                        (dict(dtype="bfloat16"), torch.bfloat16), ({}, torch.bfloat16)):
        (tmp_path / "config.json").write_text(json.dumps(saved))
        assert command.dtype_of("cuda:0", tmp_path) == want
        assert command.dtype_of("cpu", tmp_path) == torch.float32


@pytest.mark.parametrize("change, says", [
    (dict(budget="many"), "budget expects int, got str 'many'"),
    (dict(evict="best"), "evict must be one of none, snapkv"),
    (dict(budget=5), "budget 5 must be above")])
def test_generate_refuses_a_run_of_other_settings(saved, change, says):
    ran_with(saved, **change)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}"):
        command.main(["--prompt=x", f"--model={saved / 'model'}", "--device=cpu"])
