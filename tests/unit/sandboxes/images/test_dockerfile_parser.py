"""Dockerfiles are read, their copied files chosen, and their steps planned, before anything is built."""

import io
import os
import platform
import tarfile
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import DockerfileError, ImageError, ImageNotFoundError
from sandboxes.images.dockerfile import context
from sandboxes.images.dockerfile.context import BuildContext, IgnoreRules, digest, send
from sandboxes.images.dockerfile.layers import LayerStore
from sandboxes.images.dockerfile.namespace import BuildNamespace
from sandboxes.images.dockerfile.parser import Instruction, parse
from sandboxes.images.dockerfile.plan import BuildPlan, Mount, make_plan, parse_mount
from sandboxes.images.dockerfile.words import Expander, split_words

TEXT = r"""# syntax=docker/dockerfile:1
ARG V=12
FROM debian:${V} AS base
RUN apt-get update && \
    # a comment

    apt-get install -y \
      jq
RUN <<EOF
set -e
echo $HOME
EOF
run cat <<-'X' >/a && echo $((1 << 2)) <<<"y"
	hi
	X
COPY --chown=1:1 --chmod=0644 ["a b", "/c d/"]
COPY <<A <<"B" /etc/
v=$V
A
$V
B
RUN --mount=type=cache,target=/c --network=none -- true
CMD ["a", 1]
"""


def only(text: str) -> Instruction:
    (found,) = parse(text).instructions
    return found


def test_lines_continuations_heredocs_and_flags():
    found = parse(TEXT).instructions
    assert [(one.keyword, one.line) for one in found] == [
        ("ARG", 2),
        ("FROM", 3),
        ("RUN", 4),
        ("RUN", 9),
        ("RUN", 13),
        ("COPY", 16),
        ("COPY", 17),
        ("RUN", 22),
        ("CMD", 23),
    ]
    assert found[2].text.split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "jq"]
    assert (found[3].text, found[3].heredocs[0].text) == ("<<EOF", "set -e\necho $HOME\n")
    assert [(doc.name, doc.text, doc.expands) for doc in found[4].heredocs] == [("X", "hi\n", False)]
    assert (found[5].flags, found[5].array) == ((("chown", "1:1"), ("chmod", "0644")), ("a b", "/c d/"))
    assert [(doc.name, doc.expands) for doc in found[6].heredocs] == [("A", True), ("B", False)]
    assert (found[7].flag("mount"), found[7].flag("network"), found[7].text) == (
        "type=cache,target=/c",
        "none",
        "true",
    )
    assert found[8].array is None, "an array of strings, or no array"
    (heredoc,) = only("RUN <<EOF\r\na\x0cb\u2028c\r\nEOF\r\n").heredocs
    assert heredoc.text == "a\x0cb\u2028c\n", "lines end at line feeds alone"


def test_the_escape_directive():
    text = "# escape=`\nFROM windows\nRUN dir `\n  C:\\\nENV a=`$b"
    assert [one.text for one in parse(text).instructions] == ["windows", "dir   C:\\", "a=`$b"]
    assert only("\n# escape=`\nRUN a \\\n b").text == "a  b", "a directive comes first"
    with pytest.raises(DockerfileError, match="Dockerfile:1: the escape character"):
        parse("# escape=x\nFROM a")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("FROM a\nCOYP b c", "Dockerfile:2: 'COYP' is not an instruction", "did you mean COPY?"),
        ("FROM a\n\nRUN", "Dockerfile:3: RUN needs arguments", ""),
        ("RUN a <<EOF\nx\n", "Dockerfile:1: the here-document EOF has no end", "end it with a line EOF"),
    ],
)
def test_errors_have_a_line_and_a_hint(text, message, hint):
    with pytest.raises(DockerfileError) as caught:
        parse(text)
    assert str(caught.value) == message
    assert caught.value.hint == hint


VARIABLES = {"a": "1", "empty": "", "space": "x y", "quoted": "'"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$a${a}b", "11b"),
        ("${none:-x}${empty:-x}${empty-x}${none-x}", "xxx"),
        ("${a:+x}${empty:+x}${empty+x}${none+x}", "xx"),
        ("${none:-${empty:-$a}}", "1"),
        ('${none:-"a b"}', "a b"),
        ("'$a'\"$a\"\\$a", "$a1$a"),
        (r'"\"\$a\\ \n"', r'"$a\ \n'),
        ("$space$quoted", "x y'"),
        ("$none$1$@-$", "-$"),
        ("${a:?must}", "1"),
        ("trailing\\", "trailing\\"),
    ],
)
def test_words_are_expanded(text, expected):
    assert Expander().expand(text, VARIABLES) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${a", "} is missing|nothing"),
        ("'a", "single quote"),
        ('"a', "double quote"),
        ("${none:?give one}", "give one"),
        ("${empty:?}", "empty is not set"),
        ("${a//x/y}", "is not known"),
        ("${}", "name is missing"),
        pytest.param("${none:-" * 5_000, "nested too deeply", id="nested"),
    ],
)
def test_wrong_words_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Expander().expand(text, VARIABLES)


def test_values_cannot_grow_without_bounds():
    doubled = "".join(f"ARG A{n + 1}=$A{n}$A{n}\n" for n in range(60))
    with pytest.raises(DockerfileError, match=r"longer than .* with that of A"):
        make_plan(parse(f"ARG A0=x\n{doubled}FROM a"), {})


def test_hostile_lines_take_no_time():
    text = "# a=x" + " " * 200_000 + "x\nFROM a\nCOPY " + "x" * 500_000 + " /\nCMD " + "[" * 100_000
    assert [one.array for one in parse(text).instructions] == [None] * 3


def test_heredocs_keep_their_quotes():
    assert Expander().expand('it\'s "$a" \\$a \\n\n', VARIABLES, quotes=False) == 'it\'s "1" $a \\n\n'


PLAIN = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Z"], blacklist_characters="'\"\\$"), min_size=1)


@given(st.lists(PLAIN, max_size=6), st.sampled_from([" ", "\t", "  "]))
def test_words_without_quotes_are_what_split_makes(words, between):
    assert split_words(between.join(words)) == between.join(words).split()


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="'\0")))
def test_single_quotes_keep_everything(text):
    assert Expander().expand(f"'{text}'", {}) == text
    assert split_words(f"a'{text}'b c") == [f"a'{text}'b", "c"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_parsed_or_refused_with_a_line(head, tail):
    text = f"{head}\nFROM a\nRUN {tail}"
    try:
        found = parse(text).instructions
    except DockerfileError as error:
        assert 1 <= error.line <= len(text.splitlines()) + 1  # noqa: PT017
        return
    assert all(one.text or one.keyword == "HEALTHCHECK" for one in found)


@given(st.lists(st.text(st.sampled_from("ab \t$"), min_size=1).map(str.strip).filter(bool), min_size=1))
def test_continuations_lose_nothing(parts):
    joined = only("RUN x" + "".join(f" \\\n# comment\n\n {part}" for part in parts))
    assert joined.text.split() == " ".join(["x", *parts]).split()
    assert joined.line == 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name in ("a.py", "b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "inner").symlink_to("src/deep")
    (folder / "outer").symlink_to("/etc")
    (folder / "away").symlink_to("../../../../etc/passwd")
    return folder


def names(root: Path, *sources: str, unpack: bool = False) -> list[str]:
    return [file.name for file in BuildContext(root).select(sources, unpack=unpack)]


def test_files_folders_and_patterns(root):
    assert names(root, "a.py") == names(root, "/a.py") == names(root, "./../a.py") == ["f/a.py"]
    assert names(root, "*.py", "src/d*") == ["f/a.py", "f/b.py", "d", "d/c.log", "d/c.py"]
    assert names(root, "[!a].py") == names(root, "[^a].py") == ["f/b.py"]
    assert names(root, "s?c/deep/*.py") == ["f/c.py"]
    assert names(root, "inner") == ["d", "d/c.log", "d/c.py"], "a link that is named is followed"
    assert "d/inner" in names(root, "."), "one in a folder stays a link"


@pytest.mark.parametrize("source", ["none", "*.txt", "outer", "outer/passwd", "away", "src/a.py/x"])
def test_nothing_outside_is_found(root, source):
    with pytest.raises(ImageNotFoundError, match="is not in the context"):
        names(root, source)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ("src\n", ["a.py", "b.py", "notes.md", "node/x/y"]),
        ("*.py", ["notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"]),
        ("**/*.py\n# notes.md\n\n", ["notes.md", "src/deep/c.log", "node/x/y"]),
        ("*\n!src/deep\nsrc/deep/*.log", ["src/deep/c.py"]),
        ("/src/deep/\n./node/../b.py", ["a.py", "notes.md", "src/a.py", "node/x/y"]),
        ("**/deep/**", ["a.py", "b.py", "notes.md", "src/a.py", "node/x/y"]),
        ("?.py\n[st]rc", ["notes.md", "node/x/y"]),
        ("a\\.py", ["b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"]),
        ("**", []),
        (
            "\ufeffnode\n!node/x",
            ["a.py", "b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"],
        ),
    ],
)
def test_the_last_rule_that_matches_decides(root, rules, left):
    (root / ".dockerignore").write_text(rules)
    files = [one for one in BuildContext(root).select(["."]) if one.path and one.path.is_file()]
    found = {one.name.removeprefix("d/") for one in files if one.path and not one.path.is_symlink()}
    assert found - {".dockerignore"} == set(left)


def test_rules_beside_a_dockerfile_come_first(root):
    (root / ".dockerignore").write_text("a.py")
    (root / "Dockerfile.dockerignore").write_text("b.py")
    context = BuildContext(root, root / "Dockerfile")
    assert [file.name for file in context.select(["a.py"])] == ["f/a.py"]
    with pytest.raises(ImageNotFoundError, match="dockerignore leaves it out"):
        context.select(["b.py"])


WILD = st.lists(st.sampled_from(["**/", "**", "*", "?", "a", "b", "/", "[ab]"]), min_size=1, max_size=8).map("".join)


@given(WILD, st.text("ab/", max_size=8))
def test_patterns_with_many_wildcards_match_as_those_with_few(pattern, path):
    with mock.patch.object(context, "FEW", -1):
        matches = bool(context._matcher(pattern)(path))
    with mock.patch.object(context, "FEW", 99):
        assert matches is bool(context._matcher(pattern)(path))


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ImageError, match=r"\.dockerignore: '\[z-a\]' is not a pattern"):
        IgnoreRules("x\n[z-a]\n")


def test_a_pattern_takes_linear_time():
    assert not IgnoreRules("a*" * 40 + "b\n" + "**/a/" * 40 + "b").ignores("a/" * 60 + "a" * 200)


def test_an_empty_rule_file_ignores_nothing():
    assert not IgnoreRules("").ignores("a")
    assert not IgnoreRules("!a").ignores("a")


def test_a_digest_counts_content_and_modes_but_no_times(root):
    def found() -> str:
        return digest(BuildContext(root).select(["."]))

    first = found()
    os.utime(root / "a.py", (1, 1))
    assert found() == first
    (root / "a.py").chmod(0o700)
    second = found()
    (root / "inner").unlink()
    (root / "inner").symlink_to("src")
    third = found()
    (root / "src/deep/c.py").rename(root / "src/deep/d.py")
    assert len({first, second, third, found()}) == 4


def test_what_is_sent_belongs_to_root_and_archives_are_unpacked(root):
    with tarfile.open(root / "packed.tar.xz", "w:xz") as tar:
        tar.add(root / "src", "../up")
    pipe = io.BytesIO()
    send(BuildContext(root).select(["a.py", "packed.tar.xz"], unpack=True), pipe)
    pipe.seek(0)
    with tarfile.open(fileobj=pipe) as archive:
        members = archive.getmembers()
    assert [member.name for member in members[:3]] == ["f/a.py", "d/up", "d/up/a.py"]
    assert (members[0].uid, members[0].uname) == (0, "")
    assert names(root, "packed.tar.xz") == ["f/packed.tar.xz"], "COPY copies it as it is"
    os.mkfifo(root / "pipe.tar")
    assert [file.name for file in BuildContext(root).select(["pipe.tar"], unpack=True)] == ["f/pipe.tar"]


def test_two_builds_make_the_folder_of_a_cache_at_once(tmp_path):
    class Late(BuildNamespace):
        def make_folder(self, path):
            super().make_folder(path)  # that of the other build
            return super().make_folder(path)

    assert LayerStore(tmp_path, Late()).cache("pip").is_dir()


def test_an_archive_takes_no_memory_for_its_headers(root):
    long = tarfile.TarInfo("x")
    long.type, long.size = tarfile.XHDTYPE, 64 * 1024 * 1024
    small = tarfile.TarInfo("x").tobuf()
    (root / "many.tar").write_bytes(small * 5_000 + bytes(1_024))
    (root / "long.tar").write_bytes(small + long.tobuf() + bytes(long.size + 1_024))
    with Path(os.devnull).open("wb") as pipe:
        tracemalloc.start()
        send(BuildContext(root).select(["many.tar"], unpack=True), pipe)
        with pytest.raises(ImageError, match="has a header of 67108864 bytes"):
            send(BuildContext(root).select(["long.tar"], unpack=True), pipe)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


STAGES = """ARG TAG=12
FROM debian:${TAG} AS Build
RUN make
FROM build AS other
FROM python:3 AS unused
RUN --mount=type=bind,from=nothing/here,target=/x true
FROM scratch
COPY --from=Build /a /a
COPY --from=1 /b /b
COPY --from=tools:1 /c /c
"""


def plan(text: str, target: str | None = None, **given: str) -> BuildPlan:
    return make_plan(parse(text), given, target)


def test_only_what_the_target_needs_is_built():
    found = plan(STAGES)
    assert [stage.name for stage in found.stages] == ["build", "other", "3"]
    assert found.bases == {"debian:12": 2, "tools:1": 7}
    assert [stage.base for stage in found.stages] == ["debian:12", "build", "scratch"]
    assert [stage.name for stage in plan(STAGES, "BUILD").stages] == ["build"]
    assert plan(STAGES, "unused", TAG="13").bases == {"python:3": 5, "nothing/here": 5}
    assert plan(STAGES, TAG="13").stages[0].base == "debian:13"


def test_arguments_that_nothing_declares_are_told():
    assert plan("ARG A\nFROM a\nARG B=1", A="", B="", C="", HTTP_PROXY="").unused == ("C",)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "there is no FROM"),
        ("RUN true\nFROM a", 1, "RUN comes before the first FROM"),
        ("FROM a b", 1, "is not FROM BASE"),
        ("FROM $X", 1, "is empty"),
        ("FROM ${X:?say which}", 1, "say which"),
        ("FROM a AS 9x", 1, "not a name for a stage"),
        ("FROM a AS b\nFROM c AS B", 2, "two stages"),
        ("FROM --platform=linux/mips a", 1, "cannot run here"),
        ("FROM a\n\nADD https://example.org/x /x", 3, "ADD of the address"),
        ("FROM a\nADD git@github.com:x/y.git /x", 2, "ADD of the address"),
        ("FROM a\nADD --checksum=sha256:1 x /x", 2, "--checksum cannot be had"),
        ("FROM a\nCOPY --parents x /x", 2, "--parents cannot be had"),
        ("FROM a\nCOPY --chmod=u+x x /x", 2, "not an octal mode"),
        ("FROM a\nCOPY --from=$X x /x", 2, "variables mean nothing"),
        ("FROM a\nCOPY --from=3 x /x", 2, "no stage 3"),
        pytest.param(f"FROM a\nCOPY --from={'1' * 5000} x /x", 2, "no stage 1", id="digits"),
        ("FROM a\nCOPY x", 2, "a source and a destination"),
        ("FROM a\nCOPY 'x y", 2, "no end"),
        ("FROM a\nRUN --mount=type=secret,id=x true", 2, "type=secret cannot be had"),
        ("FROM a\nRUN --mount=type=ssh true", 2, "type=ssh cannot be had"),
        ("FROM a\nRUN --mount=type=cache,from=x,target=/c true", 2, "cannot have from"),
        ("FROM a\nRUN --mount=type=cache true", 2, "needs a target"),
        ("FROM a\nRUN --security=insecure true", 2, "--security cannot be had"),
        ("FROM a\nRUN --network=weird true", 2, "--network=weird"),
        ("FROM a\nONBUILD RUN true", 2, "no place"),
        ("FROM a\nSHELL /bin/bash -c", 2, "needs an array"),
        ("FROM a\nENV x", 2, "has no value"),
        ("FROM a\nENV x=1 y z", 2, "is not NAME=VALUE"),
        ("FROM a\nLABEL x=1 'y", 2, "no end"),
        ("FROM a\nFROM b\nARG 'x", 3, "no end"),
    ],
)
def test_what_cannot_be_had_is_named_with_its_line(text, line, message):
    with pytest.raises(DockerfileError, match=f"^Dockerfile:{line}: .*") as caught:
        plan(text)
    assert message in str(caught.value)
    assert caught.value.line == line


def test_an_unknown_target_names_the_stages():
    with pytest.raises(DockerfileError, match="no stage 'x'") as caught:
        plan(STAGES, "x")
    assert caught.value.hint == "its stages are build, other, unused, 3"


def test_this_machine_is_a_platform():
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    assert plan(f"FROM --platform=linux/{machine} a").target.base == "a"
    assert plan("FROM --platform=$BUILDPLATFORM a:$TARGETARCH").target.base == f"a:{machine}"


def test_mounts():
    assert parse_mount("type=cache,target=/c") == Mount("cache", "/c", "/c")
    assert parse_mount("type=cache,target=/c,id=pip,sharing=locked") == Mount("cache", "/c", "pip")
    assert parse_mount("target=/x,source=a/b,from=build") == Mount("bind", "/x", "a/b", "build")
    assert parse_mount("type=tmpfs,dst=/t") == Mount("tmpfs", "/t", "/")
