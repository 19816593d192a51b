"""A saved page runs its one script and nothing of its data, whatever that says."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urlsplit

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_service.server.dashboard.saved_page import json_block, saved_page

ATTACK = "</script><script>alert(1)</script><!-- <script> \u2028 \x00 ]]> &lt;/script&gt;"
HOSTILE = st.lists(
    st.sampled_from(
        ["</script", "</SCRIPT>", "<!--", "-->", "<script>", '"', "'", "&lt;", "\\", "\u2028", "a"]
    ),
    max_size=8,
).map("".join)
TEXTS = st.one_of(st.text(max_size=30), HOSTILE)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)


class Elements(HTMLParser):
    """The scripts and styles of a document, as (tag, attributes, text)."""

    def __init__(self, content: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.metas: list[dict[str, str | None]] = []
        self.title = ""
        self._open = ""
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        if tag == "meta":
            self.metas.append(dict(attrs))
        if tag in ("script", "style"):
            self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            tag, attributes, text = self.found.pop()
            self.found.append((tag, attributes, text + data))
        elif self._open == "title":
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


@given(name=TEXTS, value=VALUES)
@example(name=ATTACK, value={ATTACK: [ATTACK]})
def test_data_never_ends_its_element(name, value):
    block = json_block(name, json.dumps(value, ensure_ascii=False).encode()).decode()
    start, _, rest = block.partition(">")
    assert rest.endswith("</script>\n")
    content = rest.removesuffix("</script>\n")
    assert "<" not in content
    assert json.loads(content) == value
    assert re.fullmatch(r"<script type=\"application/json\" data-path=\"[^\"<>]*\"", start)
    assert unescape(start.partition('data-path="')[2].removesuffix('"')) == name


@settings(max_examples=15)  # the document is long
@given(value=VALUES)
@example(value=ATTACK)
def test_the_document_has_one_script_that_runs_and_its_data_comes_back(value):
    content = saved_page(ATTACK, {"one": json.dumps(value).encode(), "two": b"{}"})
    page = Elements(content)
    assert [(tag, more.get("type"), more.get("data-path")) for tag, more, _ in page.found] == [
        ("style", None, None),
        ("script", "application/json", "one"),
        ("script", "application/json", "two"),
        ("script", "module", None),
    ]
    assert json.loads(page.found[1][2]) == value
    assert page.title == ATTACK


def test_the_policy_allows_the_one_script_and_style_and_nothing_else():
    page = Elements(saved_page("r-1", {}))
    [policy] = [meta["content"] for meta in page.metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    texts = {tag: text for tag, _, text in page.found}
    hashes = {
        tag: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for tag, text in texts.items()
    }
    assert parts == {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "connect-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_the_policy_comes_before_all_that_it_is_for():
    content = saved_page("r-1", {"one": b"{}"}).decode()
    assert content.index("Content-Security-Policy") < content.index("<style") < content.index("<script")


def test_the_document_names_no_address():
    content = saved_page("r-1", {}).decode()
    style = content[content.index("<style>") : content.index("</style>")]
    assert not re.findall(r"url\(|@import", style)
    assert not re.findall(r"(?:src|href)=\"[^#]|sourceMappingURL|import\(|[^#]\bfetch\(", content)
    assert {urlsplit(found).netloc for found in re.findall(r"https?://[^\s\"']+", content)} == {"www.w3.org"}
