"""Words of a Dockerfile: quotes, escapes and variables, by Docker's own rules.

Undefined variables are empty. `${x:-y}`, `${x-y}`, `${x:+y}`, `${x+y}`, `${x:?y}` and `${x?y}` are known; other
modifiers are refused, since a wrong guess would build a wrong image.
"""

import re
from collections.abc import Iterator, Mapping

DEFAULT_ESCAPE = "\\"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MODIFIER = re.compile(r":?[-+?]")


def split_words(text: str, escape: str = DEFAULT_ESCAPE) -> list[str]:
    """Split at white space outside of quotes; quotes and escapes stay as they are.

    Raises:
        ValueError: A quote has no end.
    """
    words, word, quote, at = [], "", "", 0
    while at < len(text):
        character = text[at]
        if character == escape and quote != "'" and at + 1 < len(text):
            word, at = word + text[at : at + 2], at + 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character.isspace():
            words += [word] if word else []
            word, at = "", at + 1
            continue
        word, at = word + character, at + 1
    if quote:
        raise ValueError(f"the quote {quote} has no end")
    return [*words, word] if word else words


def expand(text: str, variables: Mapping[str, str], escape: str = DEFAULT_ESCAPE) -> str:
    """Return a word without its quotes and escapes, and with the values of variables.

    Raises:
        ValueError: A quote or a brace has no end, a modifier is unknown, or a variable that must be set is not.
    """
    return "".join(_Expansion(text, variables, escape).run(""))


def unquote(text: str, escape: str = DEFAULT_ESCAPE) -> str:
    """Remove quotes from a word; dollar signs stay."""
    return "".join(part for part in re.split(r"['\"]", text.replace(escape, "")))


def expand_heredoc(text: str, variables: Mapping[str, str], escape: str = DEFAULT_ESCAPE) -> str:
    """Leave quotes as they are.

    Raises:
        ValueError: As `expand`.
    """
    return "".join(_Expansion(text, variables, escape, quotes=False).run(""))


class _Expansion:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, *, quotes: bool = True) -> None:
        self._text = text
        self._variables = variables
        self._escape = escape
        self._quotes = quotes
        self._at = 0

    def run(self, end: str) -> Iterator[str]:
        """Yield the expansion up to the character `end`, or to the end of the text if that is empty."""
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character == end:
                return
            if character == "'" and self._quotes:
                yield self._until_quote()
            elif character == '"' and self._quotes:
                yield from self._in_double_quotes()
            elif character == self._escape:
                yield self._escaped()
            elif character == "$":
                yield self._variable()
            else:
                yield character
        if end:
            raise ValueError(f"{end} is missing in {self._text!r}")

    def _escaped(self) -> str:
        if self._at >= len(self._text):
            return self._escape
        self._at += 1
        found = self._text[self._at - 1]
        # In a here-document, as in a shell's, a backslash before anything else is one.
        return found if self._quotes or found in f"${self._escape}" else self._escape + found

    def _until_quote(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise ValueError(f"a single quote has no end in {self._text!r}")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _in_double_quotes(self) -> Iterator[str]:
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character == '"':
                return
            if character == "$":
                yield self._variable()
            elif (
                character == self._escape and self._at < len(self._text) and self._text[self._at] in f'"${self._escape}'
            ):
                yield self._text[self._at]
                self._at += 1
            else:
                yield character
        raise ValueError(f"a double quote has no end in {self._text!r}")

    def _variable(self) -> str:
        if self._text.startswith("{", self._at):
            self._at += 1
            return self._braced()
        if (found := NAME.match(self._text, self._at)) is not None:
            self._at = found.end()
            return self._variables.get(found[0], "")
        if self._at < len(self._text) and self._text[self._at] in "0123456789@*#?-!$":
            self._at += 1
            return ""  # only a shell has it
        return "$"

    def _braced(self) -> str:
        found = NAME.match(self._text, self._at)
        if found is None:
            raise ValueError(f"a variable's name is missing after ${{ in {self._text!r}")
        self._at = found.end()
        if self._text.startswith("}", self._at):
            self._at += 1
            return self._variables.get(found[0], "")
        modifier = MODIFIER.match(self._text, self._at)
        if modifier is None:
            rest = self._text[self._at : self._at + 2] or "nothing"
            raise ValueError(f"{rest!r} after ${{{found[0]} is not known; use :-, -, :+, +, :? or ?")
        self._at = modifier.end()
        return self._modified(found[0], modifier[0], "".join(self.run("}")))

    def _modified(self, name: str, modifier: str, word: str) -> str:
        value = self._variables.get(name)
        given = bool(value) if modifier.startswith(":") else value is not None
        if modifier.endswith("-"):
            return value if given and value is not None else word
        if modifier.endswith("+"):
            return word if given else ""
        if not given or value is None:
            raise ValueError(word or f"the variable {name} is not set")
        return value
