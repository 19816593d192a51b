"""Passes the output of a running command or cell on, never more than its limit."""

import codecs
from collections.abc import Callable, Mapping
from typing import Literal

from sandboxes.contract import OnOutput, SessionOutput
from sandboxes.runtime.pipes import OutputBuffer

PIECE_SIZE = 100
"""A piece counts as so many characters more, for what it takes to keep it."""
LEFT_OUT = "\n[... the rest of the output is left out ...]\n"


class OutputFeed:
    def __init__(self, on_output: OnOutput | None, limit: int) -> None:
        self._on_output = on_output
        self._room = limit

    def add(self, kind: Literal["stdout", "stderr", "display", "result"], formats: Mapping[str, str]) -> None:
        """Pass a piece on; one that is too large ends the feed with a note."""
        if self._on_output is None or self._room < 0 or not formats:
            return
        self._room -= PIECE_SIZE + sum(len(name) + len(text) for name, text in formats.items())
        if self._room >= 0:
            self._on_output(SessionOutput(kind, formats))
        else:
            self._on_output(SessionOutput("stdout", {"text/plain": LEFT_OUT}))

    def adder(self, output: OutputBuffer) -> Callable[[bytes], None]:
        """Return a function that adds what was printed to both; a character may come in two parts."""
        if self._on_output is None:
            return output.add
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode

        def add(data: bytes) -> None:
            output.add(data)
            if text := decode(data):
                self.add("stdout", {"text/plain": text})

        return add
