"""A tool call that is written as JSON, read as it is sampled. Pure and synchronous.

The form is `{"name": NAME, "arguments": OBJECT}`, in this order. A call in another order, or with anything else before
its arguments, can be read only when it is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LONGEST_HEAD = 1024
"""The number of characters after which no name is looked for."""
_STRUCTURE = re.compile(r'["{}\[\]\\]')


@dataclass(slots=True)
class JsonCall:
    """The name and the arguments of one call, from its text."""

    name: str | None = None
    """The name, once the arguments have begun."""
    arguments: str = ""
    """The text of the arguments so far; at most up to their last brace."""
    _head: str = ""
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _done: bool = False

    def push(self, text: str) -> str:
        """Return more of the arguments' text; nothing before the name is known, nor after their end."""
        if self.name is None:
            text = self._begin(text)
        if not text or self._done:
            return ""
        new = text[: self._scan(text)]
        self.arguments += new
        return new

    def _begin(self, text: str) -> str:
        """Return the text from the beginning of the arguments on, once they have begun."""
        if len(self._head) > _LONGEST_HEAD:
            return ""
        self._head += text
        head = _HEAD.match(self._head)
        if head is None:
            return ""
        try:
            name = str(json.loads(head[1]))
            name.encode()
        except ValueError:  # an escape that is none, or a lone surrogate
            return ""
        self.name = name
        return self._head[head.end() :]

    def _scan(self, text: str) -> int:
        """Return where the arguments end in this text, or its length."""
        at = int(self._escaped)
        self._escaped = False
        while mark := _STRUCTURE.search(text, at):
            at = mark.end()
            if self._quoted and mark[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark[0] in "{[":
                self._depth += 1
            elif not self._quoted and mark[0] in "}]":
                self._depth -= 1
            if self._depth == 0:
                self._done = True
                return at
        return len(text)
