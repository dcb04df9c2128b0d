"""
Text to token ids and back for byte-level BPE checkpoints (GPT-2, Llama 3, Qwen2/2.5/3,
SmolLM2), and the chat template.

    python -m data.tokenizer FOLDER [TEXT]      # show the pieces of a line of text

The idea. `tokenizer.json` says three things: how text is cut into pieces (a regex), which
pairs of tokens merge (in this order), and which texts are tokens of their own (added
tokens, such as <|im_end|>). tiktoken runs the regex and the merges from one table of ranks;
this file builds that table and refuses by name whatever it would compute differently.

What differs from transformers' AutoTokenizer on purpose:
- text that spells an added token stays text unless special=True: what a user or a data set says
  must not end a turn.
- nothing is put in front or behind; a chat template writes its own BOS, and a second one is a
  classic mistake.
- lone surrogates, on which transformers raises, become U+FFFD; surrogate pairs become their
  character.

What may differ on rare input: bytes that the vocabulary lacks (SmolLM2: 21 of 256, control
characters mostly) are dropped after merging, not before; runs of white space are cut every
262,144 characters (tiktoken's regex overflows at a million); the tables that say what is a
letter or composes under NFC are tiktoken's and Python's.

Left out: sentencepiece and word-piece models, training, offsets, padding, truncation.

References: BPE (arXiv 1508.07909), GPT-2's byte alphabet and pattern, tiktoken, chat
templates as transformers renders them.
"""
import datetime
import json
import os
import re
import sys
import unicodedata

import tiktoken

from model import find_checkpoint

# tokenizer.json writes each byte as one character: itself where it is printable, else
# U+0100 onwards in byte order
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# digits are cut out one by one first, then GPT-2's pattern runs between them: a run of
# spaces before a digit stays whole
DIGITS_THEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# characters; a power of two, so that a cut falls between the vocabulary's longest runs of
# spaces
LONGEST_SPACE = 2 ** 18


class Tokenizer:
    """`Tokenizer(path)`: the tokenizer of a checkpoint, from a folder or from the hub
    repository of that name.

    len(tok): usable ids (largest + 1), to which `model.vocab_used` can be lowered;
    stop_ids: ids that end a response; has_chat: is there a chat template; added: text -> id
    of the added tokens; bytes: id -> bytes of every token. Raises FileNotFoundError without
    a tokenizer.json, ValueError for a tokenizer that this file would run wrongly."""

    def __init__(self, path):
        path = find_checkpoint(path)
        spec = read_json(path, "tokenizer.json")
        config = read_json(path, "tokenizer_config.json", {})
        if not spec:
            raise FileNotFoundError(f"{path} holds no tokenizer.json "
                                    "(a sentencepiece tokenizer.model alone is not supported)")
        try:
            check_model(spec["model"])
            pattern = read_pattern(spec.get("pre_tokenizer"))
            self.nfc = read_normalizer(spec.get("normalizer"))
            self._read_added(spec.get("added_tokens") or [])
            tokens = self._read_merges(spec["model"])  # rank -> bytes
            ranks = {t: rank for rank, t in enumerate(tokens)}
            self.bpe = tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks=ranks,
                                         special_tokens={})
            self.named = {k: v["content"] if isinstance(v, dict) else v
                          for k, v in config.items() if k.endswith("_token") and v}
            self.stop_ids = self._read_stop_ids(path)
            self.template = read_template(path, config)
        # whatever may stand in a JSON file
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            why = " ".join(str(e).split())
            if isinstance(e, KeyError):
                why = f"{e} is missing"
            raise ValueError(f"tokenizer of {path}: {why}") from None

    def _read_added(self, tokens):
        for t in tokens:
            for option in ("lstrip", "rstrip", "single_word"):
                if t.get(option):
                    raise ValueError(f"added token {t['content']!r} has {option}, "
                                     "which is not supported")
        # tokens marked `normalized` are looked for, normalised, in the normalised text,
        # the others before normalising
        late = {t["content"]: unicodedata.normalize("NFC", t["content"])
                for t in tokens if self.nfc and t.get("normalized")}
        self.added = {late.get(t["content"], t["content"]): t["id"] for t in tokens}
        late = set(late.values())
        self.cut_early, self.cut_late = cutter(self.added.keys() - late), cutter(late)

    def _read_merges(self, model):
        # added tokens stay out of the ranks, even where the vocabulary lists them: no merge
        # may produce one
        vocab = {t: i for t, i in model["vocab"].items() if t not in self.added}
        odd = [t for t in vocab if not t or set(t) - BYTE_OF.keys()]
        if odd:
            raise ValueError(f"vocabulary entry {odd[0]!r} is not byte-level BPE "
                             "(a sentencepiece model?)")
        # a token's rank is its place in the list of merges. In the families named at the
        # top ids have the same order, but nothing here needs that: self.ids maps ranks to
        # ids. Llama 3 lists every split of a token: the first counts
        merges = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        merged = [a + b for a, b in merges if a + b not in self.added]
        order = dict.fromkeys([t for t in vocab if len(t) == 1] + merged)
        unmade, unknown = vocab.keys() - order.keys(), order.keys() - vocab.keys()
        for what, odd in (("no merge makes", unmade), ("the vocabulary lacks", unknown)):
            if odd:
                raise ValueError(f"{what} token {min(odd)!r} ({len(odd)} such)")
        tokens = [bytes(BYTE_OF[c] for c in t) for t in order]
        self.ids = [vocab[t] for t in order]  # rank -> id
        self.bytes = dict(zip(self.ids, tokens)) | {i: t.encode() for t, i in self.added.items()}
        # tiktoken panics on a byte that it has no token for: absent bytes get ranks past
        # the vocabulary, and no id
        absent = sorted({bytes([b]) for b in range(256)} - set(tokens))
        if absent and model.get("unk_token"):
            raise ValueError(f"unk_token {model['unk_token']!r} in place of {len(absent)} "
                             "absent bytes is not supported")
        self.ids += [None] * len(absent)
        return tokens + absent

    def _read_stop_ids(self, path):
        # a set: Qwen2.5-Instruct ends a turn with <|im_end|> and a document with
        # <|endoftext|>
        stops = set()
        for file in ("generation_config.json", "config.json"):
            ids = read_json(path, file, {}).get("eos_token_id")
            if isinstance(ids, list):
                stops |= set(ids)
            elif ids is not None:
                stops.add(ids)
        eos = self.named.get("eos_token")
        if eos:
            stops.add(self.added.get(eos))
        odd = stops - self.bytes.keys()
        if odd:
            missing = eos if None in odd else odd.pop()
            raise ValueError(f"end-of-text token {missing!r} is not in tokenizer.json")
        return tuple(sorted(stops))

    def __len__(self):
        return max(self.bytes) + 1

    def encode(self, text, special=False):
        """text -> ids, nothing added. special=True turns text that spells an added token into
        that token's id."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        added, ids = (self.added if special else {}), []
        for part in self.cut_early(text) if special else [text]:
            # part by part, or a combining mark behind <|im_end|> would compose with its ">"
            # and undo the token
            if self.nfc and part not in added:
                part = unicodedata.normalize("NFC", part)
            for piece in self.cut_late(part) if special else [part]:
                ids += [added[piece]] if piece in added else self._merge(piece)
        return ids

    def _merge(self, text):
        ranks = []
        for piece in cut_space(text):
            try:
                ranks += self.bpe.encode_ordinary(piece)
            except BaseException as e:
                # a Rust panic is no Exception, and its class cannot be imported
                if type(e).__name__ != "PanicException":
                    raise
                raise ValueError(f"tiktoken cannot split this text of {len(text)} characters: "
                                 f"{e}") from None
        return [self.ids[r] for r in ranks if self.ids[r] is not None]

    def decode(self, ids):
        """ids -> text, special tokens included; bytes that are no UTF-8 become U+FFFD.
        ValueError for an id without a token."""
        try:
            return b"".join(self.bytes[int(i)] for i in ids).decode("utf-8", "replace")
        except KeyError as e:
            raise ValueError(f"no token has id {e}: ids end at {len(self) - 1}") from None

    @property
    def has_chat(self):
        return self.template is not None

    def chat(self, messages, add_generation_prompt=True):
        """messages, a list of {"role", "content"} -> ids of the rendered chat template,
        special tokens recognised.

        The template decides all: Qwen2.5 and SmolLM2 write a system prompt of their own if
        `messages` has none. Special tokens spelled in a message's content become special
        ids, as in transformers. Raises ValueError without a template or when the template
        refuses the messages."""
        if not self.has_chat:
            raise ValueError("this checkpoint has no chat template")
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt,
                tools=None, documents=None, **self.named)
        except Exception as e:  # a template is a program: whatever it does wrong is its fault
            raise ValueError(f"chat template: {' '.join(str(e).split())}") from None
        return self.encode(text, special=True)


def read_json(path, name, default=None):
    file = os.path.join(path, name)
    if not os.path.exists(file):
        return default
    with open(file, encoding="utf-8") as f:
        try:
            return json.load(f)
        except ValueError as e:
            raise ValueError(f"{file} is not valid JSON: {e}") from None


def check_model(model):
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{model.get('type')} model with byte_fallback="
                         f"{model.get('byte_fallback')} is not byte-level BPE "
                         "(sentencepiece tokenizers are not supported)")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"BPE option {option}={model[option]!r} is not supported")


def read_pattern(pre):
    """The pre_tokenizer of tokenizer.json -> the one regex that finds the same pieces.
    Raises ValueError for any other kind."""
    steps = flat(pre, "pretokenizers")
    steps = [{"use_regex": True, **s} if s["type"] == "ByteLevel" else s for s in steps]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return DIGITS_THEN_GPT2
        case [{"type": "Split", "pattern": {"Regex": pattern},
               "behavior": "Isolated", "invert": False},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            # Isolated keeps what the pattern does not match as pieces of their own, where
            # tiktoken would drop it
            return rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+"
    raise ValueError(f"pre_tokenizer {json.dumps(pre)[:200]} is not supported")


def read_normalizer(norm):
    """True for NFC, False for none. Raises ValueError for any other kind."""
    kinds = [s["type"] for s in flat(norm, "normalizers")]
    if set(kinds) - {"NFC"}:
        raise ValueError(f"normalizer {kinds} is not supported (NFC is)")
    return bool(kinds)


def flat(step, key):
    """A step of tokenizer.json, a Sequence of steps or null -> list of steps."""
    if not step:
        return []
    return step[key] if step["type"] == "Sequence" else [step]


def read_template(path, config):
    """The compiled chat template, or None: chat_template.jinja, else the (default) one of
    tokenizer_config.json."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {t["name"]: t["template"] for t in source}.get("default")
    file = os.path.join(path, "chat_template.jinja")
    if os.path.exists(file):
        with open(file, encoding="utf-8") as f:
            source = f.read()
    if source is None:
        return None

    def raise_exception(message):
        raise TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    def tojson(x, indent=None):  # jinja2's own escapes HTML
        return json.dumps(x, ensure_ascii=False, indent=indent)

    # a template is a program from the internet: sandboxed, and it cannot change what it is handed
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    env.filters["tojson"] = tojson
    try:
        return env.from_string(source)
    except TemplateError as e:
        raise ValueError(f"chat template cannot be read: {e}") from None


def cutter(tokens):
    """A function that cuts text at the leftmost, then longest, of `tokens`: -> the non-empty
    parts, tokens among them."""
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def whole(text):
        return [text]

    def cut(text):
        return [part for part in pattern.split(text) if part]

    return cut if tokens else whole


def cut_space(text):
    """text in parts without more than LONGEST_SPACE white-space characters in a row."""
    cuts = [0]
    if len(text) > LONGEST_SPACE:
        for run in re.finditer(r"\s+", text):
            cuts += range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE)
    return [text[a:b] for a, b in zip(cuts, cuts[1:] + [len(text)])]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m data.tokenizer FOLDER_OR_HUB_NAME [TEXT]")
    tok = Tokenizer(sys.argv[1])
    text = " ".join(sys.argv[2:])
    ids = tok.encode(text or "Every key has a lifetime: it's born at 17, it dies at 4096.  🙂")
    stops = [tok.decode([i]) for i in tok.stop_ids]
    print(f"{len(tok):,} ids, {len(tok.added)} of them added, chat template: {tok.has_chat}, "
          f"stops at {stops}")
    for i in ids:
        print(f"{i:8d}  {tok.bytes[i]!r}")
    print(f"{len(ids)} tokens -> {tok.decode(ids)!r}")
