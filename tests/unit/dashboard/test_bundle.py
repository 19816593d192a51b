"""The page is bundled as it is served, and a rollout's page is saved as one file."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_service.server.dashboard.saved_page import check_embeddable, join_modules, json_block, saved_page


def joined(entry: str, **more: str) -> str:
    files = {"lib/a.js": "export const a = 1;\n", "lib/b.js": 'import {a} from "./a.js";\nexport {a};\n'}
    files |= {name.replace("__", "/") + ".js": text for name, text in more.items()}
    return join_modules(files | {"main.js": entry}, "main.js", {})


def test_a_module_comes_once_and_behind_what_it_imports():
    text = joined('import {a} from "./lib/a.js";\nimport {a as other} from "./lib/b.js";\nrun(a, other);\n')
    begun = re.findall(r"^const (\w+_js) = \(\(\) => \{$", text, re.MULTILINE)
    assert begun == ["lib_a_js", "lib_b_js", "main_js"]
    assert "const {a: a} = lib_a_js;" in text
    assert "const {a: other} = lib_b_js;" in text


@pytest.mark.parametrize(
    ("exports", "returned"),
    [
        ("export const it = 1;", "{it: it}"),
        ("export function it() {}", "{it: it}"),
        ("export async function it() {}", "{it: it}"),
        ("export function* it() {}", "{it: it}"),
        ("export class it {}", "{it: it}"),
        ("const x=1;export{x as it};", "{it: x}"),
        ("const o = {};\nexport const {it, other} = o;", "{it: it, other: other}"),
        ("var x=1;export{\n  x as it,\n};", "{it: x}"),
    ],
)
def test_what_a_module_exports_is_returned(exports, returned):
    text = joined('import {it as mine} from "./it.js";', it=exports)
    assert f"return {returned};" in text
    assert "export" not in text
    assert "const {it: mine} = it_js;" in text


@pytest.mark.parametrize("form", ["let t;export default function(s){return s}", "const t = 1;\nexport default t;"])
def test_a_default_is_taken_under_any_name(form):
    text = joined('import mine from "./it.js";', it=form)
    assert "return {default: default_export};" in text
    assert "const {default: mine} = it_js;" in text


def test_another_module_stands_in_for_one():
    files = {
        "a.js": 'import {it} from "./lib/api.js";\nexport const a = it;',
        "lib/api.js": "export const it = 1;",
        "saved.js": "export const it = 2;",
        "main.js": 'import {a} from "./a.js";\nimport {it} from "./saved.js";\n',
    }
    text = join_modules(files, "main.js", {"lib/api.js": "saved.js"})
    assert "lib_api_js" not in text
    assert text.count("const saved_js =") == 1
    assert "const {it: it} = saved_js;\nconst a = it;" in text


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('import {a} from "./lib/none.js";', "no module lib/none.js"),
        ('import {a} from "preact";', "'preact' is not a relative path"),
        ('import {none} from "./lib/a.js";', "does not export 'none'"),
        ('import mine from "./lib/a.js";', "does not export 'default'"),
        ('import {it} from "./circle.js";', "main.js -> circle.js -> main.js"),
        ('import * as all from "./lib/a.js";', "a form that is not known"),
        ('import "./lib/a.js";', "a form that is not known"),
        ('export * from "./lib/a.js";', "a form that is not known"),
        ("export let changes = 1;", "a form that is not known"),
        ("run('</script>');", "cannot be in an element"),
        ("run('<!-- x');", "cannot be in an element"),
    ],
)
def test_what_cannot_be_joined_is_refused(entry, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        joined(entry, circle='import {x} from "./main.js";\nexport const it = x;')


@pytest.mark.parametrize("text", ["</SCRIPT >", "a</style", "<ScRiPt", "x<!--"])
def test_no_text_ends_its_element(text):
    with pytest.raises(ValueError, match="cannot be in an element"):
        check_embeddable(f"before {text} behind")


def test_other_texts_may_be_in_an_element():
    assert check_embeddable("a < b && c <! d") == "a < b && c <! d"


ATTACK = "</script><script>alert(1)</script><!-- <script> \u2028 \x00 ]]> &lt;/script&gt;"
HOSTILE = st.lists(
    st.sampled_from(["</script", "</SCRIPT>", "<!--", "-->", "<script>", '"', "'", "&lt;", "\\", "\u2028", "a"]),
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
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    texts = {tag: text for tag, _, text in page.found}
    hashes = {tag: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for tag, text in texts.items()}
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
