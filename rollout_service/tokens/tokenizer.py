"""Tokenizers as chat formats need them, fast enough for every turn.

A folder with a `tokenizer.json` needs only the Rust tokenizer, which saves the import of transformers and its cost per
call. Anything else goes through transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_service.tokens.errors import TokenizerNotFoundError

if TYPE_CHECKING:
    import tokenizers


MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use; it is not a character."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class SpecialTokenEscaper:
    """Marks the control tokens of one tokenizer in texts, to keep them out of prompts.

    A chat format joins its control tokens with the texts of messages, and most do so before the text is tokenized: a
    tool's output that contains `<|im_end|>` would end its own turn. So a mark is put inside everything that looks like
    a control token; the tokenizer cuts the text at the marks, encodes the pieces one by one and drops the marks. The
    ids still decode to the same text.

    A tokenizer finds no control token inside an escaped text, or across its end, in any chat format whose texts go
    through this package's tokenizers.
    """

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is applied by the tokenizer before it looks for tokens."""
        # Runs of blanks are added tokens in some vocabularies; nothing can be forged with them.
        self._tokens = frozenset(token for token in tokens if token.strip())
        self._beginnings = frozenset(token[:n] for token in self._tokens for n in range(1, len(token)))
        self._lengths: dict[str, set[int]] = {}  # by the first two characters, which few texts hold
        for token in self._tokens:
            self._lengths.setdefault(token[:2], set()).add(len(token))
        # Searching for a set of characters is fast; searching for "anything, if this follows" is not.
        starts = sorted(self._lengths)
        self._candidates = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in starts))
        self._longest = max(map(len, self._tokens), default=0)
        self._firsts = frozenset(token[:1] for token in self._tokens)
        self._any_first = re.compile("|".join(map(re.escape, sorted(self._firsts))) or "(?!)")
        self._normalize = normalize

    def escape(self, text: str) -> str:
        """Put a mark inside each control token, and at the end if one could form there."""
        text = text.replace(MARK, _REPLACEMENT)
        if self._normalize is None and self._any_first.search(text) is None:
            return text  # the usual case
        escaped = self._marked(text)
        if self._normalize is not None and any(self._starts(self._normalize(piece)) for piece in pieces(escaped)):
            text = self._normalize(text)  # which makes a token, for example from full-width characters
            escaped = self._marked(text)
        return escaped + MARK if self._may_go_on(text) else escaped

    def _marked(self, text: str) -> str:
        cuts = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return MARK.join(text[begin:end] for begin, end in pairwise(cuts))

    def escape_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self.escape_all(item) for item in value]
        if isinstance(value, dict):
            return {self.escape_all(key): self.escape_all(item) for key, item in value.items()}
        return value

    def _starts(self, text: str) -> list[int]:
        if not self._tokens:
            return []
        return [
            start
            for start in (match.start() for match in self._candidates.finditer(text))
            if self._is_token(text, start)
        ]

    def _is_token(self, text: str, start: int) -> bool:
        found = (self._lengths.get(text[start : start + width], set()) for width in (1, 2))
        return any(text[start : start + length] in self._tokens for lengths in found for length in lengths)

    def _may_go_on(self, text: str) -> bool:
        end = text.rstrip()[-self._longest :]  # many formats trim texts
        if self._firsts.isdisjoint(end):
            return False
        return any(end[start:] in self._beginnings for start in range(len(end)))


def pieces(text: str) -> list[str]:
    return [piece for piece in text.split(MARK) if piece]


_CACHED_TEXTS = 512
_CACHED_CHARACTERS = 8192  # with the line above, about 10 MB at most


BYTE_LEVEL, BYTE_FALLBACK = "ByteLevel", "ByteFallback"
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every id, for showing tokens one by one; immutable.

    A byte-level vocabulary cuts characters, so decoding ids one by one gives replacement characters. The bytes of
    tokens, put together, are the text.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table

    @classmethod
    def of(cls, vocabulary: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return None if the way of writing bytes is not known. Takes 0.1 s for 150,000 tokens."""
        kind = repr(vocabulary.decoder)
        if BYTE_LEVEL in kind:
            read = _read_byte_level
        elif BYTE_FALLBACK in kind:
            read = _read_byte_fallback
        else:
            return None
        ids = vocabulary.get_vocab(True)
        table = [b""] * (max(ids.values(), default=-1) + 1)
        for token, number in ids.items():
            table[number] = read(token)
        for number, added in vocabulary.get_added_tokens_decoder().items():
            table[number] = added.content.encode()
        return cls(table)

    def __len__(self) -> int:
        return len(self._table)

    def of_ids(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id; an id outside of the vocabulary has none."""
        table, size = self._table, len(self._table)
        return [table[number] if 0 <= number < size else b"" for number in ids]


def _byte_characters() -> dict[str, int]:
    """Return the bytes that the characters of a byte-level vocabulary stand for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # not of this alphabet, as in a token that was added by hand
        return token.encode()


def _read_byte_fallback(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()


_NO_OFFSETS = "character offsets are not recovered from decoded texts"


class FastTokenizer:
    """The Rust tokenizer behind the few methods that a renderer calls, with the ids of short texts cached.

    It is deliberately not callable, which makes renderers skip the character offsets: nothing here uses them, and they
    double the cost of a render.
    """

    unk_token_id = None

    def __init__(self, backend: tokenizers.Tokenizer, name_or_path: str = "") -> None:
        self.name_or_path = name_or_path
        self._backend = backend
        self._cached = lru_cache(_CACHED_TEXTS)(self._ids)
        # Renderers look up the same tokens in each turn; as an attribute, the cache needs no Python call.
        self.convert_tokens_to_ids: Callable[[str], int | None] = lru_cache(_CACHED_TEXTS)(backend.token_to_id)
        """The id of a token, or None if the vocabulary lacks it."""

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. The chat format adds the tokens around it, such as a begin-of-text."""
        if MARK in text:
            return [token for piece in pieces(text) for token in self._ids(piece)]
        if add_special_tokens or len(text) > _CACHED_CHARACTERS:
            return list(self._ids(text, add_special_tokens))
        return list(self._cached(text))

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Leave spaces untouched; ids beyond the vocabulary are empty.

        Raises:
            ValueError: `clean_up_tokenization_spaces` is given. A renderer passes it only to find the character at
                which each token begins. Nothing here uses that, and it decodes a text once per token.
        """
        if clean_up_tokenization_spaces is not None:
            raise ValueError(_NO_OFFSETS)
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def escaper(self, *, special_only: bool = False) -> SpecialTokenEscaper:
        added = self._backend.get_added_tokens_decoder().values()
        normalizer = self._backend.normalizer
        return SpecialTokenEscaper(
            (token.content for token in added if token.special or not special_only),
            normalizer.normalize_str if normalizer is not None else None,
        )

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """None if they are not known. The first use takes a while: use a thread."""
        return TokenBytes.of(self._backend)

    def _ids(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        # The only way to encode that leaves out the offsets and releases the GIL.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)


class TransformersTokenizer:
    """A tokenizer of transformers, which also knows the model's own chat template. Not callable either."""

    def __init__(self, inner: Any) -> None:
        self.name_or_path = str(inner.name_or_path)
        self.unk_token_id = inner.unk_token_id
        self.eos_token_id = inner.eos_token_id
        self.all_special_tokens: list[str] = list(inner.all_special_tokens)
        self._inner = inner
        backend = getattr(inner, "backend_tokenizer", None)
        self._fast = None if backend is None else FastTokenizer(backend)

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if self._fast is not None and not add_special_tokens:
            return self._fast.encode(text)
        parts = pieces(text) if MARK in text else [text]
        return [token for part in parts for token in self._inner.encode(part, add_special_tokens=add_special_tokens)]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Decode as `FastTokenizer` does."""
        if clean_up_tokenization_spaces is not None:
            raise ValueError(_NO_OFFSETS)
        # Without this, settings of old tokenizers turn "ls ." into "ls.".
        exact = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._inner.decode(token_ids, **exact))

    def convert_tokens_to_ids(self, token: str) -> Any:
        """Return `unk_token_id` if the vocabulary lacks it."""
        return self._inner.convert_tokens_to_ids(token)

    def escaper(self, *, special_only: bool = False) -> SpecialTokenEscaper:
        if self._fast is not None:
            return self._fast.escaper(special_only=special_only)
        added = self._inner.added_tokens_decoder.values()
        return SpecialTokenEscaper(token.content for token in added if token.special or not special_only)

    @property
    def token_bytes(self) -> TokenBytes | None:
        return None if self._fast is None else self._fast.token_bytes

    def template_text(self, messages: Sequence[Any], **options: Any) -> str:
        """Return a conversation as the model's template writes it."""
        return str(self._inner.apply_chat_template(messages, **{**options, "tokenize": False}))

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Return the ids of that text, as `renderers` asks for them."""
        return self.encode(self.template_text(messages, **options))


ChatTokenizer = FastTokenizer | TransformersTokenizer
"""Both cut texts at their marks, which have no ids, and decode bytes that are not valid UTF-8 to U+FFFD."""


def load_tokenizer(path: str, *, with_template: bool) -> ChatTokenizer:
    """Load from a folder or a hub name; with `with_template`, the result can also apply the model's chat template."""
    # Texts are encoded one by one; without this setting the Rust library warns when the process forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(path).expanduser()
    if not with_template and (folder / "tokenizer.json").is_file():
        fast = _load_fast(folder)
        if fast is not None:
            return fast
    if not folder.exists() and (folder.is_absolute() or path.count("/") != 1):
        raise _not_found(path, "there is no such folder")
    return _load_with_transformers(path)


def _load_fast(folder: Path) -> FastTokenizer | None:
    """Return None if `tokenizer.json` does not hold all of it."""
    import tokenizers  # a large native library, which a service without engines does not need

    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust library raises a bare Exception for a bad file
        raise _not_found(str(folder), f"tokenizer.json is not readable: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    added = (entry["content"] for entry in config.get("added_tokens_decoder", {}).values())
    if "auto_map" in config or any(backend.token_to_id(token) is None for token in added):
        return None
    backend.no_truncation()
    backend.no_padding()
    return FastTokenizer(backend, str(folder))


def _load_with_transformers(path: str) -> ChatTokenizer:
    # Imported here because it takes seconds, and folders with a tokenizer.json do not need it.
    from renderers.base import load_tokenizer as load

    try:
        return TransformersTokenizer(load(path))
    except (OSError, ValueError) as error:
        raise _not_found(path, str(error).splitlines()[0]) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return an empty object if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _not_found(str(path.parent), f"{path.name} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _not_found(path: str, why: str) -> TokenizerNotFoundError:
    return TokenizerNotFoundError(
        f"no tokenizer at {path!r}: {why}",
        hint="Pass a folder with tokenizer.json and tokenizer_config.json, or a hub name such as"
        " 'Qwen/Qwen3-0.6B' that this machine has cached or may download.",
    )
