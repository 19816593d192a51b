"""Read a Dockerfile into instructions with their lines; nothing is expanded or judged.

It follows Docker's own reader: `# escape=`, continuation lines with comments and empty lines in them, flags before the
arguments, JSON arrays, and here-documents of RUN, COPY and ADD.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.errors import DockerfileError
from sandboxes.images.dockerfile.layers import ImageLayer
from sandboxes.images.dockerfile.words import DEFAULT_ESCAPE, split_words, unquote

DIRECTIVE = re.compile(r"#[ \t]*([A-Za-z]\w*)[ \t]*=[ \t]*(.*)")
HEREDOC = re.compile(r"\d*<<(-?)([^<]+)")
FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?", re.DOTALL)
WITH_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})
WITH_FLAGS = frozenset({"FROM", "RUN", "COPY", "ADD", "HEALTHCHECK"})
INSTRUCTIONS = {
    "FROM": "begins a stage",
    "ARG": "a variable of the build",
    "ENV": "a variable of the build and of sandboxes",
    "RUN": "a layer",
    "COPY": "a layer",
    "ADD": "a layer; archives of the context are unpacked, addresses refused",
    "WORKDIR": "a layer if the folder is new; sandboxes start in it",
    "USER": "who later steps run as; sandboxes show it",
    "SHELL": "the shell of later steps",
    "LABEL": "a label",
    "MAINTAINER": "the label `maintainer`",
    "ENTRYPOINT": "what `apptainer run` starts; the label `docker.entrypoint`",
    "CMD": "what `apptainer run` starts; the label `docker.cmd`",
    "EXPOSE": "the label `docker.expose`",
    "HEALTHCHECK": "the label `docker.healthcheck`",
    "STOPSIGNAL": "the label `docker.stopsignal`",
    "VOLUME": "the label `docker.volume`; the folder stays part of the image",
    "ONBUILD": "refused: an image file has no place for it",
}


@dataclass(frozen=True, slots=True)
class Heredoc:
    name: str
    text: str
    expands: bool
    """Variables are replaced unless its name was quoted."""


@dataclass(frozen=True, slots=True)
class Instruction:
    keyword: str
    """In capitals."""

    text: str
    line: int
    flags: tuple[tuple[str, str], ...] = ()
    """A flag without a value has ""."""

    heredocs: tuple[Heredoc, ...] = ()

    @property
    def array(self) -> tuple[str, ...] | None:
        """The arguments if they are a JSON array of strings."""
        if not self.text.startswith("["):
            return None
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return tuple(found) if all(isinstance(item, str) for item in found) else None

    def flag(self, name: str) -> str | None:
        """Return the last value of a flag that was given."""
        return next((value for found, value in reversed(self.flags) if found == name), None)

    def __str__(self) -> str:
        flags = "".join(f" --{name}={value}" if value else f" --{name}" for name, value in self.flags)
        return f"{self.keyword}{flags} {' '.join(self.text.split())}".strip()


@dataclass(frozen=True, slots=True)
class ParsedDockerfile:
    file: str
    instructions: tuple[Instruction, ...]
    escape: str

    def error(self, line: int, message: str, hint: str | None = None) -> DockerfileError:
        return DockerfileError(message, file=self.file, line=line, hint=hint)


def parse(text: str, file: str = "Dockerfile") -> ParsedDockerfile:
    """
    Raises:
        DockerfileError: A line has no known instruction, or a here-document or an array has no end.
    """
    lines = re.split("\r?\n", text.removeprefix("\ufeff"))  # `splitlines` would split at a form feed, too
    reader = _InstructionReader(lines, file, _escape_of(lines, file))
    return ParsedDockerfile(file, tuple(reader.instructions()), reader.escape)


def _escape_of(lines: list[str], file: str) -> str:
    """Return the escape character that a directive at the very top sets, else a backslash."""
    for number, line in enumerate(lines, 1):
        found = DIRECTIVE.fullmatch(line.strip())
        if found is None:
            break
        if found[1].lower() == "escape":
            if found[2] not in {"\\", "`"}:
                message = f"the escape character cannot be {found[2]!r}"
                raise DockerfileError(message, file=file, line=number, hint="choose \\ or `")
            return found[2]
    return DEFAULT_ESCAPE


class _InstructionReader:
    def __init__(self, lines: list[str], file: str, escape: str) -> None:
        self._lines = lines
        self._file = file
        self._at = 0
        self.escape = escape
        self._continued = re.compile(re.escape(escape) + r"[ \t]*$")

    def instructions(self) -> Iterator[Instruction]:
        while self._at < len(self._lines):
            line = self._lines[self._at].strip()
            if not line or line.startswith("#"):
                self._at += 1
                continue
            number = self._at + 1
            yield self._instruction(self._logical_line().strip(), number)

    def _logical_line(self) -> str:
        """Join a line with those that continue it, without comments and empty lines."""
        joined, continues = "", True
        while continues and self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if joined and (not line.strip() or line.lstrip().startswith("#")):
                continue
            joined += self._continued.sub("", line)
            continues = self._continued.search(line) is not None
        return joined

    def _instruction(self, logical: str, number: int) -> Instruction:
        word, *rest = logical.split(maxsplit=1)
        keyword, text = word.upper(), rest[0] if rest else ""
        if keyword not in INSTRUCTIONS:
            close = difflib.get_close_matches(keyword, INSTRUCTIONS, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(INSTRUCTIONS))}"
            raise self._error(number, f"{word!r} is not an instruction", hint)
        flags, text = self._split_flags(text) if keyword in WITH_FLAGS else ((), text)
        if not text and keyword != "HEALTHCHECK":
            raise self._error(number, f"{keyword} needs arguments")
        heredocs = tuple(self._heredocs(text, number)) if keyword in WITH_HEREDOCS else ()
        return Instruction(keyword, text, number, flags, heredocs)

    @staticmethod
    def _split_flags(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
        flags = []
        while text.startswith("--"):
            word, *rest = text.split(maxsplit=1)
            text = rest[0] if rest else ""
            if word == "--":
                break
            found = FLAG.fullmatch(word)
            flags.append((found[1], found[2] or "") if found else (word[2:], ""))
        return tuple(flags), text

    def _heredocs(self, text: str, number: int) -> Iterator[Heredoc]:
        try:
            words = split_words(text, self.escape)
        except ValueError:  # a shell may understand what looks unfinished here
            words = text.split()
        for word in words:
            if (found := HEREDOC.fullmatch(word)) is not None:
                name = unquote(found[2], self.escape)
                expands = name == found[2]
                strip: Callable[[str], str] = (lambda line: line.lstrip("\t")) if found[1] else str
                yield Heredoc(name, self._body(name, strip, number), expands)

    def _body(self, name: str, strip: Callable[[str], str], number: int) -> str:
        body: list[str] = []
        while self._at < len(self._lines):
            line = strip(self._lines[self._at])
            self._at += 1
            if line == name:
                return "".join(f"{one}\n" for one in body)
            body.append(line)
        raise self._error(number, f"the here-document {name} has no end", f"end it with a line {name}")

    def _error(self, line: int, message: str, hint: str | None = None) -> DockerfileError:
        return DockerfileError(message, file=self._file, line=line, hint=hint)


@dataclass(slots=True)
class StageState:
    key: str
    layers: tuple[ImageLayer, ...] = ()
    """Topmost first."""

    declared: Mapping[str, str] = field(default_factory=dict)
    """Variables of the base's own scripts, which the image keeps."""

    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(layer.files for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)
