"""Modules become one script in which each has what it imports; what cannot be joined is refused."""

import re

import pytest

from rollout_service.server.dashboard.saved_page import check_embeddable, join_modules


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


@pytest.mark.parametrize(
    "form", ["let t;export default function(s){return s}", "const t = 1;\nexport default t;"]
)
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
