"""Images are built from Dockerfiles without a daemon and without a registry, as root and as an ordinary user."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from rollout_service.cli import app
from sandboxes import ApptainerConfig, SandboxSpec, make_provider
from sandboxes.errors import DockerfileError, ImageBuildError, ImageNotFoundError
from sandboxes.host.facts import find_apptainer
from sandboxes.images import squashfs
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfile import namespace
from sandboxes.images.dockerfiles import build_many, dockerfile_at, find_bases
from sandboxes.images.facts import read_environment, read_labels
from sandboxes.images.store import ImageStore, StoredImage
from sandboxes.images.tree import ImageTree
from tests.support.processes.children import killed
from tests.support.processes.service import eventually
from tests.support.users.as_user import ordinary_user

pytestmark = [pytest.mark.apptainer, pytest.mark.slow(seconds=100)]

STAGES = r"""
ARG BASE=base
FROM none AS unused
FROM ${BASE} AS made
ARG WHO=world
ENV GREETING="hello ${WHO}" PATH=/opt/tools:$PATH
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY --chmod=0755 src/ ./
RUN <<EOF
set -eu
tool >out  # found by PATH
echo "$GREETING" >>out
EOF
RUN <<EOF
#!/usr/bin/env python3
print("a program", file=open("/src/program", "w"))
EOF
RUN cat >>out <<EOF && ! (false | true)
who=$WHO
EOF
RUN --mount=type=bind,source=src,target=/bound --mount=type=cache,target=/cache --mount=type=tmpfs,target=/fast \
    ls /bound >bound; touch /cache/x /fast/y; test -e /cache/x

FROM base
RUN useradd --create-home --uid 1234 app && rm -r /usr/share/doc && mkdir /usr/share/doc
COPY --from=made --chown=app /src/out /opt/made/
COPY --from=1 /src/p* /src/bound /opt/
COPY <<ONE <<"TWO" /opt/docs/
path $PATH
ONE
path $PATH
TWO
ADD packed.tar.gz /opt/unpacked
USER app
WORKDIR place/here
RUN id -un >/tmp/user; touch ~/mine; stat -c %U ~/mine /opt/made/out >>/tmp/user
ENV A=1 B="two words" C='$A'
ENV	D	$A x
LABEL my.label="x y"
ENTRYPOINT ["/bin/echo", "ran"]
CMD ["by default"]
EXPOSE 80/tcp
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images and layers that tests of this module share: what is equal is built once."""
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def store(built: Path) -> ImageStore:
    return ImageStore(built / "images", ApptainerBuilder(built / "layers"))


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    (folder / "src").mkdir(parents=True)
    (folder / "src/tool").write_text("#!/bin/sh\necho from the tool\n")
    (folder / "src/left.out").write_text("never copied")
    (folder / ".dockerignore").write_text("**/*.out\n")
    with tarfile.open(folder / "packed.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("deep/file")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"hi"))
    return folder


BASE = {"base": str(ImageStore().root / "base.sif")}


def build(store: ImageStore, folder: Path, text: str, **options: Any) -> tuple[StoredImage, list[str]]:
    (folder / "Dockerfile").write_text(text)
    lines: list[str] = []
    source = find_bases(store, replace(dockerfile_at(folder), **options), BASE)
    return store.provide(source, progress=lines.append), lines


def steps(lines: list[str]) -> list[str]:
    """Return the steps that ran."""
    return [
        line
        for line in lines
        if line.startswith("Dockerfile:") and not line.endswith("(unchanged)") and ": FROM" not in line
    ]


def unpacked(image: Path, target: Path) -> ImageTree:
    squashfs.unpack(find_apptainer(), image, target)
    return ImageTree(target)


def text_of(tree: ImageTree, path: str) -> str:
    return (tree.read(path) or b"").decode()


def leftovers(built: Path) -> list[Path]:
    return [*(built / "layers/drafts").glob("*"), *(built / "images/drafts").glob("*")]


def test_stages_heredocs_copies_and_settings(store, context, tmp_path, built):
    made, lines = build(store, context, STAGES.replace("/opt/tools", "/src"))
    assert made.name == "task"
    assert len(steps(lines)) >= 13
    tree = unpacked(made.path, tmp_path / "root")
    assert text_of(tree, "/opt/made/out") == "from the tool\nhello world\nwho=world\n"
    assert text_of(tree, "/opt/program") == "a program\n"
    assert text_of(tree, "/opt/bound") == "tool\n", ".dockerignore holds for mounts too"
    assert text_of(tree, "/opt/docs/ONE").startswith("path /usr")
    assert text_of(tree, "/opt/docs/TWO") == "path $PATH\n"
    assert text_of(tree, "/opt/unpacked/deep/file") == "hi"
    assert text_of(tree, "/tmp/user").split() == ["app"] * 3
    assert tree.names("/usr/share/doc") == []
    assert tree.names("/src") == [], "only the last stage is the image"
    variables = read_environment(tree)
    assert [variables[name] for name in "ABCD"] == ["1", "two words", "$A", "1 x"]
    assert "GREETING" not in variables
    labels = read_labels(tree)
    assert (labels["docker.workdir"], labels["docker.user"]) == ("/place/here", "app")
    assert (labels["my.label"], labels["docker.expose"]) == ("x y", "80/tcp")
    assert json.loads(labels["docker.cmd"]) == ["by default"]
    privileges = ["--no-privs"] if os.geteuid() == 0 else []
    ran = [find_apptainer(), "--silent", "run", *privileges, "--containall", made.path]
    said = subprocess.run(ran, capture_output=True, text=True, check=True)
    assert said.stdout == "ran by default\n"
    assert leftovers(built) == []


CACHED = """
FROM base
RUN echo one >/one
COPY first /a/
RUN cat /a/first >/two
COPY second /a/
RUN echo three >/three
"""


def test_only_what_changed_runs_again(store, context):
    for name in ("first", "second", "unrelated"):
        (context / name).write_text(name)
    made, lines = build(store, context, CACHED)
    assert len(steps(lines)) == 5
    (context / "unrelated").write_text("changed")
    os.utime(context / "first")
    assert build(store, context, CACHED) == (made, []), "nothing that counts has changed"
    (context / "second").write_text("changed")
    changed, lines = build(store, context, CACHED)
    assert [line.split(": ")[0] for line in steps(lines)] == [f"Dockerfile:{line}" for line in (6, 7)]
    assert changed.key != made.key
    _, lines = build(store, context, CACHED, cached=False, arguments={"unknown": "1"})
    assert len(steps(lines)) == 5
    assert "no ARG declares the build argument unknown" in lines


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "FROM base\nRUN touch /x\nADD https://example.org/x /x",
            DockerfileError,
            "Dockerfile:3: ADD of the",
        ),
        (
            "FROM base\nRUN echo why; exit 3",
            ImageBuildError,
            "Dockerfile:2: RUN echo why; exit 3: failed .* 3\nwhy",
        ),
        ('FROM base\nRUN ["/no/such"]', ImageBuildError, "Dockerfile:2: .* 127\n/no/such: No such file"),
        ("FROM base\nUSER nobody-here\nRUN true", ImageBuildError, "Dockerfile:3: .* no user 'nobody-here'"),
        pytest.param(f"FROM base\nUSER {'1' * 5000}\nRUN true", ImageBuildError, "Dockerfile:3: .* limit", id="digits"),
        ("FROM base\nRUN <<../x\n#!/bin/sh\n../x", DockerfileError, "Dockerfile:2: .* cannot have a slash"),
        ("FROM base\nCOPY missing /x", ImageNotFoundError, "'missing' is not in the context"),
        ("FROM base\nCOPY src/left.out /x", ImageNotFoundError, "leaves it out"),
        (
            "FROM base AS a\nFROM base\nCOPY --from=a /none /x",
            ImageBuildError,
            "Dockerfile:3: .*/none is not there",
        ),
        ("FROM base\nARG N\nCOPY ${N:?say} /x", DockerfileError, "Dockerfile:3: say$"),
        ("FROM base\nCOPY src /etc/passwd", ImageBuildError, "Dockerfile:2: COPY .* is a file"),
    ],
)
def test_a_failure_names_file_line_and_cause_and_leaves_nothing(store, context, built, text, kind, message):
    before = store.list()
    with pytest.raises(kind, match=message):
        build(store, context, text)
    assert store.list() == before
    assert leftovers(built) == []


def test_a_missing_base_says_how_to_name_one(store, context):
    (context / "Dockerfile").write_text("FROM localhost:9/nothing:here")
    with pytest.raises(ImageBuildError, match="Dockerfile:1: the base localhost:9/nothing:here") as caught:
        find_bases(store, dockerfile_at(context))
    assert "--base localhost:9/nothing:here=PATH" in caught.value.hint
    with pytest.raises(ImageNotFoundError, match="there is no /none"):
        find_bases(store, dockerfile_at(context), {"localhost:9/nothing:here": "/none"})


def test_an_image_that_is_too_large_is_ended_and_leaves_nothing(store, context, built):
    kept = sorted((built / "layers").glob("*/fs"))
    text = "FROM base\nRUN while :; do head -c 9000000 /dev/zero >>/x$((n += 1)) || exit 0; done"
    with pytest.raises(ImageBuildError, match=r"Dockerfile:2: .* takes more than 0\.5 GB") as caught:
        build(store, context, text, max_bytes=500_000_000)
    assert "--max-gb" in caught.value.hint
    with pytest.raises(ImageBuildError, match="Dockerfile:1: FROM base: the image takes more"):
        build(store, context, "FROM base\nRUN true", max_bytes=1000)
    assert sorted((built / "layers").glob("*/fs"))[: len(kept)] == kept
    assert leftovers(built) == []


HOSTILE = r"""
FROM base
RUN --network=none ! ls /root/.cache /proc/1/root/root/.cache 2>/dev/null && test "$(cat /proc/1/comm)" = sh \
    && test -z "$(ls -A /sys)$(ls -A /mnt)" && ! mount -t tmpfs none /mnt 2>/dev/null && ! mknod /x b 8 0 2>/dev/null \
    && ! echo 1 2>/dev/null >/proc/sys/kernel/panic && test "$(wc -l </proc/net/dev)" -le 3 \
    && ps ax | wc -l >/processes
"""


def test_a_step_has_nothing_of_the_host(store, context, tmp_path):
    made, _ = build(store, context, HOSTILE)
    tree = unpacked(made.path, tmp_path / "root")
    assert int(text_of(tree, "/processes")) < 6


REMOVER = """
import os, sys
from pathlib import Path
from sandboxes.images.dockerfile.namespace import BuildNamespace, StepJob
ids, folder = BuildNamespace(), Path(sys.argv[1])
for name in ("fs", "work"):
    ids.make_folder(folder / "layer" / name)
base = ids.make_folder(folder / "base")
job = StepJob("folder", [base], changes=folder / "layer", dest="/left")
assert ids.run(job).exit_code == 0
os.mkdir(folder / "layer/fs/closed")
chown = StepJob("tool", argv=["chown", "-R", "7:7", "/tmp/in0"], inputs=[folder / "layer/fs"])
assert ids.run(chown).exit_code == 0
assert (folder / "layer/fs/left").stat().st_uid not in {0, os.geteuid()}
ids.cancel()
ids.remove(folder)
assert not folder.exists()
"""

BUILDER = """
import sys
from pathlib import Path
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import dockerfile_at, find_bases
from sandboxes.images.store import ImageStore
root, folder, base = map(Path, sys.argv[1:])
store = ImageStore(root / "images", ApptainerBuilder(root / "layers"))
source = find_bases(store, dockerfile_at(folder), {"base": str(base)})
print(store.provide(source, progress=lambda line: print(line, flush=True)).path)
"""


def processes_of(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():  # others have arguments of any bytes
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_build_that_is_killed_leaves_no_process_and_the_next_one_cleans_up(store, context, built):
    number = f"98{os.getpid()}"  # of seconds, by which the step's process is found
    (context / "Dockerfile").write_text(f"FROM base\nRUN touch /before\nRUN touch /half; sleep {number}")
    command = [sys.executable, "-c", BUILDER, built, context, BASE["base"]]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    with killed(started) as builder:
        eventually(lambda: processes_of(f"sleep\0{number}") != [])
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        eventually(lambda: processes_of(number) == [])
    assert leftovers(built) != []
    _, lines = build(store, context, "FROM base\nRUN touch /before\nRUN touch /after")
    assert "Dockerfile:2: RUN touch /before (unchanged)" in lines
    assert leftovers(built) == []


async def test_many_are_built_at_once_and_one_that_fails_stops_no_other(built, tmp_path):
    store = ImageStore(built / "images", ApptainerBuilder(built / "layers"))
    sources = {}
    for name in ("a", "b", "wrong"):
        folder = tmp_path / name
        folder.mkdir()
        last = "RUN exit 1" if name == "wrong" else f"RUN echo {name} >/name"
        (folder / "Dockerfile").write_text(f"FROM base\nRUN touch /shared\n{last}")
        sources[name] = dockerfile_at(folder)
    outcomes = await build_many(store, sources, given=BASE, jobs=2)
    assert [(one.name, one.image is not None) for one in outcomes] == [
        ("a", True),
        ("b", True),
        ("wrong", False),
    ]
    assert "Dockerfile:3: RUN exit 1" in str(outcomes[2].error)
    lines: list[str] = []
    again = await build_many(
        store,
        sources,
        given=BASE,
        jobs=2,
        progress=lambda name, line: lines.append(f"{name} {line}"),
    )
    assert [one.image for one in again[:2]] == [one.image for one in outcomes[:2]]
    assert {line.split()[0] for line in lines} == {"wrong"}, "what is done is a look-up"

    number = f"97{os.getpid()}"
    (tmp_path / "a/Dockerfile").write_text(f"FROM base\nRUN sleep {number}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: build_many(store, {"a": sources["a"]}, given=BASE))
        while not await anyio.to_thread.run_sync(processes_of, f"sleep\0{number}"):
            await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(processes_of, number) == [], "a cancelled build leaves no process"
    assert leftovers(built) == []


def test_layers_are_pruned_to_a_budget(built, store, context):
    build(store, context, "FROM base\nRUN touch /pruned")
    layers = ApptainerBuilder(built / "layers").layers
    kept = layers.prune(0, dry_run=True)
    assert {one.kind for one in kept} == {"layer"}
    assert not any(one.evicted for one in kept if one.of == "RUN touch /pruned"), "used a moment ago"
    decided = layers.prune(0, grace_seconds=0)
    assert all(one.evicted or "mounted" in one.kept for one in decided), "tests beside this one build too"
    (gone,) = [one for one in decided if one.of == "RUN touch /pruned"]
    assert gone.evicted
    assert not (built / "layers" / gone.name).exists()
    _, lines = build(store, context, "FROM base\nRUN touch /pruned\nRUN true")
    assert "Dockerfile:2: RUN touch /pruned" in lines, "it is made again"


def test_a_user_without_rights_builds(context, tmp_path):
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)
    tmp_path.chmod(0o755)
    text = STAGES.replace("/opt/tools", "/src")
    (context / "Dockerfile").write_text(text)
    with ordinary_user() as user:
        shared = user.home / "task"
        subprocess.run(["cp", "-r", context, shared], check=True)
        subprocess.run(["chown", "-R", f"{user.uid}:{user.uid}", shared], check=True)
        base = user.home / ".cache/rollout-service/images/base.sif"
        for pretend in (
            "",
            "import sandboxes.images.dockerfile.namespace as n; n.has_subordinate_ids = lambda u: 0\n",
        ):
            code = pretend + BUILDER
            command = ["python", "-c", code, str(user.home / f"built{len(pretend)}"), str(shared), str(base)]
            done = user.run(command, timeout=300)
            assert done.returncode == 0, done.stdout
            image = Path(done.stdout.splitlines()[-1])
            tree = unpacked(image, tmp_path / f"root{len(pretend)}")
            assert text_of(tree, "/opt/made/out") == "from the tool\nhello world\nwho=world\n"
            who = ["app", "app", "app"] if not pretend else ["root", "root", "root"]
            assert text_of(tree, "/tmp/user").split() == who
        done = user.run(["python", "-c", REMOVER, str(user.home / "removed")])
        assert done.returncode == 0, done.stdout
        assert user.remaining_processes() == []


def test_the_command_line_builds_one_and_many(built, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(built / "images"))
    monkeypatch.setenv("ROLLOUT_LAYERS_DIR", str(built / "layers"))
    monkeypatch.chdir(tmp_path)
    for name in ("tasks/one/environment", "tasks/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "Dockerfile").write_text(f"FROM base\nARG A=1\nRUN echo {name} $A >/name")

    def image(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["image", "build", *arguments])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stderr

    base = ("--base", f"base={BASE['base']}")
    (made,) = image("tasks/two/Dockerfile", *base, "--build-arg", "A=2", "--name", "mine", "--json")
    assert (made["name"], made["pulled"]) == ("mine", False)
    os.utime(made["path"], (0, 0))
    assert "mine is unchanged" in image("./tasks/two", *base, "--build-arg", "A=2", "--name", "mine")
    both = image("tasks", "--all", *base, "--json")
    assert [one["name"] for one in both] == ["one", "two"]
    (tmp_path / "tasks/two/Dockerfile").write_text("FROM base\nRUN exit 4")
    said = image("tasks/one/environment", "tasks/two", *base, code=1)
    assert "two: Dockerfile:2: RUN exit 4: failed with exit code 4" in said
    assert "is a name, not the path of a Dockerfile" in image("base", "--build-arg", "A=2", code=1)
    assert "there is no Dockerfile" in image("./tasks", code=1)
    assert "--name is for one Dockerfile" in image("tasks", "--all", "--name", "x", code=1)


def test_ids_are_those_of_this_user():
    ids = namespace.BuildNamespace().ids
    assert ids["kind"] == ("mapped" if os.geteuid() == 0 else "subordinate")


USED = """
FROM base
RUN useradd --create-home app && mkdir /app && chown app /app
WORKDIR /app
USER app
ENV TASK=sums
RUN echo mine >here
"""


async def test_a_sandbox_starts_in_the_working_folder_as_the_user(store, context, tmp_path):
    made, _ = await anyio.to_thread.run_sync(build, store, context, USED)
    config = ApptainerConfig(image=str(made.path), unpacked_dir=tmp_path / "unpacked")
    provider = make_provider(config, tmp_path / "state", store.root)
    try:
        async with await provider.start(SandboxSpec()) as sandbox:
            assert (sandbox.workdir, sandbox.spec.workdir) == ("/app", "/app")
            said = await (await sandbox.bash()).run(
                "pwd; cat here; echo $HOME $USER $TASK; echo hi >~/new && cat ~/new"
            )
            assert said.output.split() == ["/app", "mine", "/home/app", "app", "sums", "hi"]
            assert await sandbox.read_file("here") == b"mine\n"
        async with await provider.start(SandboxSpec(workdir="/elsewhere", env={"HOME": "/tmp"})) as sandbox:
            said = await (await sandbox.bash()).run("pwd; echo $HOME")
            assert said.output.split() == ["/elsewhere", "/tmp"]
    finally:
        await provider.close()
