"""
data/tokenizer.py against the tokenizers library: tokenizers of every supported kind, trained
here from nothing, must give the same ids on 3,000 generated strings. With SMD_REAL_WEIGHTS=folder
holding smollm2/ and qwen/, the real ones too.
"""
import functools
import json
import os
import random
import subprocess
import sys
import unicodedata

import pytest

from data import tokenizer as tokenizer_py
from data.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REAL = os.environ.get("SMD_REAL_WEIGHTS")
needs_real = pytest.mark.skipif(not REAL, reason="SMD_REAL_WEIGHTS names no folder")

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
TEMPLATE = ("{% for m in messages %}{% if m['role'] == 'judge' %}"
            "{{ raise_exception('no role ' + m['role']) }}{% endif %}\n"
            "{% if loop.first and m['role'] != 'system' %}"
            "{{ bos_token + '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}\n"
            "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
TALK = [{"role": "user", "content": "What is 17 + 4?"},
        {"role": "assistant", "content": "21, I'd say.\n"},
        {"role": "user", "content": "Sûr? \U0001F642"}]
# SmolLM2's ids of the one message "Hi 42"; the system prompt in them is the template's own
GOLDEN = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
          407, 19712, 8182, 2, 198, 1, 4093, 198, 26843, 216, 36, 34, 2, 198, 1, 520, 9531, 198]
KINDS = ("llama3", "gpt2", "digits", "qwen")


def by_transformers(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def rendered(hf, talk, **kw):
    return hf.apply_chat_template(talk, return_dict=True, **kw)["input_ids"]


def pieces_of(kind):
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre
    byte = functools.partial(pre.ByteLevel, add_prefix_space=False)
    if kind == "gpt2":
        return byte(use_regex=True)
    if kind == "digits":
        return pre.Sequence([pre.Digits(individual_digits=True), byte(use_regex=True)])
    pattern = {"llama3": LLAMA3, "qwen": QWEN}[kind]
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), byte(use_regex=False)])


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return f.read()


def train(folder, kind, size=900):
    """Write a byte-level BPE of that kind, a config and a chat template into `folder`, as a
    checkpoint would have them."""
    from tokenizers import Tokenizer as T
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    t = T(models.BPE(ignore_merges=kind == "llama3"))
    t.pre_tokenizer, t.decoder = pieces_of(kind), decoders.ByteLevel()
    if kind == "qwen":
        t.normalizer = normalizers.NFC()
    # SmolLM2's vocabulary has its special tokens in front and lacks the bytes that were never
    # seen; the others have all bytes
    front = kind in ("digits", "gpt2")
    alphabet = [] if kind == "digits" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet,
                                  special_tokens=SPECIALS[:3] if front else [])
    here = [read(ROOT, "model.py"), read(ROOT, "data", "tokenizer.py")]
    t.train_from_iterator(here + strings(400, seed=5, controls=False), trainer)
    t.add_special_tokens(SPECIALS[:3])
    t.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    os.makedirs(folder, exist_ok=True)
    t.save(os.path.join(folder, "tokenizer.json"))
    end, turn = t.token_to_id("<|endoftext|>"), t.token_to_id("<|im_end|>")
    write(folder, "config.json", {"model_type": "llama", "eos_token_id": end})
    write(folder, "generation_config.json", {"eos_token_id": [end, turn]})
    write(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>", "chat_template": TEMPLATE,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}})
    return folder


def write(folder, name, content):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, ensure_ascii=False)


def edited(folder, tmp_path, name="tokenizer.json", edit=None, **keys):
    """A copy of the folder with one JSON file changed by `edit(dict)` or by top-level keys."""
    os.makedirs(tmp_path, exist_ok=True)
    for f in os.listdir(folder):
        content = json.loads(read(folder, f))
        if f == name:
            content |= keys
            if edit:
                edit(content)
        write(tmp_path, f, content)
    return str(tmp_path)


WORDS = ("the key has died at don't I'LL WE'VE it's 'tis o'clock naïve Straße ΣΑΣ Привет שלום "
         "مرحبا").split()
CODE = ["def f(x):\n\treturn x**2  # ok\n", "a[i] += b[-1];", "{\"k\": [1, 2.50]}",
        "</div>\r\n\r\n", "https://x.org/a?b=c&d=%20", "--x=1e-4"]
EMOJI = ["🙂", "👩‍👩‍👧", "🇫🇷", "👍🏽", "❤️", "\U0001F9FF"]
COMPOSED = ["ﬁ", "Å", "é", "e\u0301", "A\u030a", "\u1100\u1161", "\u212b", "각", "ẛ̣"]
CONTROLS = [chr(c) for c in [*range(32), 127, 0xAD, 0x200B, 0xFEFF, 0x10FFFF, 0x40001]]


def strings(n, seed=0, controls=True, specials=()):
    """n strings mixing code, words, numbers, emoji, CJK, combining marks, white space, control
    bytes and special tokens."""
    rng = random.Random(seed)

    def pick(chars, most):
        return "".join(rng.choice(chars) for _ in range(rng.randint(1, most)))

    def marked():
        letter = rng.choice("aeoAnkqक가A1!<")
        return letter + pick("\u0301\u0308\u0327\u0323\u0303\u0345\u093c", 2)

    def anything():
        planes = [(0x20, 0xD800), (0x10000, 0x20000)]
        chars = [chr(rng.randrange(*rng.choice(planes))) for _ in range(99)]
        # an unassigned one may be a letter in newer tables
        return pick([c for c in chars if unicodedata.category(c) != "Cn"], 2)

    makers = [
        lambda: rng.choice(WORDS),
        lambda: rng.choice(CODE),
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 12))),
        lambda: pick("٣४²½Ⅷ一7", 3),
        lambda: rng.choice(EMOJI),
        lambda: pick("漢字仮名かなカナ한국어中文，。「」", 6),
        marked,
        lambda: pick(COMPOSED, 3),
        lambda: pick(" \t\n\r\u00a0\u3000\u2028\x0b\x0c\x85", 6),
        lambda: " " * rng.randint(1, 20),
        lambda: pick("!?.,;:()[]<>|/\\'\"`~@#$%^&*-_=+", 6),
        anything,
    ]
    if controls:
        makers.append(lambda: pick(CONTROLS, 2))
    if specials:
        makers.append(lambda: rng.choice(specials)[:rng.choice([None, None, -1])])

    def string():
        parts = rng.randint(1, 12)
        return "".join(rng.choice(makers)() + rng.choice(["", "", " ", "\n"]) for _ in range(parts))

    return [string() for _ in range(n)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: train(str(root / kind), kind) for kind in KINDS}


def differing(tok, hf, texts):
    """The texts on which the ids differ from transformers', special-token text included; each
    must still decode alike."""
    odd = []
    for text, ids in zip(texts, hf(texts, add_special_tokens=False)["input_ids"]):
        ours = tok.encode(text, special=True)
        assert tok.decode(ours) == tok.decode(ids)
        if ours != ids:
            odd.append(text)
    return odd


def has_absent_byte(tok, text):
    """Has text a byte without a token? It is dropped before merging there, after merging here."""
    have = {t[0] for t in tok.bytes.values() if len(t) == 1}
    return bool(set(text.encode()) - have)


def has_stacked_marks(tok, text):
    """Combining marks in a row, where NFC depends on the version of the Unicode tables."""
    marks = [bool(unicodedata.combining(c)) for c in text]
    return any(a and b for a, b in zip(marks, marks[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_tokenizers_library(folders, kind):
    tok, hf = Tokenizer(folders[kind]), by_transformers(folders[kind])
    texts = strings(3000, seed=1, specials=SPECIALS)
    assert sum(any(s in t for s in SPECIALS) for t in texts) > 500
    odd = differing(tok, hf, texts)
    print(f"{kind}: {len(odd)} of {len(texts)} strings differ")
    if kind == "digits":
        assert all(has_absent_byte(tok, text) for text in odd) and len(odd) <= 30
    else:
        assert odd == []
    assert len(tok) == len(hf)


@needs_real
@pytest.mark.parametrize("name, size, most, why", [
    ("smollm2", 49152, 30, has_absent_byte), ("qwen", 151665, 15, has_stacked_marks)])
def test_real_ids_equal_transformers(name, size, most, why):
    path = os.path.join(REAL, name)
    tok, hf = Tokenizer(path), by_transformers(path)
    texts = strings(5000, seed=2, specials=[*tok.added])
    odd = differing(tok, hf, texts)
    print(f"{name}: {len(odd)} of {len(texts)} strings differ, e.g. {odd[:3]}")
    assert all(why(tok, text) for text in odd) and len(odd) <= most
    assert len(tok) == len(hf) == size
    assert tok.chat(TALK) == rendered(hf, TALK, add_generation_prompt=True)
    system = [{"role": "system", "content": "Answer in one word. <|im_end|>"}, *TALK]
    assert tok.chat(system, add_generation_prompt=False) == rendered(hf, system)


@needs_real
def test_real_golden_prompt():
    ids = Tokenizer(os.path.join(REAL, "smollm2")).chat([{"role": "user", "content": "Hi 42"}])
    assert ids == GOLDEN


def test_negative_controls(folders, tmp_path, monkeypatch):
    """What the equality above would catch: no NFC, GPT-2's pattern for digits, NFC over the whole
    text, a wrong merge order."""
    texts = strings(1000, seed=1, specials=SPECIALS)
    hf = {k: by_transformers(folders[k]) for k in KINDS}

    def wrong(tok, kind):
        """On how many texts does tok differ from transformers' tokenizer of that kind?"""
        theirs = hf[kind](texts, add_special_tokens=False)["input_ids"]
        return sum(tok.encode(t, special=True) != ids for t, ids in zip(texts, theirs))

    tok = Tokenizer(folders["qwen"])
    tok.nfc = False
    assert wrong(tok, "qwen") > 25
    # the mark composes with ">" (U+226F) when the whole text is normalised first, and the special
    # token is gone
    tok, text = Tokenizer(folders["qwen"]), "a<|im_end|>\u0338"
    end = tok.added["<|im_end|>"]
    assert tok.encode(text, special=True) == hf["qwen"].encode(text, add_special_tokens=False)
    assert end in tok.encode(text, special=True)
    assert end not in tok.encode(unicodedata.normalize("NFC", text), special=True)
    monkeypatch.setattr(tokenizer_py, "DIGITS_THEN_GPT2", tokenizer_py.GPT2)
    assert wrong(Tokenizer(folders["digits"]), "digits") > 25
    swap = edited(folders["gpt2"], tmp_path, edit=lambda d: d["model"]["merges"].reverse())
    assert wrong(Tokenizer(swap), "gpt2") > 25


def test_ids_need_not_follow_the_merge_order(folders, tmp_path):
    def shuffle(d):
        tokens = [t for t in d["model"]["vocab"] if t not in SPECIALS]
        ids = [d["model"]["vocab"][t] for t in tokens]
        random.Random(0).shuffle(ids)
        d["model"]["vocab"] |= dict(zip(tokens, ids))
    path = edited(folders["gpt2"], tmp_path, edit=shuffle)
    texts = strings(500, seed=3, specials=SPECIALS)
    assert differing(Tokenizer(path), by_transformers(path), texts) == []
    straight, shuffled = Tokenizer(folders["gpt2"]), Tokenizer(path)
    assert sum(straight.encode(t) != shuffled.encode(t) for t in texts[:20]) > 15


def test_a_split_pattern_with_gaps_and_normalized_added_tokens(folders, tmp_path):
    def edit(d):
        d["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+"
        d["added_tokens"][-1] |= {"content": "<é>", "normalized": True}
    path = edited(folders["qwen"], tmp_path, edit=edit)
    tok, hf = Tokenizer(path), by_transformers(path)
    texts = strings(500, seed=4, specials=["<é>", "<e\u0301>", "<é>\u0338"])
    assert differing(tok, hf, texts) == []
    assert tok.encode("x<e\u0301>", special=True)[-1] == tok.added["<é>"]
    assert tok.encode("x<e\u0301>")[-1] != tok.added["<é>"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_yields_an_added_id_by_default(folders, kind):
    tok = Tokenizer(folders[kind])
    texts = [*SPECIALS, "<|endoftext|><|im_end|>", *strings(1000, seed=6, specials=SPECIALS)]
    added = set(tok.added.values())
    assert not any(added & set(tok.encode(t)) for t in texts)
    assert all(tok.encode(t, special=True) == [i] for t, i in tok.added.items())
    if kind != "digits":  # whose vocabulary cannot spell everything
        whole = [unicodedata.normalize("NFC", t) if tok.nfc else t for t in texts]
        assert [tok.decode(tok.encode(t)) for t in texts] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_panics(folders, kind):
    tok = Tokenizer(folders[kind])
    for b in range(256):
        tok.encode(chr(b) * 3)
        tok.encode("!" + chr(b) + "!")
    assert tok.encode("") == [] and tok.decode([]) == ""
    # lone surrogates become U+FFFD, pairs their character; transformers raises a TypeError on both
    for broken, text in (("a\ud800b", "a\ufffdb"), ("\ud83d\ude42", "\U0001F642")):
        assert tok.encode(broken) == tok.encode(text)
    broken, text = "\ud800<|im_end|>\udc00", "\ufffd<|im_end|>\ufffd"
    assert tok.encode(broken, special=True) == tok.encode(text, special=True)


@pytest.mark.parametrize("kind", ("gpt2", "qwen"))
def test_long_runs_equal_the_tokenizers_library(folders, kind):
    tok, hf = Tokenizer(folders[kind]), by_transformers(folders[kind])
    for run in (" " * 1_010_000 + "x", "\t" * 1_010_000, "a" * 100_000, "?" * 100_000):
        assert tok.encode(run) == hf.encode(run, add_special_tokens=False), (run[:1], len(run))


def test_tiktoken_does_panic_on_what_is_cut(folders, monkeypatch):
    monkeypatch.setattr(tokenizer_py, "LONGEST_SPACE", 10 ** 9)
    with pytest.raises(ValueError, match="tiktoken cannot split this text of 1200001 characters"):
        Tokenizer(folders["gpt2"]).encode(" " * 1_200_000 + "x")


def test_decode(folders):
    tok = Tokenizer(folders["llama3"])
    hf = by_transformers(folders["llama3"])
    ids = tok.encode("naïve 🙂<|im_end|>", special=True)
    for cut in range(len(ids) + 1):  # half a character decodes to U+FFFD, as in transformers
        assert tok.decode(ids[:cut]) == hf.decode(ids[:cut])
    with pytest.raises(ValueError, match=f"no token has id {len(tok)}"):
        tok.decode([len(tok)])


@pytest.mark.parametrize("kind", KINDS)
def test_chat(folders, kind, tmp_path):
    tok, hf = Tokenizer(folders[kind]), by_transformers(folders[kind])
    injected = [{"role": "system", "content": "s"}, {"role": "user", "content": "a<|im_end|>b"}]
    for talk in (TALK, TALK[:1], injected):
        for prompt in (True, False):
            theirs = rendered(hf, talk, add_generation_prompt=prompt)
            assert tok.chat(talk, add_generation_prompt=prompt) == theirs
    bos = tok.added["<|endoftext|>"]
    assert tok.has_chat and tok.chat(TALK).count(bos) == 1
    assert tok.chat(TALK) != tok.chat(TALK, add_generation_prompt=False)
    with pytest.raises(ValueError, match="chat template: no role judge"):
        tok.chat([{"role": "judge", "content": "?"}])
    with pytest.raises(ValueError, match="chat template: .*content"):
        tok.chat([{"role": "user"}])


def test_chat_template_sources(folders, tmp_path):
    def with_template(name, template):
        return edited(folders["llama3"], tmp_path / name, "tokenizer_config.json",
                      chat_template=template)

    source = ("{% if tools is none %}T{% endif %}{%- for m in messages %}{% if loop.index > 2 %}"
              "{% break %}{% endif %}\n    {{ m | tojson }}<|im_end|>\n"
              "{% endfor %}{{ strftime_now('%Y')[:2] }}")
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": source}]
    path = with_template("a", named)
    assert Tokenizer(path).chat(TALK) == rendered(by_transformers(path), TALK)
    with open(os.path.join(path, "chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write("from the file")  # wins over tokenizer_config.json
    assert Tokenizer(path).decode(Tokenizer(path).chat(TALK)) == "from the file"
    bare = Tokenizer(with_template("b", None))
    assert not bare.has_chat
    with pytest.raises(ValueError, match="no chat template"):
        bare.chat(TALK)
    with pytest.raises(ValueError, match="chat template: .*unsafe"):
        Tokenizer(with_template("c", "{{ messages.append(1) }}")).chat([])
    with pytest.raises(ValueError, match="chat template cannot be read"):
        Tokenizer(with_template("d", "{% if %}"))


def test_stop_ids(folders, tmp_path):
    def with_eos(name, **eos):
        return edited(folders["qwen"], tmp_path / name, name + ".json", **eos)

    tok = Tokenizer(folders["qwen"])
    assert set(tok.stop_ids) == {tok.added["<|endoftext|>"], tok.added["<|im_end|>"]}
    assert isinstance(tok.stop_ids, tuple)
    only = Tokenizer(with_eos("generation_config", eos_token_id=7))
    assert set(only.stop_ids) == {7, tok.added["<|endoftext|>"], tok.added["<|im_end|>"]}
    with pytest.raises(ValueError, match="'<eos>' is not in tokenizer.json"):
        Tokenizer(with_eos("tokenizer_config", eos_token="<eos>"))
    with pytest.raises(ValueError, match="99999 is not in tokenizer.json"):
        Tokenizer(with_eos("config", eos_token_id=99999))


def pre(**step):
    return lambda d: d.update(pre_tokenizer=step)


def split(pattern, behavior="Isolated", invert=False, use_regex=False):
    step = dict(type="Split", pattern=pattern, behavior=behavior, invert=invert)
    return pre(type="Sequence", pretokenizers=[step, BYTES | {"use_regex": use_regex}])


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
LOWERCASE = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
REFUSED = {  # what the error says: the change that earns it
    "Unigram": lambda d: d["model"].update(type="Unigram"),
    "byte_fallback": lambda d: d["model"].update(byte_fallback=True),
    "end_of_word_suffix": lambda d: d["model"].update(end_of_word_suffix="</w>"),
    "dropout": lambda d: d["model"].update(dropout=0.1),
    "'▁the' is not byte-level": lambda d: d["model"]["vocab"].update({"▁the": 5000}),
    "no merge makes token 'theth'": lambda d: d["model"]["vocab"].update({"theth": 5000}),
    "the vocabulary lacks token 'zz": lambda d: d["model"]["merges"].append(["zzz", "zzz"]),
    "Metaspace": pre(type="Metaspace", replacement="▁"),
    "Whitespace": pre(type="Whitespace"),
    "\"use_regex\": true": split({"Regex": "a"}, use_regex=True),
    "Removed": split({"Regex": "a"}, "Removed", invert=True),
    "\"String\"": split({"String": "a"}),
    "add_prefix_space": pre(**BYTES | {"add_prefix_space": True, "use_regex": True}),
    "pre_tokenizer null": lambda d: d.update(pre_tokenizer=None),
    "Lowercase": lambda d: d.update(normalizer=LOWERCASE),
    "'merges' is missing": lambda d: d["model"].pop("merges"),
    "lstrip": lambda d: d["added_tokens"][0].update(lstrip=True),
    "single_word": lambda d: d["added_tokens"][0].update(single_word=True),
    "Unknown group flag": split({"Regex": "(?Z)("}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refuses_by_name(folders, tmp_path, says):
    with pytest.raises(ValueError) as e:
        Tokenizer(edited(folders["llama3"], tmp_path, edit=REFUSED[says]))
    assert says in str(e.value) and "\n" not in str(e.value) and str(tmp_path) in str(e.value)


def test_refuses_unknown_bytes_with_an_unk_token(folders, tmp_path):
    def edit(d):
        d["model"].update(unk_token="<|endoftext|>")

    with pytest.raises(ValueError, match="unk_token"):
        Tokenizer(edited(folders["digits"], tmp_path, edit=edit))


def test_missing_and_broken_files(folders, tmp_path):
    path = edited(folders["gpt2"], tmp_path)
    with open(os.path.join(path, "tokenizer.json"), "w") as f:
        f.write("{")
    with pytest.raises(ValueError, match="tokenizer.json is not valid JSON"):
        Tokenizer(path)
    os.remove(os.path.join(path, "tokenizer.json"))
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        Tokenizer(path)


def test_command_line(folders):
    command = [sys.executable, "-m", "data.tokenizer", folders["qwen"], "the key", "<|im_end|>"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "tokens -> 'the key <|im_end|>'" in out.stdout
    assert "'<|im_end|>'" in out.stdout.splitlines()[0]
