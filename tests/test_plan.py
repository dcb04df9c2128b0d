"""experiments/plan.py: which rate is chosen, what is run; forced.py: what is missing."""
import json

import pytest
import torch

from experiments import ablate, forced, plan

RATES = {3e-5: (1.0, 0.5, 0.5), 1e-4: (1.2, 0.2, 1.0), 3e-4: (1.1, 0.6, 0.5)}


def test_the_rate_with_the_largest_sum_is_chosen():
    assert plan.choose(RATES) == 1e-4
    assert plan.choose({**RATES, 3e-4: (1.3, 0.6, 0.7)}) == 3e-4  # control


@pytest.mark.parametrize("best, more", [(1e-4, "3e-5"), (6e-4, "0.001"), (3e-4, None)])
def test_a_choice_at_the_end_gets_one_rate_more(best, more, monkeypatch):
    """And only one: what lies beyond is not asked for until that one is there."""
    rates = {lr: (float(lr == best), 0, 0) for lr in plan.GRID[2:5]}
    monkeypatch.setattr(plan, "tuned", lambda: {"mis": rates})
    asked = [arm for arm in plan.tune_arms()[1][0] if "config/mis.py" in arm]
    wanted = [f"config/mis.py --lr={x}" for x in ("0.0001", "0.0003", "0.0006", more) if x]
    assert [arm.replace("3e-05", "3e-5") for arm in asked] == wanted


def rates_of_pilots(monkeypatch, found):
    """Let `tuned` find these rates in list-pilot, and in tune what is there."""
    there = plan.tuned()
    monkeypatch.setattr(plan, "tuned", lambda part="tune": {"tune": there}.get(part, found))
    monkeypatch.setattr(plan, "budgets", lambda: dict(mild=512, middle=384, strong=256))


def test_every_part_is_a_request_that_ablate_takes(monkeypatch):
    """At the rates of results/tune; every comparison that is named has its arms."""
    rates, seen = plan.rate(), 0
    rates_of_pilots(monkeypatch, {name: {2e-5: (1,), 4e-5: (2,)} for name in plan.MAIN})
    assert set(rates) == {*plan.MAIN, *plan.OTHERS}
    for todo in plan.parts(["data/tiny"]).values():
        for arms, options in todo:
            own, texts, common = ablate.parse([*arms, *plan.LONG, *options, "--out=x"])
            found, _ = ablate.request(texts, common, range(own.seeds))
            seen += len(found) * own.seeds
            if own.compare:
                named = dict(compare=own.compare, begun=0)
                ablate.comparisons(named, found)
                with pytest.raises(ValueError, match="compare: no arm"):  # control
                    ablate.comparisons(dict(named, compare="smd/other/dense"), found)
    assert seen > 180


def test_a_real_model_has_its_rates_before_its_runs(monkeypatch):
    """Each arm its better one, and no part of `list` while one of both is missing."""
    found = {name: {2e-5: (2 - (name == "smd"),), 4e-5: (1.5,)} for name in plan.MAIN}
    rates_of_pilots(monkeypatch, found)
    parts = plan.parts()
    (arms, options), = parts["list/middle"]
    assert arms == [f"config/smollm2.py+config/{name}.py --lr={4 if name == 'smd' else 2}e-5"
                    for name in plan.MAIN]
    assert "--seeds=5" in options and "--budget=384" in options
    (arms, pilot), = parts["list-pilot"]
    assert len(arms) == 10 and {"--first=100", "--eval_first=10000", "--seeds=1"} < {*pilot}
    assert not {"--first=100", "--eval_first=10000"} & {*options}
    assert [part for part in parts if part.startswith("list/")] == [
        "list/middle", "list/mild", "list/strong"]
    for lacks in (dict(found, tis={2e-5: (1,)}), {**found, "tis": {}}, {}):
        rates_of_pilots(monkeypatch, {name: its for name, its in lacks.items() if its})
        assert {"list-pilot", "list-budgets", "gsm8k/harm", "gsm8k/short"} == {
            part for part in plan.parts() if part.startswith(("list", "gsm8k"))}


@pytest.mark.parametrize("ends, chosen", [
    ((0.7, 0.4, 0.1), (384, 256, 192)), ((0.7, 0.4, 0.3), (256, 192, 128)),
    ((0.2, 0.1, 0.0), (640, 512, 384)), ((0.3, 0.2, 0.1), (512, 384, 256)), ((0.7, 0.4), ())])
def test_the_smallest_budget_that_smd_learns_under_is_the_middle(
        ends, chosen, tmp_path, monkeypatch):
    runs = {f"smd lr=4e-5 budget={keys}": dict(logs=[end])
            for keys, end in zip((384, 256, 192), ends)}
    monkeypatch.setattr(plan, "KEEP", str(tmp_path))
    assert plan.budgets() == {}  # no such runs yet
    (tmp_path / "list-budgets").mkdir()
    (tmp_path / "list-budgets/settings.json").write_text("{}")
    monkeypatch.setattr(plan, "load", lambda kept: {"naive lr=4e-5 budget=384": {}, **runs})
    monkeypatch.setattr(plan, "results", lambda run, key: {100: run["logs"][0]})
    assert tuple(plan.budgets().values()) == chosen


def test_a_name_stands_for_its_parts_and_options_go_to_each(monkeypatch):
    ran = []
    monkeypatch.setattr(plan, "run", lambda part, settings, todo: ran.append(
        (part, [options[-2:] for _, options in todo])) or 0)
    with pytest.raises(SystemExit, match="0|False"):
        plan.main(["tasks", "gsm8k", "--jobs=3", "--model=m"])
    more = ["--jobs=3", "--model=m"]
    assert ran == [(part, [more]) for part in
                   ("tasks/kv", "tasks/kv16", "gsm8k/harm", "gsm8k/short")]
    with pytest.raises(SystemExit, match="no part 'task', only main, "):
        plan.main(["task"])


def test_tuning_and_judging_share_no_problem():
    first = int(dict(x[2:].split("=") for x in plan.TUNE)["eval_first"])
    asked = int(dict(x[2:].split("=") for x in plan.LONG)["eval_final"])
    assert first >= asked and "--first=100" in plan.TUNE and "--eval_first" not in str(plan.LONG)


def test_what_a_model_lacks(tmp_path, monkeypatch, capsys):
    """The embedded checkpoint finds codes with all keys and does not know the order; a head that
    kept a code is counted."""
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["forced", "data/tiny", "--n=24", "--device=cpu",
                                     f"--out={out}"])
    forced.main()
    (kinds, carried), = json.loads(out.read_text()).values()
    dense, compressed = kinds["dense"], kinds["compressed"]
    assert dense["codes"] > 0.9 > 0.75 > dense["order"] > 0.4 and dense["form"] > 0.99
    assert compressed["codes"] < 0.8 and compressed["end"] < 0.6
    assert sum(n for n, _ in carried["dense"].values()) == 96
    assert "order 0." in capsys.readouterr().out

    class Tok:
        ids = {" a": [5], " b": [6], " is": [7]}

        def encode(self, text):
            return self.ids[text]

    prompt = [5, 1, 6, 7, 0, 8, 9, 2, 5]                       # "b is 89"
    kept = torch.tensor([[[0, 5, 6], [1, 5, 7]], [[4, 5, 6], [2, 6, 8]]])
    assert forced.heads_with_code(kept, prompt, Tok(), "b") == 2
    with pytest.raises(ValueError):  # control: "a" is no fact of this prompt
        forced.heads_with_code(kept, prompt, Tok(), "a")
