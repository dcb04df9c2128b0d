"""
data/tokenizer.py against the tokenizers library: tokenizers of every supported kind, trained
here from nothing, must give the same ids on generated strings, small random ones on all short
strings. With SMD_REAL_WEIGHTS=folder holding smollm2/ and qwen/, the real ones too, and with
templates/ in it the chat templates of Qwen3 and Llama 3.2.
"""
import copy
import functools
import itertools
import json
import os
import random
import shutil
import unicodedata

import pytest
import tiktoken

from data import tokenizer as tokenizer_py
from data.tasks import opens_thought, prompt_encoder, stop_end
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
BY_TIKTOKEN = ("llama3", "gpt2", "digits", "qwen", "tekken")
FALLBACK = ("llama2", "mistral")  # sentencepiece's: bytes are <0x0A>, a space is ▁
BY_LIBRARY = (*FALLBACK, "deepseek")
KINDS = BY_TIKTOKEN + BY_LIBRARY
every_kind = pytest.mark.parametrize("kind", KINDS)


def refused(says):
    return pytest.raises(ValueError, match=says)


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
    if kind in FALLBACK:
        return pre.Metaspace()
    patterns = {"deepseek": [r"[\r\n]", r"\s?[a-zA-Zà-ÿ]+", r"[一-龥ぁ-ん]+"],
                "qwen": [QWEN]}
    steps = [pre.Split(Regex(p), "isolated") for p in patterns.get(kind, [LLAMA3])]
    if kind == "deepseek":
        steps.append(pre.Digits(individual_digits=True))
    return pre.Sequence([*steps, byte(use_regex=False)])


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return f.read()


def train(folder, kind, size=900):
    """Write a BPE of that kind, a config and a chat template into `folder`, as a checkpoint would
    have them."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    fallback = kind in FALLBACK
    t = tokenizers.Tokenizer(models.BPE(ignore_merges=kind in ("llama3", "tekken"),
                                        byte_fallback=fallback, fuse_unk=fallback,
                                        unk_token="<unk>" if fallback else None))
    t.pre_tokenizer, t.decoder = pieces_of(kind), decoders.ByteLevel()
    if kind == "qwen":
        t.normalizer = normalizers.NFC()
    # SmolLM2's vocabulary has its special tokens in front and lacks the bytes that were never
    # seen; the others have all bytes
    front = SPECIALS[:3] if kind in ("digits", "gpt2", "tekken") else []
    if fallback:
        front = ["<unk>", *SPECIALS[:3], *(f"<0x{b:02X}>" for b in range(256))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                  special_tokens=front, initial_alphabet=[]
                                  if kind == "digits" or fallback else alphabet,
                                  limit_alphabet=100 if fallback else 1000)
    here = [read(ROOT, "model.py"), read(ROOT, "data", "tokenizer.py")]
    t.train_from_iterator(here + strings(400, seed=5, controls=False), trainer)
    t.add_special_tokens(SPECIALS[:3])
    t.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    if fallback:
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                       decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "llama2":
        t.pre_tokenizer = None
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                             normalizers.Replace(" ", "▁")])
    content = json.loads(t.to_str())
    content["added_tokens"] = [x for x in content["added_tokens"]
                               if x["content"][:3] != "<0x"]
    end, turn = t.token_to_id("<|endoftext|>"), t.token_to_id("<|im_end|>")
    save(folder, tokenizer=content, config={"model_type": "llama", "eos_token_id": end},
         generation_config={"eos_token_id": [end, turn]}, tokenizer_config={
             "tokenizer_class": "PreTrainedTokenizerFast",
             "bos_token": "<|endoftext|>", "chat_template": TEMPLATE,
             "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}})
    return str(folder)


def save(folder, **files):
    """Writes JSON files: name=content"""
    os.makedirs(folder, exist_ok=True)
    for name, content in files.items():
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
            json.dump(content, f, ensure_ascii=False)


def edited(folder, tmp_path, name="tokenizer", edit=None, **keys):
    """A copy of the folder with one JSON file changed by `edit(dict)` or by top-level keys."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    content = json.loads(read(folder, name + ".json")) | keys
    if edit:
        edit(content)
    save(tmp_path, **{name: content})
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
        return "".join(rng.choice(makers)() + rng.choice(["", "", " ", "\n"])
                       for _ in range(parts))

    return [string() for _ in range(n)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: train(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded(folders):
    """kind -> our tokenizer and transformers', not to be changed"""
    return functools.cache(lambda kind: (Tokenizer(folders[kind]), by_transformers(folders[kind])))


def templated(pair, source):
    """The same tokenizers with another chat template."""
    tok, hf = map(copy.copy, pair)
    hf.chat_template = source
    tok.template = tokenizer_py.TemplateApart(source, "T")
    return tok, hf


def differing(tok, hf, texts):
    """The texts on which the ids differ from transformers', special-token text included; each
    must still decode alike."""
    odd = []
    for text, ids in zip(texts, hf(texts, add_special_tokens=False)["input_ids"]):
        ours = tok.encode(text, special=True)
        assert tok.decode(ours) == tok.decode(ids)
        if tok.decoder or "\ufffd" not in hf.decode(ids):  # which breaks an added <é>
            assert tok.decode(ids) == hf.decode(ids)
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


@every_kind
def test_ids_equal_the_tokenizers_library(loaded, kind):
    tok, hf = loaded(kind)
    texts = strings(500, seed=1, specials=SPECIALS)
    assert sum(any(s in t for s in SPECIALS) for t in texts) > 75
    odd = differing(tok, hf, texts)
    if kind == "digits":
        assert all(has_absent_byte(tok, text) for text in odd) and len(odd) <= 5
    else:
        assert odd == []
    assert len(tok) == len(hf)
    assert type(tok.engine).__name__ == ("Ranks" if kind in BY_TIKTOKEN else "Library")


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
    system = [{"role": "system", "content": "Answer in one word. <|im_end>"}, *TALK]
    assert tok.chat(system, add_generation_prompt=False) == rendered(hf, system)


def test_negative_controls(folders, loaded, tmp_path, monkeypatch):
    """What the equality above would catch: no NFC, GPT-2's pattern for digits, NFC over the whole
    text, a wrong merge order."""
    texts = strings(300, seed=1, specials=SPECIALS)

    def wrong(tok, kind):
        """On how many texts does tok differ from transformers' tokenizer of that kind?"""
        theirs = loaded(kind)[1](texts, add_special_tokens=False)["input_ids"]
        return sum(tok.encode(t, special=True) != ids for t, ids in zip(texts, theirs))

    tok, hf = loaded("qwen")
    # the mark composes with ">" (U+226F) when the whole text is normalised first, and the special
    # token is gone
    text, end = "a<|im_end|>\u0338", tok.added["<|im_end|>"]
    assert tok.encode(text, special=True) == hf.encode(text, add_special_tokens=False)
    assert end in tok.encode(text, special=True)
    assert end not in tok.encode(unicodedata.normalize("NFC", text), special=True)
    tok = copy.copy(tok)
    tok.nfc = False
    assert wrong(tok, "qwen") > 8
    monkeypatch.setattr(tokenizer_py, "DIGITS_THEN_GPT2", tokenizer_py.GPT2)
    assert wrong(Tokenizer(folders["digits"]), "digits") > 8
    swap = edited(folders["gpt2"], tmp_path, edit=lambda d: d["model"]["merges"].reverse())
    assert wrong(Tokenizer(swap), "gpt2") > 8


@pytest.mark.parametrize("kind", FALLBACK)
def test_negative_controls_of_the_library(folders, loaded, tmp_path, kind):
    """What would be caught: a space in front of what follows an added token, where a kind has none,
    an engine that knows the added tokens, merges that make one."""
    text = "a <|im_end|>user says"
    tok, hf = Tokenizer(folders[kind]), loaded(kind)[1]
    want, end = hf.encode(text, add_special_tokens=False), tok.added["<|im_end|>"]
    assert tok.encode(text, special=True) == want and end not in tok.encode(text)
    tok.engine.later = tok.engine.first
    assert (tok.encode(text, special=True) != want) == (kind == "mistral")
    tok.engine.first = tokenizers.Tokenizer.from_file(folders[kind] + "/tokenizer.json")
    assert end in tok.encode(text)

    def merging(d):
        vocab, made = d["model"]["vocab"], "<"
        for c in "|im_end|>":
            d["model"]["merges"].insert(len(made) - 1, [made, c])
            made += c
            vocab |= {x: vocab.get(x, len(vocab)) for x in (c, made)}
        d["added_tokens"][-1]["id"] = len(vocab)  # <think>

    tok = Tokenizer(edited(folders[kind], tmp_path, edit=merging))
    ids = tok.encode("<|im_end|>")
    assert end not in ids and tok.decode(ids) == "<|im_end|>"
    merged = json.loads(read(tmp_path, "tokenizer.json")) | {"added_tokens": []}
    assert end in tokenizers.Tokenizer.from_str(json.dumps(merged)).encode("<|im_end|>").ids


@pytest.mark.parametrize("kind", FALLBACK)
def test_what_fallback_needs(folders, loaded, tmp_path, kind):
    """A token for each byte; an added token marked `normalized` is found as it
    stands, where the library would miss it."""
    def flags(d):
        for added in d["added_tokens"]:
            added["normalized"] = True
        if not d["pre_tokenizer"]:
            del d["pre_tokenizer"]  # as null

    tok = Tokenizer(edited(folders[kind], tmp_path, edit=flags))
    hf, text = loaded(kind)[1], "a<|im_end|>b"
    assert tok.encode(text, special=True) == hf.encode(text, add_special_tokens=False)
    assert tok.bytes[tok.encode("\0")[-1]] == b"\0" and tok.decode(tok.encode("\0 é ")) == "\0 é "
    if kind == "llama2":  # the control
        theirs = by_transformers(str(tmp_path))
        assert theirs.encode(text, add_special_tokens=False) != tok.encode(text, special=True)


@every_kind
def test_stop_strings(loaded, kind):
    """A response ends with the token that completes one, whatever tokens spell it."""
    tok, _ = loaded(kind)
    ids = tok.encode("It is 42.\n\nQuestion: 3 + 4?\nAnswer: 7")
    for stop in ("Question:", "\n\n", "42"):
        end = stop_end(tok.decode, ids, [stop])
        assert stop in tok.decode(ids[:end]) and stop not in tok.decode(ids[:end - 1])
    assert stop_end(tok.decode, ids, ["Quest:"]) == 0


@every_kind
def test_text_never_yields_an_added_id_by_default(loaded, kind):
    """Nor panics, whatever it is."""
    tok, _ = loaded(kind)
    texts = [*SPECIALS, "<|endoftext|><|im_end|>", "", *(f"{chr(b)}!{chr(b)}" for b in range(256)),
             *strings(500, seed=6, specials=SPECIALS)]
    added = set(tok.added.values())
    assert not any(added & set(tok.encode(t)) for t in texts)
    assert all(tok.encode(t, special=True) == [i] for t, i in tok.added.items())
    if kind != "digits":  # whose vocabulary cannot spell everything
        whole = [unicodedata.normalize("NFC", t) if tok.nfc else t for t in texts]
        if kind == "mistral":  # a text's own first space is the one that is put in front
            whole = [t.removeprefix(" ") for t in whole]
        assert [tok.decode(tok.encode(t)) for t in texts] == whole
    # lone surrogates become U+FFFD, pairs their character; transformers raises a TypeError on both
    for broken, text in (("a\ud800b", "a\ufffdb"), ("\ud83d\ude42", "\U0001F642")):
        assert tok.encode(broken) == tok.encode(text)
    broken, text = "\ud800<|im_end|>\udc00", "\ufffd<|im_end|>\ufffd"
    assert tok.encode(broken, special=True) == tok.encode(text, special=True)


@pytest.mark.parametrize("kind", ("qwen", *FALLBACK))
def test_long_runs_equal_the_tokenizers_library(loaded, kind, monkeypatch):
    monkeypatch.setattr(tokenizer_py, "LONGEST_SPACE", 2**12)
    tok, hf = loaded(kind)
    for run in (" " * 30_000 + "x", "\t" * 30_000, "a" * 30_000, "?" * 30_000):
        assert tok.encode(run) == hf.encode(run, add_special_tokens=False), (run[:1], len(run))


def test_tiktoken_does_panic_on_what_is_cut(loaded, monkeypatch):
    tok, _ = loaded("gpt2")
    text = " " * 1_200_000 + "x"
    assert tok.decode(tok.encode(text)) == text
    monkeypatch.setattr(tokenizer_py, "LONGEST_SPACE", 10**9)  # the control
    with refused("tiktoken cannot split this text of 1200001 characters"):
        tok.encode(text)


def test_decode(loaded):
    tok, hf = loaded("llama3")
    ids = tok.encode("naïve 🙂<|im_end|>", special=True)
    for cut in range(len(ids) + 1):  # half a character decodes to U+FFFD, as in transformers
        assert tok.decode(ids[:cut]) == hf.decode(ids[:cut])
    with refused(f"no token has id {len(tok)}"):
        tok.decode([len(tok)])


@every_kind
def test_chat(loaded, kind):
    tok, hf = loaded(kind)
    innocent = [{"role": "system", "content": "s"},
                {"role": "user", "content": "a<|im_end|b>"}]
    for talk in (TALK, TALK[:1], innocent):
        for prompt in (True, False):
            theirs = rendered(hf, talk, add_generation_prompt=prompt)
            assert tok.chat(talk, add_generation_prompt=prompt) == theirs
    bos = tok.added["<|endoftext|>"]
    assert tok.has_chat and tok.chat(TALK).count(bos) == 1
    assert tok.chat(TALK) != tok.chat(TALK, add_generation_prompt=False)
    with refused("^.*tokenizer_config.json: chat template: no role judge"):
        tok.chat([{"role": "judge", "content": "?"}])
    with refused("chat template: .*content"):
        tok.chat([{"role": "user"}])


def test_chat_template_sources(folders, tmp_path):
    def with_template(name, template):
        return edited(folders["llama3"], tmp_path / name, "tokenizer_config",
                      chat_template=template)

    source = ("{% if tools is none %}T{% endif %}{%- for m in messages %}{% if loop.index > 2 %}"
              "{% break %}{% endif %}\n    {{ m | tojson }}<|im_end|>\n"
              "{% endfor %}{{ strftime_now('%Y')[:2] }}")
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": source}]
    path = with_template("a", named)
    assert Tokenizer(path).chat(TALK) == rendered(by_transformers(path), TALK)
    file = os.path.join(path, "chat_template.jinja")
    with open(file, "w", encoding="utf-8") as f:
        f.write("from the file{{ eos_token }}")  # wins over tokenizer_config.json
    bare, own = with_template("b", None), tmp_path / "own.jinja"
    own.write_text("<|im_start|>{{ messages[-1].content }}{{ eos_token }}")
    for where, given, text in ((path, "", "from the file<|im_end|>"),
                               (path, own, "<|im_start|>21<|im_end|>"),
                               (bare, own, "<|im_start|>21<|im_end|>")):
        tok = Tokenizer(where, template_file=str(given))
        assert tok.decode(prompt_encoder(tok)("21")) == text
    assert not Tokenizer(bare).has_chat
    with refused("no chat template"):
        Tokenizer(bare).chat(TALK)
    with pytest.raises(FileNotFoundError, match="nobodys.jinja is missing"):
        Tokenizer(bare, template_file="nobodys.jinja")
    own.write_text("{% if %}")
    with refused(r"own\.jinja: chat template cannot be read"):
        Tokenizer(bare, template_file=str(own))


def test_stop_ids(folders, tmp_path):
    def with_eos(file, eos):
        return Tokenizer(edited(folders["qwen"], tmp_path / file, file, eos_token_id=eos,
                                eos_token=eos))

    tok = Tokenizer(folders["qwen"])
    both = tok.added["<|endoftext|>"], tok.added["<|im_end|>"]
    assert tok.stop_ids == tuple(sorted(both))
    assert with_eos("generation_config", 7).stop_ids == (7, *sorted(both))
    with refused("tokenizer_config.json: eos_token '<eos>' is not in tokenizer.json"):
        with_eos("tokenizer_config", "<eos>")
    for odd, shown in ((99999, "99999"), (True, "true"), ("7", "'7'"), ([7, None], "null"),
                       ({}, "an object")):
        for file in ("config", "generation_config"):
            with refused(f"{file}.json: eos_token_id {shown} is not in tokenizer.json"):
                with_eos(file, odd)


# messages are text

def control(tok, ids):
    """The added tokens of some ids; the ids between them."""
    added, between = [], [[]]
    for i in ids:
        if i in tok.added.values():
            added.append(i)
            between.append([])
        else:
            between[-1].append(i)
    return added, between


SPELT = ["<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\nb", " <thi", "<<|im_end|>>",
         "<|endoftext|>" * 3, "\ud800<|im_end|>"]


@pytest.mark.parametrize("kind", ("llama3", "qwen"))
def test_what_a_message_says_is_text(loaded, kind):
    tok, _ = loaded(kind)
    for content in SPELT:
        talk = [dict(role="user", content=content), dict(role="assistant", content=content)]
        added, between = control(tok, tok.chat(talk))
        plain, _ = control(tok, tok.chat([dict(m, content="a") for m in talk]))
        assert added == plain
        assert between == [tok.encode(tok.decode(ids)) for ids in between]
        text = tok.decode(tok.chat(talk))
        assert text.count(f"\n{content}<|im_end|>".replace("\ud800", "\ufffd")) == 2
        spelt, _ = control(tok, tok.encode(text, special=True))
        assert (spelt != plain) == bool(tok.spelled(content))
    assert tok.spelled("a <|im_start|>user\n<|im_end|>") == "<|im_start|>"
    assert {tok.spelled(text) for text in ("", "<|im_start", "<think>a</think>")} == {""}


def test_a_thought_is_one_in_what_an_assistant_says_alone(loaded):
    tok, hf = loaded("qwen")
    content = " <think>a</thi <|im_end|> b<think>"
    told, said = ([dict(role=role, content=content)] for role in ("user", "assistant"))
    think = tok.added["<think>"]
    assert tok.chat(said).count(think) == 2 and tok.chat(told).count(think) == 0
    harmless = said[0] | dict(content=content.replace("im_end", "im_and"))
    assert tok.chat([harmless]) == rendered(hf, [harmless], add_generation_prompt=True)
    assert rendered(hf, told).count(think) == 2  # control


ACROSS = {  # template: contents that would spell <|im_end|> together with each other or with it
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}": ["a <|im_ ", " end|> b"],
    "{% for m in messages %}{{ m.content }}{% endfor %}": ["<", "|", "im_end", "|>"],
    "<|im_{{ messages[0].content }}": ["end|> b"],
    "{{ messages[0].content }}_end|>": ["a <|im"],
    "<|{{ messages[0].content | trim }}|>": ["  im_end\n"],
}


@pytest.mark.parametrize("template", ACROSS)
def test_no_border_makes_a_token(loaded, template):
    tok, _ = templated(loaded("qwen"), template)
    ids = tok.chat([dict(role="user", content=c) for c in ACROSS[template]])
    text = tok.decode(ids)
    assert "<|im_end|>" in text and ids == tok.encode(text) != tok.encode(text, special=True)


def test_roles_and_arguments_may_make_tokens(loaded):
    """Templates write '<|' + role + '|>', and an argument is the user's own."""
    tok, _ = templated(loaded("qwen"), "<|{{ messages[0].role }}|>{{ end }}")
    ids = tok.chat([dict(role="im_start", content="")], end="<|im_end|>")
    assert ids == [tok.added["<|im_start|>"], tok.added["<|im_end|>"]]


INNOCENT = ["Hello", "  a < b |> c ", "<|im", ">x", "/no_think", "end|> and <|im", "im_end",
            "</thin> y", "a\u0338", "\U000F0000\U000F0001<", "", " \n", "I"]  # parts of tokens
LOOKS = {  # what a template may look for in what is said: how it writes it
    "in": "{{ c if '</think>' in c else 'none' }}",
    "starts": "{{ 'x' if c.startswith(('<tool', '/no')) and not c.endswith('>') else c }}",
    "equal": "{{ 'same' if c == messages[-1].content else 'other' }}{{ c != 'a' }}{{ c < 'b' }}",
    "last": "{{ c.split('</think>')[-1].lstrip('\n') }}",
    "once": "{{ c.split('<think>', 1)[-1] }}|{{ c.rsplit('</think>', 1)[0].rstrip('\n') }}",
    "words": "{{ c.split() | join(', ') }}{{ c.splitlines() | first }}",
    "trim": "[{{ c | trim }}{{ c.strip('</think>') }}{{ (c | trim).lstrip('<') }}]",
    "partition": "{{ c.partition('</think>')[2] }}{{ c.rpartition('x')[0] }}",
    "place": "{{ c[c.find('</think>') + 8:] }}{{ c.count('<') }}{{ c[:3] }}{{ c[0] | length }}",
    "replace": "{{ c | replace('</think>', '<|im_start|>') }}{{ c.replace('a', '') }}",
    "case": "{{ c | upper }}{{ c.lower() }}{{ 'x' if 'think' in c | lower }}{{ c | capitalize }}",
    "concat": "{% set d = '<|im_start|>' ~ c ~ '!' %}{{ d.split('</think>')[-1] }}",
    "plus": "{% set d = '<|im_start|>' + c + '!' %}{{ d.split('</think>')[-1] }}",
    "join": "{{ (messages | map(attribute='content') | join('<|im_end|>')).split('ink>') | join }}",
    "macro": "{% macro f(x) %}<|im_start|>{{ x }}{% endmacro %}{{ f(c).split('</think>')[-1] }}",
    "set": "{% set d %}<|im_start|>{{ c }}{% endset %}{{ d.split('</think>')[-1] }}",
    "json": "{{ c | tojson }}{{ {'b': c, 'a': [c]} | tojson(indent=1, sort_keys=true) }}"
            "{{ c | tojson(ensure_ascii=true) }}",
    "repr": "{{ {'a': c} }}{{ [c] | string }}",
    "sort": "{{ {c: 1, 'the': c} | dictsort }}{{ [c, 'the'] | sort | join }}",
    "letters": "{% for x in c %}{{ x if x != '<' }}{% endfor %}{{ c | length }}",
    "keys": "{{ {'x': 'y'}[c] | default('no') }}{{ {c: 'y'}.get('x', 'no') }}",
}


def looking(look):
    return ("{% for m in messages %}<|im_start|>{% set c = m.content %}" + look
            + "<|im_end|>{% endfor %}")


def talks(rng, n, spelt=()):
    """Chats of three messages, thoughts among the assistant's; what users say holds some of `spelt`
    and what looks like a thought."""
    def say():
        parts = [rng.choice(WORDS), rng.choice(SPECIALS[:3])[:-1], "</think>", " ",
                 "\n", "é", "x"]
        return "".join(rng.choices([*parts, *spelt], k=6)) + "x"

    return [[dict(role="user", content=say()),
             dict(role="assistant", content=rng.choice(["<think>\na\n</think>\n\nThe", "x"])),
             dict(role="user", content=rng.choice([say(), "x"]))] for _ in range(n)]


@pytest.mark.parametrize("look", LOOKS)
def test_a_template_sees_what_is_said(loaded, look):
    """Its text is transformers' where it looks into messages, and no message makes a token."""
    rng = random.Random(look)
    tok, hf = templated(loaded("llama3"), looking(LOOKS[look]))
    think = tok.added["<think>"]
    alone = [dict(role="user", content=content) for content in INNOCENT]
    for talk in [alone, *talks(rng, 20)]:
        assert tok.chat(talk) == rendered(hf, talk)
    for talk in talks(rng, 40, SPECIALS):
        ids, theirs = tok.chat(talk), rendered(hf, talk)
        assert tok.decode(ids) == tok.decode(theirs)
        added, between = control(tok, ids)
        assert between == [tok.encode(tok.decode(x)) for x in between]
        here = control(tok, tok.encode(hf.apply_chat_template(
            [m | dict(content=harmless(m)) for m in talk], tokenize=False), special=True))[0]
        assert [i for i in added if i != think] == [i for i in here if i != think]


def harmless(message):
    """What a message says, with the same letters in the tokens that it spells but one."""
    return message["content"].replace("<|im_", "<|ım_").replace("<|end", "<|ənd")


def test_texts_that_do_not_see_are_found(loaded, monkeypatch):
    """Control of the test above: with masks alone a template does not find what it looks for, and
    where a token is spelt too, this is refused."""
    tok, hf = templated(loaded("qwen"), looking(LOOKS["last"]))
    talk = [dict(role="user", content="a</think>b"),
            dict(role="user", content="<|im_end|>")]
    assert tok.decode(tok.chat(talk)) == hf.apply_chat_template(talk, tokenize=False)
    monkeypatch.setattr(tokenizer_py, "Said", str)
    with refused("a message spells a control token, and the chat templ"):
        tok.chat(talk)
    assert tok.chat(talk[:1]) == rendered(hf, talk[:1])  # nothing that could become one


def test_a_look_that_cannot_be_followed(loaded):
    tok, hf = templated(loaded("qwen"), looking("{{ c }}{{ 'loud' if c.isupper() else c }}"))
    for content in ("AB", "ab", "<|IM_END|>", "a<|im"):
        talk = [dict(role="user", content=content)]
        assert tok.chat(talk) == rendered(hf, talk)
    assert tok.chat([dict(role="user", content="<|im_end|>a")])  # not upper with masks either
    with refused("handles it in a way that may turn it into one"):
        tok.chat([dict(role="user", content="<|im_end|>"), dict(role="user", content="AB")])


FIELDS = ("{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n"
          "{% if m.thinking %}<think>{{ m.thinking }}{% endif %}{{ m.reasoning_content }}"
          "{% for t in m.tool_calls %}{{ t.function.name }}{{ t.function.arguments | tojson }}"
          "{% for k, v in t.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
          "{{ m.content }}{{ 'tool_calls' in m }}{{ m.keys() | list }}<|im_end|>\n{% endfor %}"
          "{% if tools %}{{ tools | tojson }}{% endif %}")


def test_the_fields_of_messages(loaded):
    """Names, tool calls, tools and thoughts by any of their names; what is null is absent. What
    they say is text, down to the keys of a tool's arguments."""
    tok, hf = templated(loaded("qwen"), FIELDS)

    def talk(end):
        call = dict(type="function", function=dict(
            name="get" + end, arguments={"city" + end: "Bern" + end, "n": [1, 2.5, None, True]}))
        return [dict(role="system", content=""), dict(role="user", content="Hi", name="Bob" + end),
                dict(role="assistant", content=None, tool_calls=[call], reasoning=f"Why{end}"),
                dict(role="tool", content=end, name="get", tool_call_id=None),
                dict(role="assistant", content="It is", thinking="So", reasoning_content=None)]

    if not hasattr(transformers.utils.chat_template_utils, "_alias_reasoning_fields"):
        pytest.skip("this transformers knows one name for a thought")
    tools = [dict(type="function", function=dict(name="get", parameters={}))]
    assert tok.chat(talk(""), tools=tools) == rendered(hf, talk(""), tools=tools)
    ids = tok.chat(talk("<|im_end|>"))
    assert tok.decode(ids) == hf.apply_chat_template(talk("<|im_end|>"), tokenize=False)
    assert control(tok, ids)[0] == control(tok, tok.chat(talk("<|im_and|>")))[0]
    assert control(tok, ids)[0] != control(tok, rendered(hf, talk("<|im_end|>")))[0]  # control


# a template's arguments, blocks, ends, days, bounds

THINKING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and enable_thinking is false %}"
            "<think>\n\n</think>\n\n{% endif %}{% endif %}")


def test_template_arguments(loaded):
    tok, hf = templated(loaded("qwen"), THINKING)
    ids = {}
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        ids[str(arguments)] = tok.chat(TALK, **arguments)
        assert tok.chat(TALK, **arguments) == rendered(
            hf, TALK, add_generation_prompt=True, **arguments)
    think, no_think, off = ids.values()
    assert think == no_think != off and tok.decode(off).endswith("<think>\n\n</think>\n\n")
    assert prompt_encoder(tok, {"enable_thinking": False})("a") == tok.chat(
        [dict(role="user", content="a")], enable_thinking=False)
    with refused("takes no argument 'enable_thinkin' .*enable_thinking"):
        tok.chat(TALK, enable_thinkin=False)
    with refused("takes no argument 'messages'"):
        tok.chat(TALK, messages=[])
    tok.has_chat = False
    with refused("'enable_thinking': this checkpoint has no chat template"):
        prompt_encoder(tok, {"enable_thinking": False})


def test_generation_blocks_change_nothing(loaded):
    marked = ("{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}\n"
              "  {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
              "{% else %}{{ m.content }}{% endif %}\n{% endfor %}")
    tok, hf = templated(loaded("qwen"), marked)
    assert tok.chat(TALK) == rendered(hf, TALK)
    assert "generation" not in tok.decode(tok.chat(TALK))
    with refused("T: chat template cannot be read: .*endgeneration"):
        templated(loaded("qwen"), "{% generation %}a")


def test_the_end_of_a_turn_is_a_stop_token(folders, loaded, tmp_path):
    """Base models have a template whose <|im_end|> nothing calls a stop token."""
    end = {}
    for name, template in (("a", THINKING), ("b", THINKING.replace("<|im_end|>", ""))):
        path = edited(folders["qwen"], tmp_path / name, "tokenizer_config",
                      chat_template=template, eos_token="<|endoftext|>")
        os.remove(os.path.join(path, "generation_config.json"))
        end[name] = Tokenizer(path)
    added = end["a"].added
    assert end["a"].stop_ids == (added["<|endoftext|>"], added["<|im_end|>"])
    assert end["b"].stop_ids == (added["<|endoftext|>"],) and end["b"].notes == []
    note, = end["a"].notes
    assert "ends turns with '<|im_end|>'" in note
    assert loaded("qwen")[0].notes == []  # there it is one already


def test_a_prompt_does_not_depend_on_the_day(loaded):
    tok, _ = templated(loaded("qwen"), "{{ strftime_now('%d %b %Y %H') }}")
    assert tok.decode(tok.chat([])) == "26 Jul 2024 00"
    with refused("random"):
        templated(loaded("qwen"), "{{ [1, 2] | random }}")


@pytest.mark.parametrize("template, says", [
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
     "computing"), ("{{ messages[0].content * 10 ** 7 }}", "MemoryError"),
    ("{% for i in range(999) %}{{ messages[0].content }}{% endfor %}", "writes more than"),
    ("{{ messages.append(1) }}", "unsafe"), ("{{ 1 / 0 }}", "division"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion")])
def test_a_template_is_bounded(loaded, monkeypatch, template, says):
    monkeypatch.setattr("support.apart.SECONDS", 0.5)
    monkeypatch.setattr(tokenizer_py, "MOST_TEXT", 100_000)
    tok, _ = templated(loaded("qwen"), template)
    with refused(f"^T: chat template.*{says}[^\n]*$"):
        tok.chat([dict(role="user", content="x" * 9999)])


@pytest.mark.parametrize("pattern", ["x*", "(?=foo)", ""])
def test_a_pattern_that_matches_nothing(pattern, folders, tmp_path, capfd):
    """Refused in one line, or where a text meets it; the library's stack is not printed. The
    control prints it."""
    path = edited(folders["qwen"], tmp_path, edit=split({"Regex": pattern}))
    with refused("tiktoken cannot split this text of . chara[^\n]*$"):
        Tokenizer(path).encode("foo bar")
    assert capfd.readouterr().err == ""
    bpe = tiktoken.Encoding("x", pat_str="x*", special_tokens={}, mergeable_ranks={
        bytes([b]): b for b in range(256)})
    with pytest.raises(BaseException, match="out of range"):
        bpe.encode_ordinary("foo bar")
    assert "panicked" in capfd.readouterr().err


# small tokenizers

def spec(vocab="abc", merges=(), added=(), **model):
    """tokenizer.json of GPT-2's kind. vocab: texts or {text: id}"""
    if not isinstance(vocab, dict):
        vocab = {text: i for i, text in enumerate(vocab)}
    flags = dict(single_word=False, lstrip=False, rstrip=False,
                 normalized=False, special=True)
    model = dict(type="BPE", dropout=None, unk_token=None,
                 continuing_subword_prefix=None, end_of_word_suffix=None,
                 fuse_unk=False, byte_fallback=False, ignore_merges=False,
                 vocab=vocab, merges=list(merges)) | model
    return dict(version="1.0", truncation=None, padding=None, normalizer=None,
                added_tokens=[flags | t for t in added],
                pre_tokenizer=BYTES | {"use_regex": True},
                post_processor=None, decoder=None, model=model)


def both(folder, content):
    """tokenizer.json as a dict -> ours, theirs"""
    save(folder, tokenizer=content, config={})
    return Tokenizer(str(folder)), tokenizers.Tokenizer.from_str(json.dumps(content))


def test_merges_that_the_vocabulary_cannot_reach(tmp_path):
    vocab, merges = ["a", "b", "c", "bc", "ab", "abc"], [["b", "c"], ["a", "b"],
                                                         ["ab", "c"]]
    ours, theirs = both(tmp_path, spec(vocab, merges))
    assert ours.encode("abc") == theirs.encode("abc").ids == [0, 3]
    assert ours.decode([5]) == "abc" and len(ours) == 6
    ours, _ = both(tmp_path, spec(vocab, merges[1:] + merges[:1]))
    assert ours.encode("abc") == [5]  # in another order they do
    whole, theirs = both(tmp_path,
                         spec(vocab, merges[1:] + merges[:1], ignore_merges=True))
    assert whole.encode("abcab") == theirs.encode("abcab").ids == [5, 4]
    whole, theirs = both(tmp_path, spec(vocab, merges, ignore_merges=True))
    # tiktoken would make the token of "ab" and "c" in any piece
    assert whole.encode("abc abcab") == theirs.encode("abc abcab").ids == [5, 0, 3, 4]
    assert type(whole.engine).__name__ == "Library"
    del (content := spec(["a", "b", "ab"], ["a b"]))["model"]["type"]  # as in older files
    ours, theirs = both(tmp_path, content)
    assert ours.encode("aab") == theirs.encode("aab").ids == [0, 2]


def random_spec(rng):
    """A small vocabulary with merges in any order, not all of which can be reached."""
    chars = list("abc")[:rng.choice([2, 3])]
    texts, merges = list(chars), []
    for _ in range(rng.randint(1, 10)):
        pair = [rng.choice(texts), rng.choice(texts)]
        if len("".join(pair)) <= 7:
            merges.append(pair)
            texts += {"".join(pair)} - set(texts)
    texts += {"".join(rng.choices(chars, k=rng.randint(2, 4)))} - set(texts)  # perhaps unmade
    if rng.random() < 0.7:
        rng.shuffle(merges)
    merges += rng.choices(merges, k=rng.randint(0, 1))
    if rng.random() < 0.5:
        merges = [" ".join(pair) for pair in merges]
    ids = rng.sample(range(len(texts)), len(texts))
    return chars, spec(dict(zip(texts, ids)), merges, ignore_merges=rng.random() < 0.4)


def test_random_merges_equal_the_tokenizers_library(tmp_path):
    counts = dict(Ranks=0, Library=0, out_of_reach=0)
    for seed in range(150):
        rng = random.Random(seed)
        chars, content = random_spec(rng)
        ours, theirs = both(tmp_path, content)
        texts = ["".join(t) for n in range(1, 5)
                 for t in itertools.product(chars, repeat=n)]
        texts += ["".join(rng.choices(chars, k=rng.randint(9, 600))) for _ in range(3)]
        for text in texts:
            assert ours.encode(text) == theirs.encode(text).ids, (seed, text)
        counts[type(ours.engine).__name__] += 1
        counts["out_of_reach"] += any(len(ours.encode(t)) > 1
                                      for t in content["model"]["vocab"])
    assert counts["Ranks"] > 40 and counts["Library"] > 40 and counts["out_of_reach"] > 35


@pytest.mark.parametrize("mark", ("##", "###"))
def test_an_added_token_of_the_vocabulary_is_not_in_text(tmp_path, mark):
    """Whichever engine runs where whole pieces are tokens. The control: the library."""
    ours, theirs = both(tmp_path, spec(["#", "a", mark], (), [dict(id=2, content=mark)],
                                       ignore_merges=True))
    assert type(ours.engine).__name__ == "Ranks"
    assert ours.encode(f"a{mark}") == [1] + [0] * len(mark)
    assert ours.encode(f"a{mark}", special=True) == theirs.encode(f"a{mark}").ids == [1, 2]


def test_ids_without_a_token(tmp_path):
    end = dict(id=3, content="<e>")
    ours, theirs = both(tmp_path, spec({"a": 0, "b": 1, "ab": 6}, ["a b"], [end]))
    assert ours.encode("ab<e>", special=True) == theirs.encode("ab<e>").ids == [6, 3]
    assert len(ours) == 7 and ours.absent == [2, 4, 5]
    full, _ = both(tmp_path, spec(["a", "b", "ab"], ["a b"], [end]))
    assert full.absent == []


def test_decode_without_special_tokens(tmp_path):
    """By id: what only looks like a token stays, and so do the marks of a thought."""
    texts = ["<s>", "</s>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<tool>"]
    added = [dict(id=4 + i, content=t, special=t != "<tool>") for i, t in enumerate(texts)]
    content = spec([*"ab<>"], added=added)
    save(tmp_path, generation_config={"eos_token_id": [5, 1]})
    tok, _ = both(tmp_path, content)
    ids = [4, 0, 7, 2, 0, 3, 8, 9, 6, 1, 5]
    assert tok.decode(ids) == "<s>a<think><a></think><tool><｜end▁of▁sentence｜>b</s>"
    assert tok.decode(ids, special=False) == "a<think><a></think><tool>"  # b is a stop token too


@pytest.mark.parametrize("nested", (False, True))
def test_bos_of_a_base_model(tmp_path, nested):
    """What post_processor puts in front; what it puts behind would end the prompt."""
    def puts(*single, of=258):
        tokens = {t: dict(id=t, ids=[i], tokens=[t]) for t, i in (("<s>", of), ("</s>", 259))}
        post = dict(type="TemplateProcessing", single=single, pair=single, special_tokens=tokens)
        if nested:
            post = dict(type="Sequence", processors=[BYTES, post])
        return both(tmp_path, content | dict(post_processor=post))

    added = [dict(id=258, content="<s>"), dict(id=259, content="</s>")]
    content = spec([*tokenizer_py.BYTE_OF, "an", "ans"], ["a n", "an s"], added)
    front, behind = ({"SpecialToken": dict(id=t, type_id=0)} for t in ("<s>", "</s>"))
    text = {"Sequence": dict(id="A", type_id=0)}
    ours, theirs = puts(front, text)
    assert ours.bos_ids == (258,)
    assert prompt_encoder(ours)("ans") == theirs.encode("ans\nAnswer:").ids
    assert ours.encode("ans") == theirs.encode("ans").ids[1:]
    ours, theirs = puts(text, behind)
    assert ours.bos_ids == () and theirs.encode("ans").ids[-1] == 259
    with refused("post_processor puts id 999 in front"):
        puts(front, text, of=999)
    content["post_processor"] = dict(type="BertProcessing", sep=["</s>", 259], cls=["<s>", 258])
    assert both(tmp_path, content)[0].bos_ids == (258,)


# Qwen3 and Llama 3.2: templates that do what theirs do, and theirs where the folder of real weights
# holds templates/qwen3.jinja and templates/llama-3.2.jinja

QWEN3 = """
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.reasoning_content and loop.last %}
        {%- set said = '<think>\n' + m.reasoning_content + '\n</think>\n\n' + m.content %}
    {%- elif m.role == 'assistant' and loop.last %}
        {%- set said = '<think>\n\n</think>\n\n' + m.content %}
    {%- else %}
        {%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ said ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if not enable_thinking | default(true) %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA32 = """
{{- bos_token }}
{%- if date_string is undefined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- set system = '' %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- macro turn(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\n\n' }}{% endmacro %}
{{- turn('system') ~ 'Cutting Knowledge Date: December 2023\nToday Date: ' ~ date_string }}
{{- '\n\n' ~ system ~ '<|eot_id|>' }}
{%- for m in messages %}{{ turn(m.role) ~ m.content | trim ~ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}{% endif %}"""
FAMILIES = {  # template, pattern, added tokens, those that stop, BOS, end of a turn
    "qwen3": (QWEN3, QWEN, "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call>",
              "<|im_end|> <|endoftext|>", None, "<|im_end|>"),
    "llama-3.2": (LLAMA32, LLAMA3, "<|begin_of_text|> <|end_of_text|> <|start_header_id|> "
                  "<|end_header_id|> <|eom_id|> <|eot_id|>",
                  "<|end_of_text|> <|eom_id|> <|eot_id|>", "<|begin_of_text|>", "<|eot_id|>"),
}
SAMPLES = {  # messages, arguments of the template
    "a question": ([dict(role="user", content="What is 17 + 4?")], {}),
    "a system prompt": ([dict(role="system", content=" Be brief. "), TALK[0]], {}),
    "several turns": ([*TALK], {}),
    "an answer last": (TALK[:2], dict(add_generation_prompt=False)),
    "white space": ([dict(role="user", content="  a\n\n")], {}),
    "thinks": (TALK, dict(enable_thinking=True)),
    "does not think": (TALK, dict(enable_thinking=False)),
    "a thought": ([TALK[0], dict(role="assistant", content="21", reasoning_content="17 + 4")],
                  dict(add_generation_prompt=False)),
    "a past thought": ([TALK[0], dict(role="assistant", content="<think>\n17\n</think>\n\n21"),
                        TALK[0]], {}),
    "a thought in the last answer": ([TALK[0], dict(
        role="assistant", content="<think>\n17\n</think>\n\n21")], {}),
    "an empty system prompt": ([dict(role="system", content=""), TALK[2]], {}),
    "another day": (TALK, dict(date_string="01 Jan 2025")),
}


def families(*names):
    """Runs a test with the fixture `family` for each, with our template and with theirs."""
    params = [(name, whose) for name in names for whose in ("ours", "theirs")]
    return pytest.mark.parametrize("family", params, ids="-".join, indirect=True)


@pytest.fixture
def family(request, tmp_path):
    """A small tokenizer with a family's pattern, added tokens and files. -> name, folder"""
    name, whose = request.param
    template, pattern, added, stops, bos, end = FAMILIES[name]
    if whose == "theirs":
        file = os.path.join(REAL or "", "templates", f"{name}.jinja")
        if not REAL or not os.path.exists(file):
            pytest.skip("SMD_REAL_WEIGHTS names no folder with templates")
        template = read(file)
    ids = {text: 256 + i for i, text in enumerate(added.split())}
    special = {text: not text.startswith(("<th", "</th", "<tool")) for text in ids}
    content = spec([*tokenizer_py.BYTE_OF], (), [
        dict(id=i, content=text, special=special[text]) for text, i in ids.items()])
    cut = dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated",
               invert=False)
    content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[
        cut, BYTES])
    config = dict(tokenizer_class="PreTrainedTokenizerFast",
                  eos_token=end, chat_template=template)
    if bos:
        first, text = dict(id=bos, type_id=0), dict(id="A", type_id=0)
        content["post_processor"] = dict(
            type="TemplateProcessing", single=[{"SpecialToken": first}, {"Sequence": text}],
            pair=[{"Sequence": text}], special_tokens={
                bos: dict(id=bos, ids=[ids[bos]], tokens=[bos])})
        config["bos_token"] = bos
    else:
        content["normalizer"] = {"type": "NFC"}
    stops = [ids[text] for text in stops.split()]
    save(tmp_path, tokenizer=content, tokenizer_config=config,
         config=dict(model_type="llama", eos_token_id=stops[0]),
         generation_config=dict(eos_token_id=stops))
    return name, str(tmp_path)


@families(*FAMILIES)
def test_families_equal_transformers(family):
    """Ids of every sample that the template has arguments for, Llama's with a fixed day; they begin
    once and stop where they should."""
    name, folder = family
    _, _, _, stops, bos, end = FAMILIES[name]
    tok, hf = Tokenizer(folder), by_transformers(folder)
    assert tok.stop_ids == tuple(sorted(tok.added[text] for text in stops.split()))
    assert tok.notes == [] and tok.bos_ids == ((tok.added[bos],) if bos else ())
    assert {"qwen3": "enable_thinking",
            "llama-3.2": "date_string"}[name] in tok.template.variables
    seen = []
    for what, (talk, arguments) in SAMPLES.items():
        if arguments.keys() - {"add_generation_prompt"} - tok.template.variables:
            with refused("the chat template takes no argument"):
                tok.chat(talk, **arguments)
            continue
        if name == "llama-3.2":
            arguments = dict(date_string="26 Jul 2024") | arguments
        theirs = rendered(hf, talk, **dict(add_generation_prompt=True) | arguments)
        assert tok.chat(talk, **arguments) == theirs, what
        assert theirs[0] == tok.added[bos or "<|im_start|>"]
        assert not bos or theirs.count(tok.added[bos]) == 1
        seen.append(theirs)
    assert len({tuple(ids) for ids in seen}) == len(seen) - (name == "qwen3")  # thinks: the default
    turns = tok.chat(TALK, add_generation_prompt=False)
    assert turns.count(tok.added[end]) == len(TALK) + (name == "llama-3.2")  # its system prompt
    ask = prompt_encoder(tok)
    twice = ask(f"{bos or '<|im_start|>'} a {end}")  # said by the user
    assert all(twice.count(i) == ask("a").count(i) for i in tok.added.values())


@families("llama-3.2")
def test_the_day_of_a_prompt_is_fixed(family):
    """Llama 3.2 writes today's date into every prompt: here it is the same on every day, so that a
    resumed run goes on with the prompts that it began with."""
    _, folder = family
    tok, hf = Tokenizer(folder), by_transformers(folder)
    ids = prompt_encoder(tok)("a")
    assert "\nToday Date: 26 Jul 2024\n\n" in tok.decode(ids)
    assert ids == prompt_encoder(tok, dict(date_string="26 Jul 2024"))("a")
    assert "\nToday Date: 01 Jan 2025\n\n" in tok.decode(
        prompt_encoder(tok, dict(date_string="01 Jan 2025"))("a"))
    # the control: transformers writes the day on which it is asked
    assert rendered(hf, [dict(role="user", content="a")],
                    add_generation_prompt=True) != ids


@families("qwen3")
def test_what_qwen3_begins_with(family):
    """With a thought that its prompt leaves to it, or behind one that is empty; past thoughts are
    cut."""
    _, folder = family
    tok = Tokenizer(folder)
    thought = [tok.added["<think>"], tok.added["</think>"]]
    on, off = (prompt_encoder(tok, dict(enable_thinking=b)) for b in (True, False))
    assert not set(thought) & set(on("a")) and [i for i in off("a")
                                                if i in thought] == thought
    assert off("a")[:len(on("a"))] == on("a")
    assert not opens_thought(tok, on) and not opens_thought(tok, off)
    said = [TALK[0], dict(role="assistant", content="<think>\n17 + 5\n</think>\n\n21"), TALK[0]]
    ids = tok.chat(said)
    assert not set(thought) & set(ids) and "\n21<|im_end|>" in tok.decode(ids)
    assert "17 + 5" not in tok.decode(ids) and "17 + 5" in tok.decode(tok.chat(said[:2]))


# what may stand in the files

def added_token(**change):
    return lambda d: d["added_tokens"][0].update(change)


def vocabulary(**entries):
    """Replaces the last entry, which is part of no other."""
    def edit(d):
        vocab = d["model"]["vocab"]
        gone = max(vocab, key=vocab.get)
        del vocab[gone]
        d["model"]["merges"] = [m for m in d["model"]["merges"]
                                if gone not in (*m, m[0] + m[1])]
        d["model"]["vocab"] |= entries
    return edit


def model(**change):
    return lambda d: d["model"].update(change)


def pre(**step):
    return lambda d: d.update(pre_tokenizer=step)


def split(pattern, behavior="Isolated", invert=False, use_regex=False):
    step = dict(type="Split", pattern=pattern, behavior=behavior, invert=invert)
    return pre(type="Sequence", pretokenizers=[step, BYTES | {"use_regex": use_regex}])


BYTES = {"type": "ByteLevel", "add_prefix_space": False,
         "use_regex": False, "trim_offsets": True}
LOWERCASE = {"type": "Sequence",
             "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
REFUSED = {  # what the error says: the kind whose file is changed, the change that earns it
    "model type WordLevel is not": ("gpt2", lambda d: d.update(
        model=dict(type="WordLevel", vocab={"a": 0}, unk_token="a"))),
    "end_of_word_suffix='</w>' is": ("gpt2", model(end_of_word_suffix="</w>")),
    "dropout=0.1": ("gpt2", model(dropout=0.1)),
    "byte_fallback=true is not": ("gpt2", model(byte_fallback=True)),
    "byte_fallback=false is not supported for a pre_tokenizer without":
        ("gpt2", pre(type="Metaspace", replacement="▁", prepend_scheme="always", split=True)),
    "without ByteLevel": ("gpt2", lambda d: d.update(pre_tokenizer=None)),
    "Whitespace": ("gpt2", pre(type="Whitespace")),
    "Removed": ("gpt2", split({"Regex": "a"}, "Removed", invert=True)),
    "unk_token '<|endoftext|>' in place of": ("digits", model(unk_token="<|endoftext|>")),
    "and 'qz' both have id 5": ("llama3", vocabulary(qz=5)),
    "has id 4194304, must be below": ("llama3", vocabulary(qz=2**22)),
    "'<|endoftext|>' has lstrip": ("llama3", added_token(lstrip=True)),
    "rstrip": ("llama3", added_token(rstrip=True)),
    "single_word": ("llama3", added_token(single_word=True)),
    "'type' is missing": ("gpt2", lambda d: d.update(normalizer={"normalizers": []})),
    "cannot read it: data did": ("gpt2", lambda d: d.update(normalizer={"type": "Nobodys"})),
    "cannot read it: Token `zzz`": ("gpt2", lambda d: d["model"]["merges"].append(["zzz", "a"])),
    "cannot read it: Missing": ("gpt2", lambda d: d["model"].pop("merges")),
    "token <0x0A> is not": ("llama2", lambda d: d["model"]["vocab"].update(
        {"<0x0G>": d["model"]["vocab"].pop("<0x0A>")})),
    "decoder is missing": ("mistral", lambda d: d.pop("decoder")),
}
def shuffle(d):
    """Ids need not follow the merge order."""
    tokens = [t for t in d["model"]["vocab"] if t not in SPECIALS]
    ids = [d["model"]["vocab"][t] for t in tokens]
    random.Random(0).shuffle(ids)
    d["model"]["vocab"] |= dict(zip(tokens, ids))


READ = {  # what the tokenizers library reads: is it still of a kind that tiktoken runs?
    "a token beyond the alphabet": (vocabulary(**{"▁the": 899}), False),
    "a token that no merge makes": (vocabulary(qz=899), False),
    "a long token": (vocabulary(**{"q" * 20_000: 899}), True),
    "shuffled ids": (shuffle, True),
    "a pattern with gaps": (split({"Regex": r"\p{L}+"}), True),
    "use_regex": (split({"Regex": "a"}, use_regex=True), False),
    "a text to split at": (split({"String": "a"}), False),
    "merged with the next": (split({"Regex": "[ae]"}, "MergedWithNext", invert=True), False),
    "a space in front": (pre(**BYTES | {"add_prefix_space": True, "use_regex": True}), False),
    "Lowercase": (lambda d: d.update(normalizer=LOWERCASE), False),
    "NFKC": (lambda d: d.update(normalizer={"type": "NFKC"}), False),
}


@pytest.mark.parametrize("what", READ)
def test_reads_what_the_library_reads(folders, tmp_path, what):
    edit, by_tiktoken = READ[what]
    path = edited(folders["llama3"], tmp_path, edit=edit)
    tok, hf = Tokenizer(path), by_transformers(path)
    assert (type(tok.engine).__name__ == "Ranks") == by_tiktoken
    texts = ["I said qz", "qqq" * 9999, *strings(100, seed=9, specials=SPECIALS)]
    assert differing(tok, hf, texts) == []
    added = {*tok.added.values()}
    assert not any(added & {*tok.encode(text)} for text in [*texts, "<|IM_END|>"])


@pytest.mark.parametrize("says", REFUSED)
def test_refuses_by_name(folders, tmp_path, says):
    kind, edit = REFUSED[says]
    with pytest.raises(ValueError) as e:
        Tokenizer(edited(folders[kind], tmp_path, edit=edit))
    assert says in str(e.value) and "\n" not in str(e.value)
    assert str(e.value).startswith(f"{tmp_path}/tokenizer.json: ")


@pytest.mark.parametrize("template, says", [
    (7, "chat_template is 7, must be text"), ([7], "'int' object"), ([{"name": 5}], "name must be"),
    ([{"name": "default"}], "template is missing"), ({}, "an object, must be text")])
def test_templates_that_are_none(folders, tmp_path, template, says):
    path = edited(folders["gpt2"], tmp_path, "tokenizer_config", chat_template=template)
    with refused(f"tokenizer_config.json: [^\n]*{says}"):
        Tokenizer(path)


def test_missing_and_broken_files(tmp_path):
    both(tmp_path, spec())
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with refused("tokenizer.json is not valid JSON"):
        Tokenizer(str(tmp_path))
    with open(file, "wb") as f:
        f.truncate(2 ** 31)  # takes no room on disk
    with refused("tokenizer.json has 2,147,483,648 bytes"):
        Tokenizer(str(tmp_path))
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        Tokenizer(str(tmp_path))
    os.mkfifo(file)
    with pytest.raises(FileNotFoundError, match="tokenizer.json .* is not a regular file"):
        Tokenizer(str(tmp_path))


def test_command_line(folders, tmp_path, capsys):
    tokenizer_py.main(folders["qwen"], "the key", "<|im_end|>")
    out = capsys.readouterr().out
    assert "tokens -> 'the key <|im_end|>'" in out and "'<|im_end|>'" in out.splitlines()[0]
    path = edited(folders["qwen"], tmp_path, edit=lambda d: d.pop("model"))
    with pytest.raises(SystemExit, match="error: .*tokenizer.json: .*cannot read it"):
        tokenizer_py.main(path)


