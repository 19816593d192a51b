"""The text of an HTML page, for a policy: one pass over the source, in time that grows with its length alone.

It is not a parser, and keeps only text, headings, list items, links and their addresses.
"""

from __future__ import annotations

import html
import re
from urllib.parse import urljoin, urlsplit

HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "title", "iframe", "object"})
BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "figure"),
        *("footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol"),
        *("p", "pre", "section", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"),
    )
)
HEADING = re.compile(r"h([1-6])")
NAME = re.compile(r"/?([a-zA-Z][a-zA-Z0-9]*)")
HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
TITLE = re.compile(r"<title[^<>]*>([^<]*)<", re.IGNORECASE)
SPACES = re.compile(r"[ \t\r\f\v\xa0]+")


def page_text(source: str, url: str) -> str:
    """Return the text; links are relative to `url`."""
    writer = _PageWriter(url)
    before, *parts = source.split("<")
    writer.text(before)
    for part in parts:
        writer.part(part)
    title = TITLE.search(source)
    head = f"# {_plain(title[1])}\n\n" if title and title[1].strip() else ""
    return head + writer.finish()


class _PageWriter:
    def __init__(self, url: str) -> None:
        self._url = url
        self._out: list[str] = []
        self._hidden = ""
        """The tag to skip, or "--" within a comment."""
        self._link = ""

    def part(self, part: str) -> None:
        """Read the text between a "<" and the next one."""
        if self._hidden == "--" or (part.startswith("!--") and not self._hidden):
            _, closed, rest = part.partition("-->")
            self._hidden = "" if closed else "--"
            self.text(rest)
            return
        found = NAME.match(part)
        if found is None and not part.startswith("!"):
            self.text(f"<{part}")
            return
        tag, _, rest = part.partition(">")
        name = found[1].lower() if found else ""
        if self._hidden:
            if tag.startswith("/") and name == self._hidden:
                self._hidden = ""
                self.text(rest)
            return
        if name in HIDDEN and not tag.startswith("/") and not tag.endswith("/"):
            self._hidden = name
            return
        self._tag(tag, name)
        self.text(rest)

    def _tag(self, tag: str, name: str) -> None:
        closing = tag.startswith("/")
        if name == "a":
            self._anchor(tag, closing)
        if name in BLOCKS:
            self._out.append("\n")
        if closing:
            return
        if name == "li":
            self._out.append("- ")
        if heading := HEADING.fullmatch(name):
            self._out.append("\n" + "#" * int(heading[1]) + " ")

    def _anchor(self, tag: str, closing: bool) -> None:
        if self._link:
            self._out.append(f" ({self._link})")
        self._link = "" if closing else _address(tag, self._url)

    def text(self, text: str) -> None:
        if not self._hidden and text:
            self._out.append(_plain(text))

    def finish(self) -> str:
        """Leave out empty lines in a row."""
        self._anchor("", closing=True)
        lines = [SPACES.sub(" ", line).strip() for line in "".join(self._out).split("\n")]
        kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
        return "\n".join(kept).strip()


def _plain(text: str) -> str:
    plain = SPACES.sub(" ", text.replace("\n", " "))
    try:
        return html.unescape(plain)
    except ValueError:  # a character's number has thousands of digits
        return plain


def _address(tag: str, url: str) -> str:
    found = HREF.search(tag)
    if found is None:
        return ""
    try:
        address = urljoin(url, html.unescape(found[1] or found[2] or found[3] or "").strip())
        return address if urlsplit(address).scheme in ("http", "https") else ""
    except ValueError:
        return ""
