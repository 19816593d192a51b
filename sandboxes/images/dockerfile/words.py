"""Words of a Dockerfile: quotes, escapes and variables, by Docker's own rules.

Undefined variables are empty. `${x:-y}`, `${x-y}`, `${x:+y}`, `${x+y}`, `${x:?y}` and `${x?y}` are known; other
modifiers are refused, since a wrong guess would build a wrong image.
"""

import re
from collections.abc import Iterator, Mapping

DEFAULT_ESCAPE = "\\"
MOST_CHARS = 16 * 1024 * 1024
"""Of values of variables, each time that one is used in a Dockerfile."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MODIFIER = re.compile(r":?[-+?]")


def split_words(text: str, escape: str = DEFAULT_ESCAPE) -> list[str]:
    """Split at white space outside of quotes; quotes and escapes stay as they are.

    Raises:
        ValueError: A quote has no end.
    """
    words, begin, quote, at = [], 0, "", 0
    while at < len(text):
        character = text[at]
        if character == escape and quote != "'" and at + 1 < len(text):
            at += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character.isspace():
            words += [text[begin:at]] if at > begin else []
            begin = at + 1
        at += 1
    if quote:
        raise ValueError(f"the quote {quote} has no end")
    return [*words, text[begin:]] if len(text) > begin else words


class Expander:
    """Puts the values of variables into the texts of one Dockerfile, which they must not make too long: each variable
    can be twice as long as the one before.
    """

    def __init__(self, escape: str = DEFAULT_ESCAPE) -> None:
        self._escape = escape
        self._left = MOST_CHARS

    def expand(self, text: str, variables: Mapping[str, str], *, quotes: bool = True) -> str:
        """Return a word without its quotes and escapes, and with the values of variables; without `quotes`, those stay,
        as in a here-document.

        Raises:
            ValueError: A quote or a brace has no end, a modifier is unknown, a variable that must be set is not, or the
                values are too long.
        """
        expansion = _Expansion(text, variables, self._escape, self._left, quotes=quotes)
        try:
            return "".join(expansion.run(""))
        except RecursionError:
            raise ValueError("its braces are nested too deeply") from None
        finally:
            self._left = expansion.left


def unquote(text: str, escape: str = DEFAULT_ESCAPE) -> str:
    """Remove quotes from a word; dollar signs stay."""
    return "".join(part for part in re.split(r"['\"]", text.replace(escape, "")))


class _Expansion:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, left: int, *, quotes: bool) -> None:
        self.left = left
        """How long the values may be that are still to come."""
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
            return self._value(found[0]) or ""
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
            return self._value(found[0]) or ""
        modifier = MODIFIER.match(self._text, self._at)
        if modifier is None:
            rest = self._text[self._at : self._at + 2] or "nothing"
            raise ValueError(f"{rest!r} after ${{{found[0]} is not known; use :-, -, :+, +, :? or ?")
        self._at = modifier.end()
        return self._modified(found[0], modifier[0], "".join(self.run("}")))

    def _value(self, name: str) -> str | None:
        value = self._variables.get(name)
        self.left -= len(value or "")
        if self.left < 0:
            raise ValueError(
                f"the values of variables are longer than {MOST_CHARS} characters in all, with that of {name}"
            )
        return value

    def _modified(self, name: str, modifier: str, word: str) -> str:
        value = self._value(name)
        given = bool(value) if modifier.startswith(":") else value is not None
        if modifier.endswith("-"):
            return value if given and value is not None else word
        if modifier.endswith("+"):
            return word if given else ""
        if not given or value is None:
            raise ValueError(word or f"the variable {name} is not set")
        return value
