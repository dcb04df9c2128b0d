"""data/files.py and data.tasks.Problems: held-out files, GSM8K's folder, chats, examples, raw text,
and what each refuses."""
import json
import shutil
from types import SimpleNamespace

import pytest

import train
from conftest import TINY, read_log, train_here
from data.files import check_files, files_of, key, read_problems
from data.tasks import Problems, prompt_encoder, reward
from data.tokenizer import Tokenizer

CHAT = ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}")


def refused(says):
    return pytest.raises(ValueError, match=says)


def ends(says):
    return pytest.raises(SystemExit, match=says)


def user(text):
    return dict(role="user", content=text)


def says(text):
    return dict(role="assistant", content=text)


SYSTEM = dict(role="system", content="Be brief.")


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def sums(first, last):
    """Rows in the form of GSM8K."""
    return [dict(question=f"{i} + 1?", answer=f"{i}+1={i + 1}\n#### {i + 1}")
            for i in range(first, last)]


@pytest.fixture(scope="module")
def plain():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The embedded tokenizer with a chat template; .path: its folder."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    tok = Tokenizer(str(folder))
    tok.path = str(folder)
    return tok


def made(task, tok, **how):
    return Problems(str(task), tok, **{**dict(seed=0, tokens=400, n_eval=99), **how})


def prompt(problems, split="eval", i=0):
    return problems.get(split, [i])[1][0]


def texts(problems, split):
    return [p.text for p in problems.file[split]]


# lines

def test_the_row_of_a_line(tmp_path):
    """The whole object, in Python's own numbers; the gold answer as it is written."""
    line = ('{"prompt": "x", "answer": 0.10, "n": 3, "f": 2.50, "e": 1e3, "big": '
            + "1" * 5000 + ', "deep": {"a": [1, null, true, "s"]}}')
    p, = read_problems(write(tmp_path / "a.jsonl", [line]))
    assert p.answer == "0.10" and p.row["answer"] == 0.1
    assert p.row["deep"] == {"a": [1, None, True, "s"]} and p.row["big"] == (10**5000 - 1) // 9
    kinds = {name: type(p.row[name]) for name in ("answer", "n", "f", "e", "big")}
    assert kinds == dict(answer=float, n=int, f=float, e=float, big=int)
    assert json.loads(line[:line.index(', "big"')] + "}") == {
        name: p.row[name] for name in ("prompt", "answer", "n", "f", "e")}
    assert p.where == f"{tmp_path}/a.jsonl:1"
    rows = [dict(prompt=None, question="b", answer=1),
            dict(question=None, prompt="c", answer=1)]
    assert [p.text for p in read_problems(write(tmp_path / "b.jsonl", rows))] == ["b", "c"]


def test_a_chat_is_a_problem(tmp_path, chat):
    rows = [dict(messages=[SYSTEM, user("2 + 3?"), says("5"), user("And 1 more?")], answer="6")]
    p, = read_problems(write(tmp_path / "a.jsonl", rows))
    assert p.text == "And 1 more?" and p.messages == rows[0]["messages"] == p.prompt
    assert chat.decode(prompt_encoder(chat)(p.prompt)) == (
        "[system] Be brief.\n[user] 2 + 3?\n[assistant] 5\n[user] And 1 more?\n[assistant] ")
    # control: the same question alone is another prompt and another problem
    other, = read_problems(write(tmp_path / "b.jsonl", [dict(prompt=p.text, answer="6")]))
    assert prompt_encoder(chat)(other.prompt) != prompt_encoder(chat)(p.prompt)
    assert key(other) != key(p)
    one, = read_problems(write(tmp_path / "c.jsonl", [dict(messages=[user(p.text)], answer="6")]))
    assert key(other) == key(one)
    assert prompt_encoder(chat)(other.prompt) == prompt_encoder(chat)(one.prompt)


def call(city):
    """An assistant's message that calls a tool."""
    function = dict(name="weather", arguments=dict(city=city, days=1.5))
    return dict(role="assistant", content=None, tool_calls=[dict(type="function",
                                                                 function=function)])


def test_what_messages_may_hold(tmp_path, plain):
    """Fields for the template, an empty system message, tools; the same words with other fields are
    another problem. As "prompt" a list is the same chat."""
    tools = [user("Rain?"), call("Bern"), dict(role="tool", content="")]
    chats = [[dict(role="system", content=""), user("a")], [user("a")],
             [dict(user("a"), name="Bob")],
             [user("a"), dict(says("b"), reasoning_content="c"), user("a")], tools,
             [tools[0], call("Rome"), *tools[2:]],
             [user("a"), dict(says("b"), refusal=None), user("a")]]
    rows = [dict(messages=messages, answer=1) for messages in chats]
    problems = read_problems(write(tmp_path / "a.jsonl", rows))
    assert [p.messages for p in problems] == chats and problems[0].text == "a"
    days = problems[4].messages[1]["tool_calls"][0]["function"]["arguments"]["days"]
    assert type(days) is float  # and no Decimal, which tojson cannot write
    as_prompts = [dict(prompt=messages, answer=1) for messages in chats]
    assert list(map(key, read_problems(write(tmp_path / "b.jsonl", as_prompts)))) == list(
        map(key, problems))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    tok = Tokenizer(TINY, template_file=str(tmp_path / "t.jinja"))
    assert tok.decode(prompt_encoder(tok)(chats[2])) == (
        '{"role": "user", "content": "a", "name": "Bob"}')
    assert '"city": "Bern", "days": 1.5' in tok.decode(prompt_encoder(tok)(tools))


def test_several_answers_are_refused_with_what_to_do(tmp_path):
    path = write(tmp_path / "a.jsonl", [dict(prompt="a", answer=["1", "2"])])
    with refused(r'"answer", text or a number \(for several, bring a rew'):
        read_problems(path)
    rule = lambda row, text, tokens: float(text in row["answer"])  # noqa: E731
    p, = read_problems(path, rule=rule)
    assert p.row["answer"] == ["1", "2"]


@pytest.mark.parametrize("messages, say", [
    ("hi", "'hi', must be a list"), ([], "a list, must be a list of"), (["hi"], "message 1"),
    ([dict(content="a")], "message 1 that is no"),
    ([dict(role="user")], "content null in message 1, must be non-empty"),
    ([dict(user("a"), weight=1)], "the 'weight' 1 in message 1, must be absent: a message has rol"),
    ([dict(user("a"), name=1)], "the 'name' 1 in message 1, must be text"),
    ([user("a"), dict(says("b"), tool_calls="c"), user("d")], "tool_calls' 'c' in message 2, must"),
    ([user("a"), says(""), user("b")], "content '' in message 2"),
    ([dict(role="judge", content="a")], "role 'judge' in message 1"),
    ([user("a"), SYSTEM, user("b")], "role 'system' in message 2"),
    ([user(["a"])], "'content' a list in message 1, must be text"),
    ([user(" ")], "content ' ' in message 1"),
    ([user("a"), says("b")], "do not end with the user's")])
def test_a_chat_that_is_none_is_refused(messages, say, tmp_path):
    good = dict(messages=[user("a")], answer="1")
    path = write(tmp_path / "a.jsonl", [good, dict(messages=messages, answer="1")])
    with refused(rf"a\.jsonl:2 has .*{say}"):
        read_problems(path)
    for more in (dict(prompt="a"), dict(question=[user("a")])):
        with refused("has both .* and .*: which one counts"):
            read_problems(write(tmp_path / "a.jsonl", [dict(good, **more)]))
    prompt = dict(prompt=messages, answer="1")  # text is a prompt
    if messages != "hi":
        with refused("has .*" + say):
            read_problems(write(tmp_path / "a.jsonl", [prompt]))


def test_a_chat_needs_a_template(tmp_path, plain, chat):
    rows = [dict(prompt=f"Say {i}.", answer=i) for i in range(11)]
    path = write(tmp_path / "a.jsonl",
                 [*rows, dict(messages=[user("Hi?")], answer="1")])
    with refused(r'a.jsonl:12 has "messages", but this checkpoint has no chat '
                 "template: give one with --template_file=FILE$"):
        made(path, plain)
    with refused(r'a.jsonl:12 has "messages", but raw_text=True'):
        made(path, chat, raw_text=True)
    made(path, chat)
    made(write(tmp_path / "a.jsonl", rows), chat, raw_text=True)


def test_what_the_template_refuses_is_named_by_its_line(tmp_path, chat):
    chat = Tokenizer(chat.path)

    def render(variables):
        if variables["messages"][0]["content"].startswith("13 "):
            raise ValueError("chat template: unlucky")
        return "x"

    chat.template.render = render
    made(write(tmp_path / "a.jsonl", sums(0, 13)), chat)
    with refused(r"^[^ ]*a\.jsonl:14: .*chat template: unlucky"):
        made(write(tmp_path / "a.jsonl", sums(0, 20)), chat)


# which problems

def test_held_out_problems_of_their_own(tmp_path, plain):
    """Nothing of the task is held out then, and what is in both files is not trained on."""
    task = write(tmp_path / "a.jsonl", sums(0, 30))
    other = write(tmp_path / "b.jsonl",
                  [*sums(100, 105), dict(question=" 7  +  1?", answer=8)])
    both = made(task, plain, eval_task=other)
    assert len(both.file["eval"]) == 6 == both.n_eval and len(both.file["train"]) == 29
    assert "7 + 1?" not in texts(both, "train") and "0 + 1?" in texts(both, "train")
    sizes = sorted(len(both.encode(p.text)) for pool in both.file.values()
                   for p in pool)
    assert both.notes == [
        f"{task}: 1 of 30 problems are also in {other} and are not trained on",
        f"{task}: 29 problems to train on; {other}: 6 held out, 99 wanted; median prompt "
        f"{sizes[17]} tokens, longest {sizes[34]}"]
    assert both.longest == sizes[34]
    alone = made(task, plain)  # control
    assert len(alone.file["eval"]) == 3
    assert "7 + 1?" in texts(alone, "train") + texts(alone, "eval")
    with refused("a.jsonl: no problem is left to train on"):
        made(task, plain, eval_task=task)
    with pytest.raises(FileNotFoundError, match="c.jsonl: no such file"):
        made(task, plain, eval_task=str(tmp_path / "c.jsonl"))


def difficulty(problems):
    """The mean of the numbers that problems ask about."""
    return sum(int(p.text.split()[0]) for p in problems) / len(problems)


def test_what_is_held_out_is_drawn_from_the_whole_file(tmp_path, plain):
    """Of a sorted or periodic file too, and the first of them are no other kind than the rest; so
    of a file of its own. The order of the lines does not matter."""
    rows = sums(0, 200)
    task = made(write(tmp_path / "a.jsonl", rows), plain, n_eval=15)
    held = task.file["eval"]
    assert len(held) == 20 and task.n_eval == 15
    assert not {*texts(task, "train")} & {*texts(task, "eval")}
    assert 70 < difficulty(held) < 130
    assert 70 < difficulty(task.get("eval", range(15))[0]) < 130
    assert 6 < sum(int(p.text.split()[0]) % 2 for p in held) < 14
    turned = made(write(tmp_path / "b.jsonl", rows[::-1]), plain)
    assert texts(turned, "eval") == texts(task, "eval")
    own = made(write(tmp_path / "c.jsonl", sums(400, 420)), plain, n_eval=15,
               eval_task=write(tmp_path / "a.jsonl", rows))
    assert 70 < difficulty(own.get("eval", range(15))[0]) < 130
    # one more problem: at most one changes sides
    more = made(write(tmp_path / "d.jsonl", sums(0, 201)), plain)
    assert len({*texts(more, "eval")} ^ {*texts(task, "eval")}) <= 2
    # control: every tenth line of a periodic file, and the first lines of a sorted one
    problems = read_problems(write(tmp_path / "a.jsonl", rows))
    assert {int(p.text.split()[0]) % 2 for p in problems[::10]} == {0}
    assert difficulty(problems[::10][:10]) < 50


def test_later_held_out_problems_are_others(tmp_path, plain):
    """eval_first counts in the same order."""
    path = write(tmp_path / "a.jsonl", sums(0, 200))
    first, later = (made(path, plain, n_eval=10, eval_first=i) for i in (0, 10))
    got = [[p.text for p in x.get("eval", range(10))[0]] for x in (first, later)]
    assert got[0] + got[1] == texts(first, "eval")[:20] and not {*got[0]} & {*got[1]}


def test_the_folder_of_gsm8k(tmp_path, plain, monkeypatch):
    write(tmp_path / "train.jsonl", sums(0, 20))
    with pytest.raises(FileNotFoundError, match="test.jsonl: no such file"):
        made(f"gsm8k:{tmp_path}", plain)
    write(tmp_path / "test.jsonl", sums(50, 55))
    found = made(f"gsm8k:{tmp_path}", plain)
    assert len(found.file["train"]) == 20
    assert sorted(texts(found, "eval")) == [f"{i} + 1?" for i in range(50, 55)]
    p, = (p for p in found.get("eval", range(5))[0] if p.text == "50 + 1?")
    assert (p.answer, reward(p, "So 51."), reward(p, "52")) == ("51", 1, 0)
    other = write(tmp_path / "o.jsonl", sums(70, 73))
    assert sorted(texts(made(f"gsm8k:{tmp_path}", plain, eval_task=other), "eval")) == [
        "70 + 1?", "71 + 1?", "72 + 1?"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files_of("gsm8k:~") == {
        "task": [f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"]}
    assert files_of("gsm8k:x", "y.jsonl") == {"task": ["x/train.jsonl"],
                                              "eval_task": ["y.jsonl"]}
    assert files_of("a.jsonl") == {"task": ["a.jsonl"]} and files_of("kv4") == {}


def test_too_long_problems_of_both_files(tmp_path, plain, chat):
    """Counted together, with the examples in front of them."""
    rows = sums(0, 20)
    rows[0]["question"] = "word " * 80
    task, other = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", sums(50, 60))
    with refused("1 of 30 prompts are longer than prompt_tokens=50"):
        made(task, plain, eval_task=other, tokens=50)
    left = made(task, plain, eval_task=other, tokens=50, skip_long=True)
    assert len(left.file["train"]) == 19 and len(left.file["eval"]) == 10
    with refused("29 of 29 .*longest has .*too few are left"):
        made(task, plain, eval_task=other, tokens=50, skip_long=True, shots=1)
    assert len(made(task, plain, eval_task=other, tokens=200, shots=1).file["train"]) == 19
    long = write(tmp_path / "c.jsonl", [dict(messages=[user("word " * 80), says("a"), user("b")],
                                             answer=1), *rows[1:]])
    with refused("1 of 30 prompts are longer"):
        made(long, chat, eval_task=other, tokens=50)
    assert len(made(long, chat, eval_task=other, tokens=50, skip_long=True).file["train"]) == 19


# examples and raw text

def worked(p):
    """A problem of `sums` and its answer, as turns of CHAT."""
    return f"[user] {p.text}\n[assistant] {p.worked}\n"


def test_examples_come_first(tmp_path, plain, chat):
    """With all of their answers, and are not trained on."""
    talk = dict(messages=[SYSTEM, user("2?"), says("2"), user("3?")], answer=3)
    rows = [*sums(0, 12), talk]
    task = write(tmp_path / "a.jsonl", rows)
    none = made(task, chat)  # control
    one, two, *rest = none.file["train"]
    asked = none.get("eval", [0])[0][0].text
    assert chat.decode(prompt(none)) == f"[user] {asked}\n[assistant] "
    shots = made(task, chat, shots=2)
    head = worked(one) + worked(two)
    assert chat.decode(prompt(shots)) == f"{head}[user] {asked}\n[assistant] "
    assert texts(shots, "train") == [p.text for p in rest] and len(rest) == 9
    assert shots.notes[-1] == f"shots=2: in front of each problem {one.where}, {two.where}"
    # behind the system's message
    assert chat.decode(shots.encode(talk["messages"])) == (
        f"[system] Be brief.\n{head}[user] 2?\n[assistant] 2\n[user] 3?\n[assistant] ")
    # a chat as an example: all its turns
    other = write(tmp_path / "o.jsonl", sums(20, 22))
    turned = made(write(tmp_path / "b.jsonl", [talk, *rows[:-1]]), chat,
                  shots=1, eval_task=other)
    asked = turned.get("eval", [0])[0][0].text
    assert chat.decode(prompt(turned)) == (
        f"[user] 2?\n[assistant] 2\n[user] 3?\n[assistant] 3\n[user] {asked}\n[assistant] ")
    # without a template
    text = made(write(tmp_path / "c.jsonl", rows[:-1]), plain, shots=1, eval_task=other)
    assert plain.decode(prompt(text)) == f"0 + 1?\nAnswer: 0+1=1\n#### 1\n\n{asked}\nAnswer:"


def test_examples_that_cannot_be(tmp_path, plain):
    task = write(tmp_path / "a.jsonl", sums(0, 20))
    with refused("no problem is left to train on"):
        made(task, plain, shots=18)
    rows = [dict(prompt=f"{i}?") for i in range(20)]
    rule = lambda row, text, tokens: dict(reward=1.0)  # noqa: E731
    path = write(tmp_path / "b.jsonl", rows)
    with refused(r'b.jsonl:\d is an example \(shots=1\) and needs an "ans'):
        made(path, plain, shots=1, rule=rule)
    assert len(made(path, plain, rule=rule).file["train"]) == 18
    rows = [dict(prompt="a", answer=None), dict(prompt="b", answer=[1, "x"]),
            dict(prompt="c")]
    assert [p.answer for p in read_problems(write(tmp_path / "c.jsonl", rows), rule=rule)] == [
        "", '[1, "x"]', ""]
    with refused("b.jsonl:1 needs"):  # control: a rule needs answers
        made(path, plain)


def test_an_example_that_earns_nothing_is_said(tmp_path, plain):
    """By the rule in force; one that earns, and a function of one's own, are the controls."""
    task = write(tmp_path / "a.jsonl", sums(0, 12))
    city = dict(question="The city?", answer="It is #### Rome")
    words, other = tmp_path / "b.jsonl", write(tmp_path / "o.jsonl", sums(20, 22))
    words = write(words, [*sums(0, 1), city, *sums(2, 12)])

    def said(path, **how):
        notes = made(path, plain, eval_task=other, **how).notes
        return [note for note in notes if note.startswith("shots: ")]

    assert said(task, shots=2, rule="boxed") == [
        f"shots: the answer of {task}:{n}, whose form the model will copy, earns 0 by reward=boxed"
        for n in (1, 2)]
    assert said(words, shots=2) == [
        f"shots: the answer of {words}:2, whose form the model will copy, earns 0 by reward=auto"]
    for how in (dict(shots=2), dict(shots=2, rule="number"), dict(rule="boxed"),
                dict(shots=2, rule=lambda row, text, tokens: 0)):
        assert said(task, **how) == []


def test_raw_text_is_verbatim(tmp_path, plain, chat):
    asked = "[user] <think>  2?\n"
    task = write(tmp_path / "a.jsonl", sums(0, 12))
    other = write(tmp_path / "b.jsonl", [dict(question=asked, answer=1)])
    for tok in (chat, plain):
        raw = made(task, tok, raw_text=True, eval_task=other)
        assert prompt(raw) == [*tok.bos_ids, *tok.encode(asked)]
        assert not raw.thinks
        shots = made(task, tok, raw_text=True, shots=1, eval_task=other)
        assert tok.decode(prompt(shots)) == f"0 + 1? 0+1=1\n#### 1\n\n{asked}"
        assert prompt(made(task, tok, eval_task=other)) != prompt(raw)  # control
    chat.bos_ids = (5,)
    assert prompt(made(task, chat, raw_text=True))[0] == 5
    chat.bos_ids = ()
    with refused("template 'x': raw_text=True uses no chat template"):
        made(task, chat, raw_text=True, template=dict(x=1))


def test_prompts_that_are_templated_already(tmp_path, plain, chat):
    """They are counted, and what to do is said: then their control tokens are such, and their BOS
    and their thought are seen."""
    end, = plain.added
    rows = sums(0, 30)
    rows[3]["question"] = f"[user] 3?{end}[assistant] "
    chats = [*rows, dict(messages=[user(f"4{end}?"), says("5"), user("6?")], answer=1)]
    task, talks = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", chats)
    advice = "stay text; if a chat template has written them, add --raw_text=True --control_tokens"
    for path, tok, how, found in ((task, plain, {}, "1 of 30"),
                                  (task, chat, {}, "1 of 30"),
                                  (task, chat, dict(raw_text=True), "1 of 30"),
                                  (talks, chat, {}, "2 of 31")):
        note, = (note for note in made(path, tok, **how).notes
                 if "spell control" in note)
        assert note.startswith(f"{path}: {found} prompts spell control tokens ({end}), which ")
        assert advice in note
    how = dict(raw_text=True, control_tokens=True, tokens=99)
    meant = made(task, plain, **how)
    assert not any("spell control" in note for note in meant.notes)
    stop, = plain.stop_ids
    asked = rows[3]["question"]
    assert meant.encode(asked).count(stop) == 1
    assert stop not in made(task, plain, raw_text=True).encode(asked)  # control
    # one BOS, whoever puts it there
    plain.bos_ids = (stop,)
    meant = made(task, plain, **how)
    assert meant.encode(f"{end}7?") == meant.encode("7?") == [stop, *plain.encode("7?")]
    assert made(task, plain, raw_text=True).encode(f"{end}7?") == [stop, *plain.encode(f"{end}7?")]
    plain.bos_ids = ()
    other = write(tmp_path / "c.jsonl", [dict(prompt="7?<think>\n", answer=7)])
    for control in (True, False):
        how = dict(raw_text=True, control_tokens=control, eval_task=other)
        (p,), _ = made(task, plain, **how).get("eval", [0])
        assert p.thinks == control and reward(p, "So 7.") == (not control)
    with refused("control_tokens=True needs raw_text=True"):
        made(task, chat, control_tokens=True)


def test_settings_that_do_not_go_together():
    good = dict(task="a.jsonl", eval_task="b.jsonl", shots=2, skip_long=True)
    check_files(SimpleNamespace(**good))
    check_files(SimpleNamespace(**dict(good, task="gsm8k:x")))
    for changes, say in ((dict(eval_task="b"), "eval_task 'b' must be a .jsonl file"),
                         (dict(task="kv4"), "eval_task=b.jsonl needs a task that is a file"),
                         (dict(task="kv4", eval_task=""), "shots=2 needs a task that is a file"),
                         (dict(task="kv4", eval_task="", shots=0),
                          "skip_long=True needs a task that is a file, got task=kv4, which is"),
                         (dict(eval_task="gsm8k:x"), "must be a .jsonl file")):
        with refused(say):
            check_files(SimpleNamespace(**{**good, **changes}))
    check_files(SimpleNamespace(task="kv4", eval_task="", shots=0, skip_long=False))
    with refused("shots must be between 0 and 1000, got -1"):
        train.settings(["--shots=-1"])


# runs

@pytest.mark.parametrize("held_out, args", [
    ("test", ["--task=gsm8k:{}"]), ("own", ["--task={}/train.jsonl", "--eval_task={}/own.jsonl"])])
def test_files_are_part_of_a_run(tmp_path, held_out, args):
    """Held-out files and both of GSM8K are: changed, refused; moved, not."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", sums(0, 12))
        write(tmp_path / name / "test.jsonl", sums(20, 24))
        write(tmp_path / name / "own.jsonl", sums(30, 34))

    def go(folder, *more):
        named = [arg.format(tmp_path / folder) for arg in args]
        train_here(*named, "--steps=1", "--eval_every=9", f"--out_dir={tmp_path / 'out'}", *more)

    go("a")
    file = tmp_path / "b" / f"{held_out}.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace("31", "32").replace("21", "22"))
    setting = args[-1].split("=")[0].removeprefix("--")
    with ends(f"resume: {setting} .* has other contents now"):
        go("b", "--resume=True")
    file.write_text(whole)
    go("b", "--resume=True")
    assert read_log(tmp_path / "out")[0][0]["problems"] == 4
    with ends("eval_task .* is where this run would save its own"):
        train_here(f"--task={tmp_path}/a/train.jsonl", f"--eval_task={tmp_path}/out/log.jsonl",
                   "--overwrite=True", f"--out_dir={tmp_path}/out")
