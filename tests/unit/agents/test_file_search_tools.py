"""`glob` and `grep` find files, take the policy's words as data, and say what they leave out."""

import pytest

from rollout_service.agents.tool_calling import builtin_tools
from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError, by_name

TOOLS = by_name(BUILTIN_TOOLS)


@pytest.fixture
async def use(local_sandbox):
    for path, text in [
        ("src/a.py", "import os\nprint('Hello')\n"),
        ("src/deep/b.py", "x = 1  # hello\n"),
        ("src/notes and more.txt", "hello there\n"),
        ("src/.git/config", "hello = git\n"),
    ]:
        await local_sandbox.write_file(path, text)

    async def call(name, output_chars=4_000, **arguments):
        result = await TOOLS[name](arguments, ToolContext(local_sandbox, 20.0, output_chars))
        return result.text

    return call


async def test_glob_finds_files_at_any_depth(use):
    assert await use("glob", pattern="**/*.py") == "src/a.py\nsrc/deep/b.py"
    assert await use("glob", pattern="*", path="src") == "a.py\ndeep/\nnotes and more.txt"
    assert await use("glob", pattern="a.py", path="src") == "a.py"
    assert await use("glob", pattern="none.py", path="src") == "[no file matches]"
    assert await use("glob", pattern="*.rs") == "[no file matches]"


async def test_a_pattern_is_never_run(use, local_sandbox):
    for pattern in ("$(touch made)", "`touch made`", "; touch made", "* made; touch made"):
        await use("glob", pattern=pattern)
        await use("grep", pattern=pattern.replace("*", ""), path="src")
    assert await use("glob", pattern="made") == "[no file matches]"
    assert await use("glob", pattern="notes and *", path="src") == "notes and more.txt"


async def test_grep_shows_file_line_and_text(use):
    assert await use("grep", pattern="hello", path="src/deep") == "src/deep/b.py:1:x = 1  # hello"
    found = await use("grep", pattern="hello", path="src", ignore_case=True, include="*.py")
    assert sorted(found.split("\n")) == ["src/a.py:2:print('Hello')", "src/deep/b.py:1:x = 1  # hello"]
    assert ".git" not in await use("grep", pattern="hello")
    assert await use("grep", pattern="absent") == "[no line matches]"
    assert await use("grep", pattern="-n", path="src") == "[no line matches]"


async def test_mistakes_are_explained(use):
    for name, arguments, message in [
        ("grep", {"pattern": "(", "path": "src"}, "[Pp]arenthes|Unmatched"),
        ("grep", {"pattern": "a", "path": "none"}, "none: no such file"),
        ("glob", {"pattern": "*", "path": "none"}, "none: no such file"),
        ("glob", {"pattern": "a\0"}, "pattern holds a NUL"),
        ("glob", {"pattern": ""}, "pattern: "),
    ]:
        with pytest.raises(ToolInputError, match=message):
            await use(name, **arguments)


async def test_what_is_left_out_is_said(use, local_sandbox, monkeypatch):
    monkeypatch.setattr(builtin_tools, "MOST_FILES", 2)
    monkeypatch.setattr(builtin_tools, "MOST_LINES", 3)
    await local_sandbox.write_file("many.txt", "line\n" * 50 + "y" * 5_000)
    assert (await use("glob", pattern="**/*")).endswith("more files match; give a narrower pattern]")
    found = await use("grep", pattern="line", path="many.txt")
    assert found.startswith("many.txt:1:line\nmany.txt:2:line\nmany.txt:3:line\n[only")
    assert found.endswith("[only the first 3 matching lines; give a narrower pattern or path]")
    assert "more]" in await use("grep", pattern="y", path="many.txt")


async def test_think_changes_nothing():
    assert (await TOOLS["think"]({"thought": "hm"}, ToolContext(None, 1.0, 1_000))).text == "noted"
