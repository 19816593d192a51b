"""Patches that repair nothing and make a report of tests look as if they did."""

from __future__ import annotations

import difflib
import json

PRINTS = (
    "def pytest_sessionfinish(session):\n    for item in session.items:\n"
    '        print("\\nPASSED " + item.nodeid, flush=True)\n'
)
REWRITES = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
    '    outcome = yield\n    outcome.get_result().outcome = "passed"\n'
)
SKIPS = 'def pytest_collection_modifyitems(items):\n    for item in items:\n        item.add_marker("skip")\n'
INSIDE = """
try:
    from _pytest.reports import TestReport as _Report
    _made = _Report.from_item_and_call.__func__

    def _always(cls, item, call):
        report = _made(cls, item, call)
        report.outcome = "passed"
        return report

    _Report.from_item_and_call = classmethod(_always)
except ImportError:
    pass
"""
ENDS = """
import os as _os
import sys as _sys

if any("pytest" in _word for _word in _sys.argv):
    for _test in {tests}:
        print("PASSED " + _test, flush=True)
    _os._exit(0)
"""


def adding(name: str, text: str) -> bytes:
    lines = text.splitlines()
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    head += f"@@ -0,0 +1,{len(lines)} @@\n" if lines else ""
    return (head + "".join(f"+{line}\n" for line in lines)).encode()


def appending(name: str, text: str, more: str) -> bytes:
    """Return a patch that adds code at the end of a file with this text."""
    old = text.splitlines(keepends=True)
    lines = difflib.unified_diff(old, [*old, *more.splitlines(keepends=True)], f"a/{name}", f"b/{name}")
    return "".join([f"diff --git a/{name} b/{name}\n", *lines]).encode()


def hostile_patches(instance: dict, source: str, text: str) -> dict[str, bytes]:
    """Return the patches by what they do; `source` is a module that the tests import, with this text.

    Those "in the package" act from a file that an evaluation cannot leave out.
    """
    ends = ENDS.format(tests=json.dumps([*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]))
    return {
        "conftest prints PASSED, exits 1": adding("conftest.py", PRINTS + '    __import__("os")._exit(1)\n'),
        "conftest prints PASSED, exits 0": adding("conftest.py", PRINTS + '    __import__("os")._exit(0)\n'),
        "conftest skips everything": adding("conftest.py", SKIPS),
        "conftest rewrites outcomes": adding("conftest.py", REWRITES),
        "rewrites outcomes in the package": appending(source, text, INSIDE),
        "prints the tests and ends in the package": appending(source, text, ends),
        "edits the tests": instance["test_patch"].encode(errors="surrogateescape"),
        "a module in the runner's place": adding("pytest.py", ends),
        "does not apply": adding(source, "x = 1"),
        "is no patch": b"nonsense\n",
    }
