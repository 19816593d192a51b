"""The editor changes what the policy names and nothing else, and says what to do about each mistake."""

import posixpath

import pytest

from rollout_service.agents.tool_calling import builtin_tools, editor
from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError, by_name

EDITOR = by_name(BUILTIN_TOOLS)["str_replace_editor"]


class Editing:
    """Calls of the editor within one episode."""

    def __init__(self, sandbox, output_chars=4_000):
        self.sandbox = sandbox
        self.context = ToolContext(sandbox, 20.0, output_chars)

    async def __call__(self, command, path="a.txt", **arguments):
        result = await EDITOR({"command": command, "path": path, **arguments}, self.context)
        return result.text

    async def refused(self, command, path="a.txt", **arguments):
        with pytest.raises(ToolInputError) as caught:
            await self(command, path, **arguments)
        return str(caught.value)

    async def content(self, path="a.txt"):
        return (await self.sandbox.read_file(path)).decode()


@pytest.fixture
def edit(local_sandbox):
    return Editing(local_sandbox)


def test_its_definition_names_every_argument_without_null():
    parameters = EDITOR.definition["function"]["parameters"]
    assert parameters["required"] == ["command", "path"]
    assert parameters["properties"]["command"]["enum"] == [*("view", "create", "str_replace", "insert", "undo_edit")]
    assert parameters["properties"]["old_str"] == {
        "description": "for str_replace; must occur exactly once",
        "type": "string",
    }
    assert "null" not in str(parameters)
    assert "None" not in str(parameters)


@pytest.mark.slow
async def test_a_file_is_created_changed_and_restored_step_by_step(edit):
    assert await edit("create", file_text="one\ntwo\nthree\n") == "created a.txt"
    assert "     2\tTWO" in await edit("str_replace", old_str="two", new_str="TWO")
    assert "     1\tzero" in await edit("insert", insert_line=0, new_str="zero")
    await edit("insert", insert_line=4, new_str="four")
    assert await edit.content() == "zero\none\nTWO\nthree\nfour"
    await edit("str_replace", old_str="zero\n")
    assert await edit.content() == "one\nTWO\nthree\nfour"
    for left in (
        "zero\none\nTWO\nthree\nfour",
        "zero\none\nTWO\nthree\n",
        "one\nTWO\nthree\n",
        "one\ntwo\nthree\n",
    ):
        await edit("undo_edit")
        assert await edit.content() == left
    assert "removed again" in await edit("undo_edit")
    assert "no such file" in (await edit.refused("view")).lower()
    assert "no edit to undo" in await edit.refused("undo_edit")


async def test_an_undo_that_cannot_remove_the_file_may_be_tried_again(edit, monkeypatch):
    async def fail(_, words, context, *, limit):
        return await builtin_tools.run_script("echo no such luck >&2; exit 1", words, context, limit=limit)

    await edit("create", file_text="one")
    with monkeypatch.context() as broken:
        broken.setattr(editor, "run_script", fail)
        assert "a.txt cannot be removed: no such luck" in await edit.refused("undo_edit")
    assert "removed again" in await edit("undo_edit")


async def test_undo_is_per_file_and_knows_it_by_any_path(edit, local_sandbox):
    await edit("create", "a.txt", file_text="a")
    await edit("create", "b.txt", file_text="b")
    absolute = posixpath.join(local_sandbox.workdir, "sub/../a.txt")
    await edit("create", absolute, file_text="A")
    await edit("undo_edit", "a.txt")
    assert (await edit.content("a.txt"), await edit.content("b.txt")) == ("a", "b")


async def test_the_history_is_bounded(edit, monkeypatch):
    monkeypatch.setattr(editor, "HISTORY_BYTES", 1_000)
    for text in ("a" * 600, "b" * 600, "c" * 600):
        await edit("create", file_text=text)
    await edit("undo_edit")
    assert await edit.content() == "b" * 600
    assert "no edit to undo" in await edit.refused("undo_edit")


async def test_mistakes_say_what_to_do(edit, local_sandbox):
    await edit("create", file_text="x = 1\ny = 1\n")
    assert "2 times, in lines 1, 2" in await edit.refused("str_replace", old_str="= 1", new_str="= 2")
    assert "does not occur" in await edit.refused("str_replace", old_str="z", new_str="")
    assert "str_replace needs old_str" in await edit.refused("str_replace", new_str="z")
    assert "create needs file_text" in await edit.refused("create")
    assert "insert needs insert_line" in await edit.refused("insert", new_str="z")
    assert "within 0 and 2" in await edit.refused("insert", insert_line=3, new_str="z")
    assert "within 1 and 2" in await edit.refused("view", view_range=[2, 9])
    assert "command: Input should be" in await edit.refused("delete")
    assert "NUL" in await edit.refused("view", "a\0b")
    assert await edit.content() == "x = 1\ny = 1\n"
    await local_sandbox.write_file("dos.txt", b"a\r\nb\r\n")
    assert r"\r\n" in await edit.refused("str_replace", "dos.txt", old_str="a\nb", new_str="c")


async def test_images_and_large_files_are_refused_clearly(edit, local_sandbox):
    await local_sandbox.write_file("picture.png", b"\x89PNG\r\n\x1a\n\0\0")
    assert "images and other binary files" in await edit.refused("view", "picture.png")
    await local_sandbox.write_file("large.txt", b"x" * (editor.FILE_BYTES + 1))
    assert "more than 1048576 bytes" in await edit.refused("view", "large.txt")
    assert "more than 1048576 bytes" in await edit.refused("create", "large.txt", file_text="")


async def test_a_view_says_what_it_leaves_out(local_sandbox):
    edit = Editing(local_sandbox, output_chars=600)
    await edit("create", file_text="".join(f"line {n}\n" for n in range(1, 1001)))
    seen = await edit("view")
    assert len(seen) <= 600
    assert "     1\tline 1\n" in seen
    last = int(seen.split("\n")[-2].split("\t")[0])
    assert seen.endswith(f"[lines 1 to {last} of 1000; view_range shows others]")
    assert "  1000\tline 1000\n" in await edit("view", view_range=[998, -1])
    await edit("create", file_text="x" * 5_000)
    seen = await edit("view")
    assert "characters cut" in seen
    assert len(seen) <= 600


async def test_a_folder_is_shown_two_levels_deep(edit, local_sandbox):
    await local_sandbox.write_file("p/q/r.txt", "")
    await local_sandbox.write_file("p/.hidden", "")
    assert await edit("view", "p") == "q/\nq/r.txt"
    assert "for files" in await edit.refused("view", "p", view_range=[1, 2])
    assert await edit("view", "p/q/r.txt") == "[an empty file]"


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


async def test_grep_shows_file_line_and_text(use, local_sandbox):
    assert await use("grep", pattern="hello", path="src/deep") == "src/deep/b.py:1:x = 1  # hello"
    found = await use("grep", pattern="hello", path="src", ignore_case=True, include="*.py")
    assert sorted(found.split("\n")) == ["src/a.py:2:print('Hello')", "src/deep/b.py:1:x = 1  # hello"]
    assert ".git" not in await use("grep", pattern="hello")
    await local_sandbox.write_file("src/pages.c", "one\f\x85\u2028two\r\n")
    assert await use("grep", pattern="two", path="src/pages.c") == "src/pages.c:1:one\f\x85\u2028two\r"
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


@pytest.mark.parametrize("name", ["glob", "grep"])
async def test_a_search_that_was_killed_has_not_found_nothing(use, monkeypatch, name):
    monkeypatch.setattr(builtin_tools, f"{name.upper()}_SCRIPT", "kill -KILL $$")
    with pytest.raises(ToolInputError, match="ended by signal 9"):
        await use(name, pattern="hello")


async def test_what_is_left_out_is_said(use, local_sandbox, monkeypatch):
    monkeypatch.setattr(builtin_tools, "MOST_FILES", 2)
    monkeypatch.setattr(builtin_tools, "MOST_LINES", 3)
    await local_sandbox.write_file("many.txt", "line\n" * 50 + "y" * 5_000)
    assert (await use("glob", pattern="**/*")).endswith("more files match; give a narrower pattern]")
    found = await use("grep", pattern="line", path="many.txt")
    assert found.startswith("many.txt:1:line\nmany.txt:2:line\nmany.txt:3:line\n[only")
    assert found.endswith("[only the first 3 matching lines; give a narrower pattern or path]")
    assert "more]" in await use("grep", pattern="y", path="many.txt")
