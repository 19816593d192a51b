"""What a Dockerfile asks for is decided before anything is built."""

import platform

import pytest

from sandboxes.errors import DockerfileError
from sandboxes.images.dockerfile.parser import KEYWORDS, parse
from sandboxes.images.dockerfile.plan import FLAGS, TREATMENT, BuildPlan, Mount, make_plan, parse_mount

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


def test_every_instruction_has_a_treatment():
    assert set(TREATMENT) == set(KEYWORDS)
    assert set(FLAGS) <= set(KEYWORDS)


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
