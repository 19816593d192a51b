"""Detectors: the search for secrets and personal data in texts before they are stored.

Findings leave this module only as counts by kind. The built-in detectors take time linear in the length of any text,
and look at it in windows, so that other threads get their turn. A plug-in that fails counts as a find: a text that
could not be searched is not taken for a clean one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, TypeVar

import anyio.to_thread
import structlog
from pydantic import JsonValue

from rollout_service.base.errors import ConfigurationError, did_you_mean

log = structlog.get_logger(__name__)

GROUP: Final = "rollout_service.detectors"
"""The entry point group; each entry point is a `Detector`."""

Find = str | tuple[int, int]
"""The kind of a find; or where it begins and ends, and its kind is then the detector's name."""
Detector = Callable[[str], Iterable[Find]]
"""Finds each occurrence. It runs in a thread."""

REDACTED: Final = "[redacted]"
INLINE_CHARS: Final = 4_096
"""Longer texts are searched in a thread."""
_APART: Final = "\0" * 16
"""Separates texts that are searched as one; no built-in pattern reaches across it."""
_WINDOW: Final = 65_536
_OVERLAP: Final = 8_192


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Must take time linear in the length: bounded repeats, and runs that are entered only at their beginning."""

    kind: str
    pattern: re.Pattern[str]
    check: Callable[[str], bool] = bool

    def count(self, text: str) -> int:
        found, at = 0, 0
        while at < len(text):
            end = at + _WINDOW
            for match in self.pattern.finditer(text, at, end + _OVERLAP):
                if match.start() >= end:
                    break
                found += self.check(match[0])
                at = match.end()
            at = max(at, end)
        return found


# Where a run of characters begins; the text may be JSON in which `\n` stands before it.
_START: Final = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"


def _pattern(kind: str, pattern: str, check: Callable[[str], bool] = bool) -> _Pattern:
    return _Pattern(kind, re.compile(pattern), check)


def _looks_random(text: str) -> bool:
    return any(c.isdigit() for c in text) and any(c.isupper() for c in text)


def _has_digit(text: str) -> bool:
    return any(c.isdigit() for c in text)


def _passes_luhn(text: str) -> bool:
    digits = [int(c) for c in text if c.isdigit()][::-1]
    return sum(digits[::2] + [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]) % 10 == 0


BUILT_IN: Final[Mapping[str, Sequence[_Pattern]]] = {
    "secrets": (
        _pattern("private_key", r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----"),
        _pattern("aws_key", _START + r"A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
        _pattern("aws_secret", r"(?i:secret_?access_?key)\W{1,6}[A-Za-z0-9/+]{40}(?!\w)"),
        _pattern("github_token", _START + r"(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{22,255})"),
        _pattern("api_key", _START + r"sk-[A-Za-z0-9_-]{20,512}", _looks_random),
        _pattern("google_key", _START + r"AIza[A-Za-z0-9_-]{35}"),
        _pattern("slack_token", _START + r"xox[abeprs]-[A-Za-z0-9-]{10,512}", _has_digit),
        _pattern("bearer_token", r"(?i:\bbearer)\s{1,4}[A-Za-z0-9._~+/-]{20,4096}", _has_digit),
        _pattern("jwt", _START + r"eyJ[A-Za-z0-9_-]{10,4096}\.eyJ[A-Za-z0-9_-]{10,}"),
    ),
    # From the `@` on, since before it any text may stand. `git@` names no person.
    "emails": (_pattern("email", r"(?<=[\w.%+-])(?<!\bgit)@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,63}"),),
    "cards": (
        _pattern(
            "card",
            r"(?<![\w.])(?:[2-6]\d{3}([ -]?)\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|3\d{3}([ -]?)\d{6}\2\d{5})(?!\w)",
            _passes_luhn,
        ),
    ),
    "phones": (
        _pattern(
            "phone",
            r"(?<![\w.+-])(?:\+\d(?:[ ().-]{0,2}\d){7,14}|(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4})(?!\w)",
        ),
    ),
}


class Detectors:
    def __init__(self, detectors: Mapping[str, Detector]) -> None:
        self._detectors = detectors

    @classmethod
    def load(cls, names: Iterable[str], *, plugins: Iterable[EntryPoint] | None = None) -> Detectors:
        """Load detectors by their names; this imports plug-ins, so call it in a thread."""
        built_in: dict[str, Detector] = {name: partial(_find, patterns) for name, patterns in BUILT_IN.items()}
        return cls(load_functions(names, built_in, group=GROUP, setting="live.detectors", plugins=plugins))

    def find(self, texts: Iterable[str]) -> dict[str, int]:
        """Count the finds of each kind; leave out kinds that were not found."""
        counts: Counter[str] = Counter()
        each = [text for text in texts if text]
        together = [_APART.join(each)]  # most texts are a word or less, and a turn has some dozens of them
        for name, detector in self._detectors.items():
            for text in together if name in BUILT_IN else each:
                counts.update(_kinds(name, detector, text))
        return dict(counts)

    async def search(self, texts: Iterable[str]) -> dict[str, int]:
        """Call `find`, in a thread if it may take long."""
        texts = list(texts)
        if sum(map(len, texts)) <= INLINE_CHARS and self._detectors.keys() <= BUILT_IN.keys():
            return self.find(texts)
        return await anyio.to_thread.run_sync(self.find, texts)

    async def redact(self, value: JsonValue) -> tuple[JsonValue, dict[str, int]]:
        """Replace every text with a find, and count the finds of each kind."""
        found = await self.search(texts_in(value))
        return (await anyio.to_thread.run_sync(self._redacted, value) if found else value), found

    def _redacted(self, value: JsonValue) -> JsonValue:
        if isinstance(value, dict):
            return {self._redacted_text(name): self._redacted(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._redacted(each) for each in value]
        if isinstance(value, str):
            return self._redacted_text(value)
        return REDACTED if self.find(texts_in(value)) else value

    def _redacted_text(self, text: str) -> str:
        return REDACTED if self.find([text]) else text


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts and whole numbers of a JSON value, names of fields included."""
    left = [value]
    while left:
        match left.pop():
            case str(text):
                yield text
            case bool() | None:
                pass
            case int(number):
                yield str(number)
            case Mapping() as fields:
                left += [*fields.keys(), *fields.values()]
            case list() | tuple() as values:
                left += values


def _find(patterns: Sequence[_Pattern], text: str) -> Iterator[str]:
    for one in patterns:
        for _ in range(one.count(text)):
            yield one.kind


def _kinds(name: str, detector: Detector, text: str) -> list[str]:
    try:
        return [find if isinstance(find, str) else name for find in detector(text)]
    except Exception as error:  # noqa: BLE001 - whatever a plug-in raises
        # The message of the error may hold what it found.
        log.error(
            "a detector failed, and the turn is not stored",
            detector=name,
            error=type(error).__name__,
            hint="Fix the plug-in, or remove its name from live.detectors.",
        )
        return [f"{name}:failed"]


F = TypeVar("F", bound=Callable[..., Any])


def load_functions(
    names: Iterable[str],
    built_in: Mapping[str, F],
    *,
    group: str,
    setting: str,
    plugins: Iterable[EntryPoint] | None = None,
) -> dict[str, F]:
    """Return functions in the order of the names; this imports plug-ins, so call it in a thread.

    Plug-ins are the entry points of the `group`; `setting` is where the names stand.

    Raises:
        ConfigurationError: A name is unknown, or its plug-in is not a function or cannot be loaded.
    """
    found = {plugin.name: plugin for plugin in (entry_points(group=group) if plugins is None else plugins)}
    functions: dict[str, F] = {}
    for name in names:
        if name not in built_in and name not in found:
            known = sorted({*built_in, *found})
            raise ConfigurationError(
                f"{setting}: there is no {name!r}{did_you_mean(name, known)}",
                hint=f"Known names: {', '.join(known)}.",
            )
        functions[name] = built_in[name] if name in built_in else _from_plugin(found[name], setting)
    return functions


def _from_plugin(plugin: EntryPoint, setting: str) -> Any:
    where = f"{setting}: the plug-in {plugin.name!r} ({plugin.value})"
    try:
        function = plugin.load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigurationError(f"{where} is not a function", hint="Name a function in the plug-in's entry point.")
    return function
