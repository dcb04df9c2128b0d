"""
Text to token ids and back, as tokenizer.json says, and the chat template.

    python -m data.tokenizer FOLDER [TEXT]      # show the pieces of a line of text

The idea. `tokenizer.json` says how text is normalised and cut into pieces, which pairs of tokens
merge (in this order), and which texts are tokens of their own (added tokens, such as <|im_end|>).
The tokenizers library reads and checks it. Byte-level BPE (GPT-2, Llama 3, Qwen2/2.5/3, SmolLM2)
runs in tiktoken: a regex and one table of ranks, which this file builds. Any other BPE (Llama 2,
Mistral, and byte-level ones whose pieces no regex here finds) runs in the tokenizers library.
Either engine is built without the added tokens, so that no text can become one; this file looks
for them.

What differs from transformers' AutoTokenizer on purpose:
- text that spells an added token stays text unless special=True, and so does what a message says:
  only the chat template's own text ends a turn. An assistant's thought is one, though: <think> and
  </think> in its messages are the tokens.
- encode puts nothing in front; a chat template writes its own BOS, and a second one is a classic
  mistake. What post_processor puts in front is `bos_ids`, for prompts without a template; what it
  puts behind is left out, as the response follows.
- a token with which the template ends a turn is a stop token, whatever the checkpoint says.
- a template's strftime_now is always DATE, and it has no random filter: a prompt does not depend on
  the day.
- added tokens are looked for in the text as it stands, also those that are marked `normalized`.
- lone surrogates, on which transformers raises, become U+FFFD; surrogate pairs become their
  character.

What may differ on rare input to tiktoken: bytes that the vocabulary lacks (SmolLM2: 21 of 256,
control characters mostly) are dropped after merging, not before; runs of white space are cut every
262,144 characters (its regex overflows at a million); what is a letter its own tables say.

A template is a program, and may hang or want all memory: it runs in a process of its own, with
limits that it cannot reach (support/apart.py).

Left out: models that are no BPE, a tokenizer.model without tokenizer.json, BPE that drops a
character or has a token for unknown ones, training, offsets, padding, truncation.

References: BPE (arXiv 1508.07909), GPT-2's byte alphabet and pattern, tiktoken, tokenizers, chat
templates as transformers renders them.
"""
import datetime
import itertools
import json
import os
import re
import sys
from contextlib import contextmanager

import tiktoken
import tokenizers

from support.apart import Apart, Exceeds
from support.hub import find_checkpoint
from support.jsonfile import entry, read_json, read_text, reason, shown
from support.screen import muted, one_line_errors

# byte-level BPE writes each byte as one character: itself where it is printable, else U+0100
# onwards in byte order
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTE_OF = {chr(b): b for b in PRINTABLE}
BYTE_OF |= {chr(256 + n): b for n, b in enumerate(OTHERS)}

NFC = tokenizers.normalizers.NFC().normalize_str
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# digits are cut out one by one first, then GPT-2's pattern runs between them: a run of spaces
# before a digit stays whole
DIGITS_THEN_GPT2 = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
                    r"|\s+(?![^\s\p{N}])|\s+")
CUTS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")  # which keep all of a text
# characters; a power of two, so that a cut falls between the vocabulary's longest runs of spaces
LONGEST_SPACE = 2 ** 18

# far above what real checkpoints have, low enough that reading ends soon and in 1 GB
MOST_IDS = 2 ** 22
MOST_TEXT = 2 ** 25  # characters that a template may write

DATE = datetime.datetime(2024, 7, 26)  # today, for templates: the day Llama 3.2's falls back on
THOUGHT = ("<think>", "</think>")      # stay in every text: they tell thought and answer apart


class Tokenizer:
    """`Tokenizer(path)`: the tokenizer of a checkpoint, from a folder or from the hub repository of
    that name. template_file: a chat template in place of the checkpoint's.

    len(tok): usable ids (largest + 1), to which `model.vocab_used` can be lowered; absent: ids
    below that without a token; stop_ids: ids that end a response; bos_ids: ids that begin a prompt
    without chat template; has_chat: is there a chat template; added: text -> id of the added
    tokens; bytes: id -> bytes of every token; notes: lines that a user should read. Raises
    FileNotFoundError without a tokenizer.json, ValueError, which names file and key, for a
    tokenizer that this file would run wrongly."""

    def __init__(self, path, template_file=""):
        path = find_checkpoint(path)
        file = os.path.join(path, "tokenizer.json")
        if not os.path.exists(file):
            raise FileNotFoundError(f"{path} holds no tokenizer.json (a sentencepiece "
                                    "tokenizer.model alone is not supported)")
        spec = read_json(file)
        self.notes = []
        with naming(path, "tokenizer.json"):
            library = load(spec)  # what transformers cannot read is refused here
            self._read_added(library.get_added_tokens_decoder())
            self.decoder = None  # of the tokenizers library, for what is not byte-level
            self.engine = self._read_model(spec, library)
            self.engine("a 1.", first=True)  # does its pattern find empty pieces?
            self.bos_ids = self._read_bos(spec.get("post_processor"))
        config = read_json(os.path.join(path, "tokenizer_config.json"), {})
        self.named = read_named(config)
        self.stop_ids = self._read_stop_ids(path)
        self.template = read_template(path, config, os.path.expanduser(template_file))
        self.has_chat = self.template is not None
        self._stop_at_turns()

    def _read_added(self, tokens):
        """tokens: id -> AddedToken of the tokenizers library"""
        self.added = {token.content: i for i, token in tokens.items()}
        for text, i in self.added.items():
            for option in ("lstrip", "rstrip", "single_word"):
                if getattr(tokens[i], option):
                    raise ValueError(f"added token {text!r} has {option}, which is not "
                                     "supported")
        # ids that decode(special=False) leaves out, besides stop tokens
        self.hidden = {i for i, token in tokens.items()
                       if token.special and token.content not in THOUGHT}
        self.cut = either_of(self.added)
        self.control = either_of(text for text in self.added
                                 if text not in THOUGHT and text.strip())

    def _read_model(self, spec, library):
        """-> what encodes: engine(text, first) -> ids. first: with text the given one begins."""
        bpe = library.model
        check_model(bpe, spec["model"]["vocab"], self.added)
        steps = flat(spec.get("pre_tokenizer"), "pretokenizers")
        for step in steps:
            if step["type"] not in CUTS or step.get("behavior") == "Removed":
                step = json.dumps(step)[:200]
                raise ValueError(f"pre_tokenizer {step} is not supported")
        byte_level = any(step["type"] == "ByteLevel" for step in steps)
        # no merge may make an added token, even where the vocabulary lists it
        vocab = {t: i for t, i in spec["model"]["vocab"].items() if t not in self.added}
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair)
                  for pair in spec["model"]["merges"]]
        merges = [pair for pair in merges
                  if not {*pair, "".join(pair)} & self.added.keys()]
        absent = absent_bytes(vocab, byte_level, bpe.byte_fallback)
        if absent and bpe.unk_token:
            raise ValueError(f"unk_token {shown(bpe.unk_token)} in place of "
                             f"{len(absent)} absent bytes is not supported")
        self.bytes = {i: spelled_bytes(t, byte_level) for t, i in vocab.items()}
        self.bytes |= {i: t.encode("utf-8", "replace") for t, i in self.added.items()}
        if not self.bytes:
            raise ValueError("vocab is empty")
        normal = flat(spec.get("normalizer"), "normalizers")
        normal = [step["type"] for step in normal]
        self.nfc = normal == ["NFC"]
        pattern = read_pattern(steps)
        if pattern and normal in ([], ["NFC"]):
            order = rank_tokens(vocab, merges, bpe.ignore_merges)
            if order is not None:
                return Ranks(pattern, vocab, order, absent)
        if not byte_level:
            if library.decoder is None:
                raise ValueError("decoder is missing")
            self.decoder = library
        model = dict(spec["model"], vocab=vocab, merges=merges, unk_token=None)
        return Library(dict(spec, added_tokens=[], model=model))

    def _read_bos(self, post):
        """post_processor -> ids that it puts in front of a text"""
        model = dict(type="BPE", vocab=dict(a=0), merges=[])
        with no_panic("post_processor fails"):
            found = load(dict(model=model, post_processor=post)).encode("a")
        ids = found.ids[:found.special_tokens_mask.index(0)]
        for i in ids:
            if i not in self.bytes:
                raise ValueError(f"post_processor puts id {i} in front, which has no "
                                 "token")
        return tuple(ids)

    def _read_stop_ids(self, path):
        # a set: Qwen2.5-Instruct ends a turn with <|im_end|> and a document with <|endoftext|>
        stops = set()
        for file in ("generation_config.json", "config.json"):
            ids = read_json(os.path.join(path, file), {}).get("eos_token_id")
            if type(ids) is not list:
                ids = [] if ids is None else [ids]
            for i in ids:
                if type(i) is not int or i not in self.bytes:
                    raise ValueError(f"{os.path.join(path, file)}: eos_token_id "
                                     f"{shown(i)} is not in tokenizer.json: must be "
                                     "the id of a token, or a list")
            stops.update(ids)
        if eos := self.named.get("eos_token"):
            if eos not in self.added:
                file = os.path.join(path, "tokenizer_config.json")
                raise ValueError(f"{file}: eos_token {shown(eos)} is not in "
                                 "tokenizer.json's added_tokens")
            stops.add(self.added[eos])
        return tuple(sorted(stops))

    def _stop_at_turns(self):
        """Adds the token with which the chat template ends an answer to the stop tokens."""
        said = "Yes, 7."
        talk = [dict(role="user", content="7?"), dict(role="assistant", content=said)]
        try:
            ids = self.chat(talk, add_generation_prompt=False)
        except Exceeds:
            raise
        except ValueError:  # no template, or one that wants other messages
            return
        _, found, after = self.decode(ids).rpartition(said)
        end = self.cut.match(after.lstrip())
        if found and end and self.added[end[0]] not in self.stop_ids:
            self.notes.append(f"the chat template ends turns with {end[0]!r}, which "
                              "the checkpoint does not list as a stop token: it is "
                              "used as one")
            self.stop_ids = tuple(sorted({*self.stop_ids, self.added[end[0]]}))

    def __len__(self):
        return max(self.bytes) + 1

    @property
    def absent(self):
        """Sorted ids below len(tok) that have no token."""
        return sorted(set(range(len(self))) - self.bytes.keys())

    def encode(self, text, special=False, masked=False):
        """text -> ids, nothing added. special=True turns text that spells an added token into that
        token's id; masked: but for text that is (see `Said`)."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = []
        first = True
        for part in self.cut.split(text) if special else [text]:
            if special and part in self.added:
                ids.append(self.added[part])
            elif part:
                if masked:
                    part = unmasked(part)
                # part by part, or a combining mark behind <|im_end|> would compose with its ">"
                # and undo the token
                ids += self.engine(NFC(part) if self.nfc else part, first)
            first = first and not part
        return ids

    def spelled(self, text):
        """The first control token that text spells, "" if there is none. A thought's are none."""
        found = self.control.search(text)
        return found[0] if found else ""

    def decode(self, ids, special=True):
        """ids -> text; bytes that are no UTF-8 become U+FFFD. special=False leaves out stop tokens
        and added tokens marked `special`, by id, but <think> and </think> stay. ValueError for an
        id without a token."""
        left_out = () if special else self.hidden.union(self.stop_ids)
        ids = [i for i in map(int, ids) if i not in left_out]
        for i in ids:
            if i not in self.bytes:
                raise ValueError(f"no token has id {i}: ids end at {len(self) - 1}")
        if self.decoder:
            with no_panic("tokenizers cannot decode these ids"):
                return self.decoder.decode(ids, skip_special_tokens=False)
        return b"".join(map(self.bytes.get, ids)).decode("utf-8", "replace")

    def chat(self, messages, /, add_generation_prompt=True, **arguments):
        """messages, a list of {"role", "content"} -> ids of the rendered chat template.

        The template decides all: Qwen2.5 and SmolLM2 write a system prompt of their own if
        `messages` has none. What messages say is text, but for an assistant's <think> and </think>:
        special tokens come from the template, from roles and from `arguments`, which go to the
        template (enable_thinking=False). So it writes twice: what is wanted, and the same with
        masks. Raises ValueError without a template, when the template refuses the messages or does
        not know an argument."""
        if not self.has_chat:
            raise ValueError("this checkpoint has no chat template")
        variables = self.template.variables
        unknown = arguments.keys() - (variables - {"messages"})
        if unknown:
            raise ValueError(f"the chat template takes no argument {min(unknown)!r} "
                             f"(of {', '.join(sorted(variables)) or 'none'})")
        given = dict(tools=None, documents=None, **self.named) | arguments
        given["add_generation_prompt"] = add_generation_prompt
        messages = as_transformers(messages)
        wanted = self.template.render(given | dict(messages=messages))
        text = self.template.render(given | dict(messages=list(map(said, messages))))
        ids = self.encode(text, special=True, masked=True)
        if unmasked(text) == wanted:
            return ids
        # it looked in another way than by Said's methods: does it write the same added tokens?
        real = self.encode(wanted, special=True)
        added = {*self.added.values()}
        if [i for i in real if i in added] != [i for i in ids if i in added]:
            raise ValueError("a message spells a control token, and the chat template "
                             "handles it in a way that may turn it into one")
        return real


# ---- the engines ----

class Ranks:
    """Byte-level BPE in tiktoken. order: tokens as rank_tokens has them."""

    def __init__(self, pattern, vocab, order, absent):
        # tiktoken panics on a byte that it has no token for: absent bytes get ranks past the
        # vocabulary, and no id
        self.ids = [vocab[t] for t in order] + [None] * len(absent)  # rank -> id
        tokens = [*map(spelled_bytes, order), *absent]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self.bpe = tiktoken.Encoding("bpe", pat_str=pattern, special_tokens={},
                                     mergeable_ranks=ranks)

    def __call__(self, text, first):
        with no_panic(f"tiktoken cannot split this text of {len(text)} characters"):
            ranks = [rank for part in cut_space(text)
                     for rank in self.bpe.encode_ordinary(part)]
        return [self.ids[rank] for rank in ranks if self.ids[rank] is not None]


class Library:
    """Any BPE, in the tokenizers library. Some put a space in front of the text that is given, but
    not of what follows an added token."""

    def __init__(self, spec):
        spec = dict(spec, truncation=None, padding=None)
        cuts = json.dumps(spec.get("pre_tokenizer"))
        later = cuts.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        self.first = self.later = load(spec)
        if later != cuts:
            self.later = load(dict(spec, pre_tokenizer=json.loads(later)))

    def __call__(self, text, first):
        engine = self.first if first else self.later
        with no_panic(f"tokenizers cannot split this text of {len(text)} characters"):
            return engine.encode(text, add_special_tokens=False).ids


def load(spec):
    """tokenizer.json as a dict -> a tokenizer of the tokenizers library"""
    with no_panic("the tokenizers library cannot read it"):
        return tokenizers.Tokenizer.from_str(json.dumps(spec))


@contextmanager
def no_panic(what):
    """What libraries in Rust raise is a ValueError here: an Exception without a kind, or a panic,
    which is none and whose class cannot be imported."""
    try:
        with muted():
            yield
    except BaseException as e:
        if type(e) is not Exception and type(e).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {e}") from None


# ---- checks of JSON ----

@contextmanager
def naming(path, name):
    """What goes wrong inside is the fault of file `name`: one ValueError of one line."""
    try:
        yield
    # whatever types may stand in a JSON file
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        why = " ".join(str(e).split())
        if isinstance(e, KeyError):
            why = f"{why} is missing"
        raise ValueError(f"{os.path.join(path, name)}: {why[:500]}") from None


# ---- the parts of tokenizer.json ----

def check_model(model, vocab, added):
    """Raise ValueError for a model that is not run here, and unless each id is of one token. added:
    text -> id"""
    if not isinstance(model, tokenizers.models.BPE):
        raise ValueError(f"model type {type(model).__name__} is not supported (BPE is)")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if value := getattr(model, option):
            raise ValueError(f"BPE option {option}={shown(value)} is not supported")
    owner = {}
    for text, i in (*added.items(), *vocab.items()):
        if i >= MOST_IDS:
            raise ValueError(f"token {shown(text)} has id {i}, must be below "
                             f"{MOST_IDS:,}")
        if owner.setdefault(i, text) != text:
            both = f"{shown(owner[i])} and {shown(text)}"
            raise ValueError(f"tokens {both} both have id {i}")


def absent_bytes(vocab, byte_level, fallback):
    """The bytes without a token of their own. Raises ValueError where a character would be lost."""
    if byte_level == fallback:
        how = "with" if byte_level else "without"
        raise ValueError(f"BPE with byte_fallback={shown(fallback)} is not supported "
                         f"for a pre_tokenizer {how} ByteLevel")
    if byte_level:
        return [bytes([b]) for c, b in BYTE_OF.items() if c not in vocab]
    for token in (f"<0x{b:02X}>" for b in range(256)):
        if token not in vocab:
            raise ValueError(f"byte_fallback without a token {token} is not supported")
    return []


def spelled_bytes(token, byte_level=True):
    """The bytes that a token of the vocabulary stands for."""
    if byte_level and set(token) <= BYTE_OF.keys():
        return bytes(map(BYTE_OF.get, token))
    if not byte_level and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode("utf-8", "replace")


def rank_tokens(vocab, merges, whole):
    """Tokens in the order in which tiktoken has to merge them, for the ids of the tokenizers
    library; None where it would merge otherwise. whole: a piece that is a token is not merged
    (ignore_merges).

    tiktoken merges every pair whose text is a token, the library only pairs that are listed. What
    happens inside a token's text does not depend on its surroundings until something crosses its
    border. So if the library makes the token of its text alone, it does so everywhere, by the same
    last merge, and so does tiktoken, as long as all merges that make a token stand together. If
    not, no text contains the token, and it stays out of the ranks."""
    made = [token for token, _ in itertools.groupby(map("".join, merges))]
    foreign = set("".join(vocab)) - BYTE_OF.keys()
    if len(made) > len(set(made)) or "" in vocab or foreign:
        return None
    bpe = tokenizers.models.BPE(vocab, merges)
    parts = {token: [part.id for part in bpe.tokenize(token)] for token in vocab}
    rest = [token for token in vocab if parts[token] != [vocab[token]]]
    # of two parts tiktoken would make the token everywhere; fewer: some bytes are absent
    if whole and any(len(parts[token]) <= 2 for token in rest):
        return None
    order = dict.fromkeys([token for token in vocab if len(token) == 1] + made)
    unmade = set(rest)
    return [token for token in order if token not in unmade] + (rest if whole else [])


def read_pattern(steps):
    """The steps of a pre_tokenizer -> the one regex that finds the same pieces, None for other
    kinds."""
    match [{"use_regex": True, **step} if step["type"] == "ByteLevel" else step
           for step in steps]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return DIGITS_THEN_GPT2
        case [{"type": "Split", "pattern": {"Regex": str(pattern)},
               "behavior": "Isolated", "invert": False},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            # Isolated keeps what the pattern does not match as pieces of their own, where tiktoken
            # would drop it
            return rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+"
    return None


def flat(step, key):
    """A step of tokenizer.json, a Sequence of steps or nothing -> list of steps."""
    if not step:
        return []
    return step[key] if step["type"] == "Sequence" else [step]


def read_named(config):
    """tokenizer_config.json -> {"eos_token": "<|im_end|>", ...}"""
    named = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        # add_bos_token is a switch
        if key.endswith("_token") and value and isinstance(value, str):
            named[key] = value
    return named


# ---- the chat template ----

def read_template(path, config, file=""):
    """The compiled chat template, or None: that of a file, else chat_template.jinja, else the
    (default) one of tokenizer_config.json."""
    name = os.path.join(path, "tokenizer_config.json")
    if not file and os.path.exists(beside := os.path.join(path, "chat_template.jinja")):
        file = beside
    source = read_text(file) if file else config.get("chat_template")
    with naming("", file or name):
        if isinstance(source, list):
            source = {entry(t, "name", str): entry(t, "template", str) for t in source}
            source = source.get("default")
        if source is None:
            return None
        if type(source) is not str:
            raise ValueError(f"chat_template is {shown(source)}, must be text")
    return TemplateApart(source, file or name)


class TemplateApart(Apart):
    """A Template in a process of its own."""

    def __init__(self, source, file):
        super().__init__(Template, source, file, what=f"{file}: chat template")
        self.variables = set(self.ask("variables"))

    def render(self, variables):
        return self.ask("render", variables)


class Template:
    """A chat template, a program from the internet: sandboxed, it cannot change what it is handed,
    and what it writes is bounded.

    file: where it stands. variables: the names that it takes from outside. Raises ValueError."""

    def __init__(self, source, file):
        from jinja2 import TemplateError, meta, nodes
        from jinja2.visitor import NodeTransformer

        class Joins(NodeTransformer):
            """a ~ b becomes [a, b] | join, which is ours."""

            def visit_Concat(self, node):
                parts = nodes.List([self.visit(part) for part in node.nodes])
                fields = parts, "join", [], [], None, None
                return nodes.Filter(*fields).set_lineno(node.lineno)

        self.file = file
        env = environment()
        try:
            tree = env.parse(source)
            self.variables = meta.find_undeclared_variables(tree) - env.globals.keys()
            self.compiled = env.from_string(Joins().visit(tree))
        except (TemplateError, RecursionError, MemoryError) as e:
            raise ValueError(f"{file}: chat template cannot be read: "
                             f"{reason(e)}") from None

    def render(self, variables):
        size = 0
        parts = []
        try:
            for part in self.compiled.generate(variables):
                size += len(part)
                if size > MOST_TEXT:
                    raise ValueError(f"it writes more than {MOST_TEXT:,} characters")
                parts.append(part)
        except Exception as e:  # a template is a program: whatever it does wrong is its fault
            why = " ".join(str(e).split()) or type(e).__name__
            raise ValueError(f"{self.file}: chat template: {why}") from None
        return "".join(parts)


def environment():
    """What transformers offers to templates, but for what would make prompts differ from day to
    day."""
    from jinja2 import TemplateError, nodes, pass_environment
    from jinja2.ext import Extension
    from jinja2.filters import make_attrgetter
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant says; it changes no text."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own escapes HTML
        text = json.dumps(x, ensure_ascii=False, indent=indent, separators=separators,
                          sort_keys=sort_keys)
        if ensure_ascii:
            text = re.sub("[^\0-\x7f]", escaped, text)
        return text

    def escaped(letter):
        """The mask of a letter is escaped as the letter is."""
        meant = unmasked(letter[0])
        return letter[0] if meant.isascii() else json.dumps(meant)[1:-1]

    @pass_environment
    def join(env, values, between="", attribute=None):
        if attribute is not None:
            values = map(make_attrgetter(env, attribute), values)
        return joined(x for value in values
                      for x in (between, str(value)))[len(between):]

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation])
    env.globals |= {"raise_exception": raise_exception, "strftime_now": DATE.strftime}
    env.filters |= {"tojson": tojson, "join": join}
    env.concat = joined
    del env.filters["random"], env.globals["lipsum"]
    return env


# ---- what messages say ----

FREE = 0x40000  # the planes 4 and 5 hold no characters, and have room for those of planes 0 and 1


class Moved(dict):
    """A table for str.translate. move(code) -> code"""

    def __init__(self, move):
        super().__init__()
        self.move = move

    def __missing__(self, code):
        return self.setdefault(code, self.move(code))


def hide(code):
    """The mask of a character. White space and what JSON escapes have none, as templates trim and
    quote; nor has half a surrogate pair."""
    stays = chr(code).isspace() or code < 32 or chr(code) in '"\\'
    half = 0xD800 <= code < 0xE000
    return code if stays or half or code >= 0x20000 else code + FREE


HIDDEN = Moved(hide)
SHOWN = Moved(lambda code: code - FREE if FREE <= code < FREE + 0x20000 else code)


def unmasked(value):
    """Text in the characters that it stands for; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(unmasked, value))
    return value.translate(SHOWN) if isinstance(value, str) else value


class Said(str):
    """What a message says, masked: wherever a template puts it, it spells no added token and can be
    told from the template's own text. Where a template looks into it, by the methods here, it sees
    what is said."""

    def __str__(self):
        return self  # str(x) would forget whose it is

    def __repr__(self):
        thinks = any(str.__contains__(self, mark) for mark in THOUGHT)
        return as_said(repr(unmasked(self)), thinks)  # in str() of what holds it

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at):
        return Said(super().__getitem__(at))

    def __add__(self, other):
        return joined([self, other])

    def __radd__(self, other):
        return joined([other, self])

    def replace(self, old, new, count=-1):
        first, *rest = self.split(old, count)
        return joined([first, *(x for part in rest for x in (new, part))])


def looks(name):
    """A method of str that answers a question."""
    def method(self, *args):
        return getattr(unmasked(self), name)(*map(unmasked, args))
    return method


def cuts(name):
    """A method of str that returns one part or several, in order."""
    def method(self, *args, **options):
        whole = unmasked(self)
        parts = getattr(whole, name)(*map(unmasked, args), **options)
        found, at = [], 0
        for part in [parts] if isinstance(parts, str) else parts:
            at = whole.index(part, at)
            found.append(self[at:at + len(part)])
            at += len(part)
            if name in ("split", "rsplit") and args and args[0]:
                at += len(args[0])
        return found[0] if isinstance(parts, str) else found
    return method


def recases(name):
    """A method of str that writes each letter in another case."""
    def method(self):
        letters = list(str.__iter__(self))
        new = getattr(unmasked(self), name)()
        if len(new) != len(self):  # ß
            new = [getattr(unmasked(letter), name)() for letter in letters]
        return Said("".join(x.translate(HIDDEN) if letter != unmasked(letter) else x
                            for letter, x in zip(letters, new)))
    return method


METHODS = {
    looks: """__contains__ __eq__ __ge__ __gt__ __hash__ __le__ __lt__ __ne__ count
        endswith find index isalnum isalpha isdigit rfind rindex startswith""",
    recases: "capitalize lower title upper",
    cuts: "lstrip partition rpartition rsplit rstrip split splitlines strip"}
for kind, names in METHODS.items():
    for name in names.split():
        setattr(Said, name, kind(name))


def joined(texts):
    """Texts in a row. What is said stays so."""
    texts = list(texts)
    mine = any(isinstance(text, Said) for text in texts)
    whole = "".join(texts)
    return Said(whole) if mine else whole


def said(message):
    """A message with masks: all of it but the names of its fields, and its role, of which templates
    make tokens."""
    thinks = message.get("role") == "assistant"
    return {name: value if name == "role" else as_said(value, thinks)
            for name, value in message.items()}


def as_said(value, thinks):
    """A copy of a value in which each text is Said, keys too. thinks: but for the marks of a
    thought, which stay."""
    if isinstance(value, str):
        parts = re.split(f"({'|'.join(THOUGHT)})", value) if thinks else [value]
        return Said("".join(part if part in THOUGHT else part.translate(HIDDEN)
                            for part in parts))
    if isinstance(value, list):
        return [as_said(x, thinks) for x in value]
    if isinstance(value, dict):
        return {as_said(k, thinks): as_said(x, thinks) for k, x in value.items()}
    return value


def as_transformers(messages):
    """Messages as transformers hands them to a template: without what is null, a thought under both
    of its names."""
    found = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")
        thoughts = [message[name] for name in names if name in message]
        if thoughts:
            message = {"thinking": thoughts[0], **message,
                       "reasoning_content": thoughts[0]}
        found.append(message)
    return found


# ---- cutting text ----

def either_of(tokens):
    """A pattern that finds the leftmost, then longest, of `tokens`."""
    longest_first = map(re.escape, sorted(tokens, key=len, reverse=True))
    return re.compile(f"({'|'.join(longest_first) or '(?!)'})")


def cut_space(text):
    """text in parts without more than LONGEST_SPACE white-space characters in a row."""
    cuts = [0]
    if len(text) > LONGEST_SPACE:
        for run in re.finditer(r"\s+", text):
            cuts += range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE)
    return [text[a:b] for a, b in zip(cuts, cuts[1:] + [len(text)])]


def main(folder, *words):
    with one_line_errors(ValueError, OSError):
        tok = Tokenizer(folder)
    text = " ".join(words)
    ids = tok.encode(text or "Every key has a lifetime: it's born at 17, it dies at "
                             "4096.  🙂")
    stops = [tok.decode([i]) for i in tok.stop_ids]
    print(f"{len(tok):,} ids, {len(tok.added)} of them added, chat template: "
          f"{tok.has_chat}, stops at {stops}")
    for note in tok.notes:
        print(note)
    for i in ids:
        print(f"{i:8d}  {tok.bytes[i]!r}")
    print(f"{len(ids)} tokens -> {tok.decode(ids)!r}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m data.tokenizer FOLDER_OR_HUB_NAME [TEXT]")
    main(*sys.argv[1:])
