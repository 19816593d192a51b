"""Programs that use the package `e2b`, unchanged, work with sandboxes of this service, in Apptainer."""

import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import e2b
import httpx
import pytest
from e2b import AsyncSandbox, FilesystemEvent, Sandbox, SandboxQuery, SandboxState

from tests.support.e2b_service import e2b_service, options, point_programs_at
from tests.support.processes.service import eventually

pytestmark = [pytest.mark.apptainer, pytest.mark.slow, pytest.mark.xdist_group("e2b programs")]
CEILING = 4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with e2b_service(tmp_path_factory.mktemp("e2b"), f"max_sandboxes = {CEILING}\n") as (_, found):
        yield found


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    point_programs_at(url, monkeypatch)


@pytest.fixture(scope="module")
def shared(url: str) -> Iterator[Sandbox]:
    with Sandbox.create("base", envs={"GIVEN": "x y"}, **options(url)) as sandbox:
        yield sandbox


def test_a_sandbox_lives_from_its_creation_to_its_kill():
    before = datetime.now(UTC)
    sandbox = Sandbox.create("base", timeout=100, metadata={"a b/ü": "c&d=e"})
    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id) == (sandbox.sandbox_id, "base")
    assert info.metadata == {"a b/ü": "c&d=e"}
    assert abs((info.end_at - before).total_seconds() - 100) < 15
    assert sandbox.is_running()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=200)
    assert again.commands.run("echo there").stdout == "there\n"
    assert (sandbox.get_info().end_at - info.end_at).total_seconds() > 90
    sandbox.set_timeout(50)
    assert (info.end_at - sandbox.get_info().end_at).total_seconds() > 40
    Sandbox.connect(sandbox.sandbox_id, timeout=1)  # shortens nothing
    assert sandbox.is_running()
    assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()
    for call in (sandbox.get_info, lambda: sandbox.set_timeout(9), lambda: Sandbox.connect("no-such")):
        with pytest.raises(e2b.NotFoundException):
            call()
    for call in (lambda: sandbox.commands.run("true"), lambda: sandbox.files.read("x")):
        with pytest.raises(e2b.TimeoutException, match="was not found"):
            call()


def test_a_forgotten_sandbox_ends_with_its_time():
    sandbox = Sandbox.create(timeout=2)
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 60")
    assert not sandbox.is_running()


def test_a_kill_ends_what_is_under_way_at_once():
    sandbox = Sandbox.create("base")
    handles = [sandbox.commands.run("cat", background=True, stdin=True) for _ in range(3)]
    began = time.monotonic()
    assert sandbox.kill()
    assert time.monotonic() - began < 4
    for handle in handles:
        with pytest.raises(e2b.SandboxNotRunningException):
            handle.wait()


def test_lists_have_filters_and_pages(shared):
    made = [Sandbox.create("base", metadata={"number": str(number), "of": "pages"}) for number in range(3)]
    try:
        pages = Sandbox.list(SandboxQuery(metadata={"of": "pages"}), limit=2)
        first = pages.next_items()
        assert pages.has_next
        found = [info.metadata["number"] for info in first + pages.next_items()]
        assert (found, pages.has_next) == (["2", "1", "0"], False)
        oldest = Sandbox.list(SandboxQuery(metadata={"of": "pages"}), limit=1, order="asc")
        assert [oldest.next_items()[0].metadata["number"] for _ in range(3)] == ["0", "1", "2"]
        one = Sandbox.list(SandboxQuery(metadata={"of": "pages", "number": "1"})).next_items()
        assert [info.sandbox_id for info in one] == [made[1].sandbox_id]
        assert len(Sandbox.list().next_items()) == 4
        assert Sandbox.list(SandboxQuery(state=[e2b.SandboxState.PAUSED])).next_items() == []
        assert Sandbox.list(SandboxQuery(template="other")).next_items() == []
        with pytest.raises(e2b.RateLimitException, match="no place"):
            Sandbox.create("base", retries=0)
    finally:
        for sandbox in made:
            sandbox.kill()
    Sandbox.create("base").kill()  # its place is free at once


def test_what_is_not_allowed_is_refused(shared):
    with pytest.raises(e2b.AuthenticationException):
        Sandbox.create("base", api_key="e2b_" + "f" * 40)
    refused = [
        (lambda: Sandbox.create("docker://ubuntu"), "is not allowed here"),
        (lambda: Sandbox.create("/etc"), "neither the name of an image"),
        (lambda: Sandbox.create("base", allow_internet_access=True), "no internet access"),
        (lambda: Sandbox.create("base", timeout=10**6), "at most 86400 s"),
        (lambda: Sandbox.create("base", envs={"a": "b" * 5_000}), "at most 4096"),
        (lambda: Sandbox.create("base", lifecycle={"on_timeout": "pause"}), "autoPause"),
        (lambda: Sandbox.create("base", network={"allow_out": ["1.1.1.1"]}), "network"),
        (lambda: shared.pause(mode="filesystem"), "keeps its processes"),
        (shared.create_snapshot, "'snapshots' of sandboxes is not"),
        (shared.get_metrics, "'metrics' of sandboxes is not"),
        (lambda: shared.files.watch_dir("/usr", recursive=True), "too many files"),
        (lambda: shared.files.watch_dir("/etc/passwd"), "not a folder"),
        (lambda: shared.pty.create(e2b.PtySize(rows=0, cols=80)), "1 to 1000 rows"),
        (lambda: shared.pty.create(e2b.PtySize(rows=24, cols=10**6)), "1 to 1000 rows"),
        (lambda: shared.commands.run("true", user="somebody"), "one user"),
        (lambda: shared.files.write("x", "y", metadata={"a": "b"}), "no metadata"),
    ]
    for call, why in refused:
        with pytest.raises(e2b.SandboxException, match=why):
            call()
    assert [info.sandbox_id for info in Sandbox.list().next_items()] == [shared.sandbox_id]


def test_changes_in_a_watched_folder_are_told(shared):
    files = shared.files
    for name in ("seen/kept", "seen/gone", "seen/deep/er"):
        files.write(name, "before")
    flat, deep = files.watch_dir("seen"), files.watch_dir("seen", recursive=True, include_entry=True)
    assert flat.get_new_events() == []
    files.write("seen/kept", "afterward")
    files.write("seen/new", "1")
    files.write("seen/deep/er", "afterward")
    files.remove("seen/gone")
    shared.commands.run("chmod 700 seen/deep")
    told = [(one.name, one.type.value) for one in flat.get_new_events()]
    assert told == [("deep", "chmod"), ("gone", "remove"), ("kept", "write"), ("new", "create")]
    events = deep.get_new_events()
    assert [one.name for one in events] == ["deep", "deep/er", "gone", "kept", "new"]
    assert [one.entry and one.entry.path for one in events][1:3] == ["/workspace/seen/deep/er", None]
    assert [flat.get_new_events(), deep.get_new_events()] == [[], []]
    watchers = [files.watch_dir("seen") for _ in range(14)]
    with pytest.raises(e2b.SandboxException, match="16 folders"):
        files.watch_dir("seen")
    for watcher in (flat, deep, *watchers):
        watcher.stop()
    files.remove("seen")
    with pytest.raises(e2b.NotFoundException):
        files.watch_dir("seen")


async def test_changes_are_told_as_they_happen(url):
    async with await AsyncSandbox.create("base") as sandbox:
        told, seen = list[str](), anyio.Event()

        def note(event: FilesystemEvent) -> None:
            told.append(event.name)
            seen.set()

        handle = await sandbox.files.watch_dir(".", on_event=note)
        await sandbox.files.write("new", "")
        with anyio.fail_after(20):
            await seen.wait()
        await handle.stop()
        assert told == ["new"]
        opened = 0
        with anyio.fail_after(30):  # one that nobody listens to leaves its place, of which there are 16
            while opened < 20:
                with suppress(e2b.SandboxException):
                    await (await sandbox.files.watch_dir(".", on_event=note)).stop()
                    opened += 1


def test_a_paused_sandbox_stands_still_and_goes_on_where_it_was(url):
    with Sandbox.create("base", timeout=30) as sandbox:
        waiting = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
        with pytest.raises(e2b.ServiceBusyException, match="at work"):
            sandbox.pause()
        waiting.kill()
        count = "nohup bash -c 'for ((n = 0; ; n++)); do echo $n >at; sleep 0.05; done' >/dev/null 2>&1 &"
        sandbox.commands.run(count)
        assert sandbox.pause()
        assert not sandbox.pause(), "it is paused already"
        assert not sandbox.is_running()
        states = {one.sandbox_id: one.state for one in Sandbox.list().next_items()}
        assert states[sandbox.sandbox_id] == SandboxState.PAUSED
        running = Sandbox.list(SandboxQuery(state=[SandboxState.RUNNING])).next_items()
        assert sandbox.sandbox_id not in {one.sandbox_id for one in running}
        assert (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds() > 1_000
        with pytest.raises(e2b.TimeoutException, match="paused"):
            sandbox.commands.run("true")
        stranger = {"e2b-sandbox-id": sandbox.sandbox_id, "x-access-token": "guessed"}
        assert httpx.get(f"{url}/health", headers=stranger).status_code == 401
        time.sleep(1)  # in which it would count to 20
        again = Sandbox.connect(sandbox.sandbox_id, timeout=60)
        first = int(again.files.read("at"))
        assert (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds() < 70
        again.commands.run("sleep 0.5")
        assert first < int(again.files.read("at")) < first + 15
        assert sandbox.pause()
        assert sandbox.kill()


def test_forks_have_the_files_and_their_own_ways_from_there(shared):
    places = CEILING - len([shared, "the forked one"])
    with Sandbox.create("base", metadata={"a": "b"}, envs={"GIVEN": "x"}) as sandbox:
        sandbox.files.write("same", "before")
        sandbox.commands.run("mkdir deep && ln -s same link && chmod 700 deep && rm -r /usr/share/doc")
        program = sandbox.commands.run("sleep 100", background=True)
        with pytest.raises(e2b.SandboxException, match="409"):
            sandbox.fork()
        program.kill()
        programs = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
        eventually(lambda: "sleep 100" not in sandbox.commands.run(programs).stdout)
        forks = sandbox.fork(timeout=60, count=4)
        made = [one for one in forks if isinstance(one, Sandbox)]
        assert len(made) == places
        refused = [type(one) for one in forks if one not in made]
        assert refused == [e2b.RateLimitException] * (4 - places)
        for number, one in enumerate(made):
            one.files.write("same", str(number))
            shown = "cat link; stat -c %a deep; echo $GIVEN; ls /usr/share/doc 2>/dev/null | wc -l"
            assert one.commands.run(shown).stdout == f"{number}700\nx\n0\n"
            assert one.get_info().metadata == {"a": "b"}
        assert sandbox.files.read("same") == "before"
        for one in made:
            assert one.kill()


def test_commands_stream_and_end_as_in_a_shell(shared):
    seen: list[tuple[str, str, float]] = []
    done = shared.commands.run(
        'echo "$GIVEN" "$MORE"; pwd; sleep 0.5; echo problem >&2; sleep 0.5; echo last',
        envs={"MORE": "z"},
        cwd="/tmp",
        on_stdout=lambda text: seen.append(("out", text, time.monotonic())),
        on_stderr=lambda text: seen.append(("err", text, time.monotonic())),
    )
    assert (done.stdout, done.stderr, done.exit_code) == ("x y z\n/tmp\nlast\n", "problem\n", 0)
    assert [(name, text) for name, text, _ in seen][-2:] == [("err", "problem\n"), ("out", "last\n")]
    assert seen[-1][2] - seen[0][2] > 0.7
    with pytest.raises(e2b.CommandExitException) as failed:
        shared.commands.run("echo out; echo err >&2; exit 3")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.stderr) == (3, "out\n", "err\n")
    assert shared.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout == "x" * 3_000_000
    for user in ("root", "user", None):
        assert shared.commands.run("id -u", user=user).stdout == shared.commands.run("id -u").stdout


def test_a_command_that_is_late_is_ended_and_what_it_left_behind_goes_on(shared):
    with pytest.raises(e2b.TimeoutException):
        shared.commands.run("sleep 2; touch /tmp/late", timeout=1)
    shared.commands.run("(sleep 1; touch /tmp/behind) & (sleep 1; touch /tmp/silent) >/dev/null 2>&1 &")
    eventually(lambda: shared.files.exists("/tmp/behind") and shared.files.exists("/tmp/silent"))
    time.sleep(1)
    assert not shared.files.exists("/tmp/late")


def test_commands_in_the_background_are_driven_by_their_handles(shared):
    cat = shared.commands.run("cat; echo end >&2", background=True, stdin=True)
    [listed] = shared.commands.list()
    assert (listed.pid, listed.cmd, listed.args[-1]) == (cat.pid, "/bin/bash", "cat; echo end >&2")
    cat.send_stdin("one\n")
    shared.commands.send_stdin(cat.pid, "two\n")
    cat.disconnect()
    seen: list[str] = []
    other = shared.commands.connect(cat.pid)
    shared.commands.send_stdin(cat.pid, "three\n")
    other.close_stdin()
    assert other.wait(on_stdout=seen.append).stderr == "end\n"
    assert "".join(seen).endswith("three\n")
    sleeping = shared.commands.run("sleep 1000 & sleep 1000", background=True)
    assert sleeping.kill()
    with pytest.raises(e2b.CommandExitException) as killed:
        sleeping.wait()
    assert killed.value.exit_code == -1
    assert not shared.commands.kill(sleeping.pid)
    eventually(lambda: shared.commands.list() == [])
    assert "sleep" not in shared.commands.run("cat /proc/*/comm 2>/dev/null").stdout
    with pytest.raises(e2b.NotFoundException):
        shared.commands.connect(99_999)


@pytest.mark.parametrize(
    "data",
    ["text ü\n", b"\r\n--\x00" * 300_000, "", io.BytesIO(b"z" * 2_000_000)],
    ids=["text", "bytes", "empty", "stream"],
)
def test_files_are_written_and_read(shared, data):
    path = "folder/a 'name' \"with\" ü.bin"
    written = shared.files.write(path, data)
    assert (written.path, written.name) == (f"/workspace/{path}", path.partition("/")[2])
    wanted = data.getvalue() if isinstance(data, io.BytesIO) else data.encode() if isinstance(data, str) else data
    assert shared.files.read(path, format="bytes") == wanted
    assert b"".join(shared.files.read(f"/workspace/{path}", format="stream")) == wanted
    if isinstance(data, str):
        assert shared.files.read(path) == data


def test_a_terminal_is_typed_at_and_resized(shared):
    handle = shared.pty.create(e2b.PtySize(rows=30, cols=90), cwd="/tmp", envs={"PS1": "> "})
    shown = bytearray()
    with ThreadPoolExecutor(1) as threads:
        ends = threads.submit(handle.wait, on_pty=shown.extend)
        try:
            shared.pty.send_stdin(handle.pid, b"stty size; pwd; tty; echo $TERM $((40 + 2))\n")
            eventually(lambda: b"30 90\r\n/tmp\r\n/dev/pts/" in shown and b"xterm-256color 42\r\n" in shown)
            shared.pty.stream_input(handle.pid, [b"echo pie", b"ces; echo $((", b"3 * 5))\n"])
            eventually(lambda: b"\rpieces\r\n15\r\n" in shown)
            shared.pty.resize(handle.pid, e2b.PtySize(rows=40, cols=100))
            shared.pty.send_stdin(handle.pid, b"stty size\n")
            eventually(lambda: b"40 100\r\n" in shown)
            with pytest.raises(e2b.SandboxException, match="no input for its `pty`"):
                shared.commands.send_stdin(handle.pid, "text")
            assert [one.pid for one in shared.commands.list()] == [handle.pid]
            shared.pty.send_stdin(handle.pid, b"exit 3\n")
            with pytest.raises(e2b.CommandExitException) as ended:
                ends.result(20)
            assert ended.value.exit_code == 3
        finally:
            shared.pty.kill(handle.pid)
    assert shared.commands.list() == []


def test_a_terminal_is_killed_with_what_runs_in_it(shared):
    handle = shared.pty.create(e2b.PtySize(rows=24, cols=80))
    shared.pty.send_stdin(handle.pid, b"exec sleep 12345\n")
    eventually(lambda: shared.commands.run("pgrep -f 'sleep 12345' || true").stdout.count("\n") >= 2)
    assert shared.pty.kill(handle.pid)
    eventually(lambda: "sleep 12345" not in shared.commands.run("ps -e -o args").stdout.replace("ps -e", ""))
    assert not shared.pty.kill(handle.pid)
    plain = shared.commands.run("sleep 60", background=True)
    with pytest.raises(e2b.SandboxException, match="no terminal"):
        shared.pty.resize(plain.pid, e2b.PtySize(rows=24, cols=80))
    assert plain.kill()


def test_files_are_arranged(shared):
    files, written = (shared.files, [{"path": f"/tmp/many/{number}", "data": str(number)} for number in range(20)])
    assert len(files.write_files(written)) == 20
    assert files.read("/tmp/many/7") == "7"
    assert {entry.name for entry in files.list("/tmp/many")} == {str(number) for number in range(20)}
    assert files.make_dir("tree/below")
    assert not files.make_dir("tree/below")
    files.write("tree/below/file", "four")
    shared.commands.run("ln -s below/file tree/link; chmod 640 tree/below/file; mkdir $'tree/new\\nline'")
    paths = [entry.path.removeprefix("/workspace/tree/") for entry in files.list("tree", depth=2)]
    assert paths == ["below", "below/file", "link", "new\nline"]
    assert [entry.name for entry in files.list("tree")] == ["below", "link", "new\nline"]
    info = files.get_info("tree/below/file")
    assert (info.size, info.mode, info.permissions, info.type) == (4, 0o640, "-rw-r-----", e2b.FileType.FILE)
    assert (datetime.now(UTC) - info.modified_time).total_seconds() < 60
    link = files.get_info("tree/link")
    assert (link.type, link.symlink_target) == (e2b.FileType.SYMLINK, "below/file")
    assert files.rename("tree/below/file", "else/where").path == "/workspace/else/where"
    assert files.read("else/where") == "four"
    files.remove("tree")
    assert not files.exists("tree/link")
    for call in (files.read, files.list, files.get_info, lambda path: files.rename(path, "x")):
        with pytest.raises(e2b.FileNotFoundException):
            call("missing")
    for call in (lambda: files.read("/tmp"), lambda: files.list("else/where"), lambda: files.write("/tmp", "x")):
        with pytest.raises(e2b.InvalidArgumentException):
            call()
