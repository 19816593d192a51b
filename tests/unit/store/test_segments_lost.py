"""No record is acknowledged in a folder that is lost, and whatever the order of events, what is referenced is kept."""

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rollout_service.base.errors import RecordLostError, StoreError
from rollout_service.store.segments import SegmentFolder
from rollout_service.store.segments import folder as watching
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import SegmentReference
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.store.segments import IO_ERROR, NO_SPACE, FaultyFiles, MemoryLedger, keep, opened, read


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def unmount(folder: Path) -> None:
    move_away(folder)
    folder.mkdir()


def exchange(folder: Path) -> None:
    """Put the folder of another store in its place."""
    unmount(folder)
    (folder / MARK_FILE).write_text(json.dumps({"store": "another", "mark": "m"}))


def damage_the_mark(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("away"))
    (folder / MARK_FILE).write_text("{")


def bring_back(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name("away").rename(folder)


LOSSES = [move_away, unmount, exchange, damage_the_mark]


@pytest.mark.parametrize("lose", LOSSES)
async def test_nothing_is_acknowledged_in_a_lost_folder_and_all_goes_on_once_it_is_back(tmp_path, lose):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        (before,) = await keep(segments, ledger, b"before")
        lose(folder)
        files = set(ledger.live)
        for _ in range(3):
            with pytest.raises(StoreError, match="shared folder") as caught:
                await keep(segments, ledger, b"held")
            assert "no restart is needed" in caught.value.hint
            with pytest.raises(StoreError, match="shared folder"):
                await read(segments, "cccccccccccc-1.segment:0:1:00000000", "r1")
        assert set(ledger.live) == files, "no file is registered for nothing"
        assert segments.watch.problem is not None
        bring_back(folder)
        (after,) = await keep(segments, ledger, b"held")
        await segments.watch.check()
        assert segments.watch.problem is None
        assert await segments.read_all({"r1": before, "r2": after}) == [b"before", b"held"]


async def test_a_deleted_folder_takes_no_record_that_comes_later(tmp_path):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        await keep(segments, ledger, b"before")
        shutil.rmtree(folder)
        with pytest.raises(StoreError, match="has no mark"):
            await keep(segments, ledger, b"held")
        assert ledger.records == 1


async def test_records_of_a_deleted_file_go_to_another_and_the_log_says_what_is_gone(tmp_path):
    ledger = MemoryLedger()
    async with await opened(SharedFiles(tmp_path), ledger) as segments:
        (before,) = await keep(segments, ledger, b"before")
        gone = tmp_path / SegmentReference.parse(before).file
        gone.unlink()
        with capture_logs() as logs:
            (after,) = await keep(segments, ledger, b"after")
        assert await read(segments, after, "r2") == b"after"
        with pytest.raises(RecordLostError, match="r1"):
            await read(segments, before, "r1")
        [line] = [line for line in logs if line["log_level"] == "error"]
        assert line["file"] == gone.name
        assert str(tmp_path) in line["place"]
        assert segments.watch.problem is None


async def test_the_log_says_nothing_of_a_file_that_the_store_deleted_itself(tmp_path):
    ledger = MemoryLedger()
    async with await opened(SharedFiles(tmp_path), ledger) as segments:
        (reference,) = await keep(segments, ledger, b"before")
        await ledger.seal([SegmentReference.parse(reference).file])  # it was taken for dead
        ledger.drop(reference)
        await segments.collect()
        with capture_logs() as logs:
            (after,) = await keep(segments, ledger, b"after")
        assert await read(segments, after, "r2") == b"after"
        assert not logs


async def test_files_in_the_folder_of_another_store_are_not_deleted(tmp_path):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        (reference,) = await keep(segments, ledger, b"garbage")
        await ledger.seal([SegmentReference.parse(reference).file])
        ledger.drop(reference)
        exchange(folder)
        theirs = folder / SegmentReference.parse(reference).file
        theirs.write_bytes(b"theirs")
        with pytest.raises(StoreError, match="another store"):
            await segments.collect()
        assert theirs.exists()
        assert len(ledger.collected) == 1


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_loss_is_noticed_while_nothing_is_written(tmp_path, lose):
    ledger, folder, told = MemoryLedger(), tmp_path / "shared", []
    async with await opened(SharedFiles(folder), ledger) as segments:
        segments.watch.tell = told.append
        await segments.watch.check()
        lose(folder)
        await segments.watch.check()
        bring_back(folder)
        await segments.watch.check()
        assert [error is None for error in told] == [True, False, True]


@pytest.mark.parametrize("number", [NO_SPACE, IO_ERROR])
async def test_a_folder_that_cannot_be_written_is_noticed_while_nothing_is_written(tmp_path, number):
    ledger, files = MemoryLedger(), FaultyFiles(tmp_path)
    async with await opened(files, ledger) as segments:
        files.fail["write"] = number
        await segments.watch.check()
        assert segments.watch.problem is not None
        await segments.watch.check()
        assert segments.watch.problem is None
        assert files.sizes().keys() == {MARK_FILE}


async def test_a_folder_that_does_not_answer_is_noticed(tmp_path, monkeypatch):
    ledger, noticed = MemoryLedger(), anyio.Event()
    monkeypatch.setattr(watching, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(watching, "HANGS_SECONDS", 0.05)
    async with await opened(SharedFiles(tmp_path), ledger) as segments, anyio.create_task_group() as tasks:

        async def hang() -> None:
            await noticed.wait()

        monkeypatch.setattr(segments.watch, "check", hang)
        segments.watch.tell = lambda error: noticed.set() if error is not None else None
        tasks.start_soon(segments.watch.run)
        with anyio.fail_after(30):
            await noticed.wait()
        assert "has not answered" in str(segments.watch.problem)
        tasks.cancel_scope.cancel()


async def test_a_new_folder_of_the_same_store_is_used_without_a_restart(tmp_path):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        await keep(segments, ledger, b"lost")
        shutil.rmtree(folder)
        await segments.watch.check()
        assert segments.watch.problem is not None
        ledger.forget_mark()
        async with await opened(SharedFiles(folder), ledger, "b" * 12):
            await segments.watch.check()
            assert segments.watch.problem is None
            (reference,) = await keep(segments, ledger, b"in the new folder")
            assert await read(segments, reference, "r1") == b"in the new folder"


async def test_a_folder_that_the_others_have_left_takes_no_record(tmp_path):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        await keep(segments, ledger, b"before")
        ledger.forget_mark()
        async with await opened(SharedFiles(tmp_path / "new"), ledger, "b" * 12):
            await segments.watch.check()
            with pytest.raises(StoreError, match="other services of this store use"):
                await keep(segments, ledger, b"held")


async def test_a_store_that_lost_everything_is_not_the_folders_any_more(tmp_path):
    ledger = MemoryLedger()
    async with await opened(SharedFiles(tmp_path), ledger) as segments:
        ledger.lose_everything()
        await segments.watch.check()
        assert "another store than the one in Redis" in str(segments.watch.problem)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.binary(max_size=200), min_size=1, max_size=4)),
        st.tuples(st.just("drop"), st.integers(0, 50)),
        st.tuples(st.just("fail"), st.sampled_from(["create", "write", "sync"])),
        st.tuples(st.just("crash"), st.binary(max_size=40)),
        st.tuples(st.just("collect"), st.none()),
        st.tuples(st.just("rotate"), st.none()),
    ),
    max_size=25,
)


class Machine:
    """Services that follow each other in one folder, and the records that must be there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger, self.files = folder, MemoryLedger(), FaultyFiles(folder)
        self.number, self.expected = 0, dict[str, bytes]()

    async def start(self) -> None:
        self.number += 1
        self.files.fail.clear()
        self.segments = await SegmentFolder.open(
            self.files,
            self.ledger,
            owner=str(self.number),
            name=f"{self.number:012x}",
            file_bytes=300,
        )

    async def write(self, records: list[bytes]) -> None:
        async def one(record: bytes) -> None:
            try:
                async with self.segments.keep([record]) as (reference,):
                    assert self.ledger.add(reference)
                    self.expected[reference] = record
            except StoreError:
                pass

        async with anyio.create_task_group() as group:
            for record in records:
                group.start_soon(one, record)

    async def drop(self, number: int) -> None:
        if self.expected:
            reference = list(self.expected)[number % len(self.expected)]
            del self.expected[reference]
            self.ledger.drop(reference)

    async def fail(self, operation: str) -> None:
        self.files.fail[operation] = NO_SPACE if operation != "sync" else IO_ERROR

    async def crash(self, tail: bytes) -> None:
        """Begin anew without closing, with a torn tail in every file that was open."""
        for name in self.ledger.owners:
            path = self.folder / name
            if path.exists():
                path.write_bytes(path.read_bytes() + tail)
        await self.start()

    async def collect(self, _: None) -> None:
        self.ledger.dead = set(map(str, range(self.number)))
        with suppress(StoreError):
            await self.segments.collect()

    async def rotate(self, _: None) -> None:
        await self.segments.close()

    async def check(self) -> None:
        found = await self.segments.read_all({reference: reference for reference in self.expected})
        assert found == list(self.expected.values())
        assert self.ledger.records == len(found)


@pytest.mark.slow
@settings(max_examples=30)
@given(STEPS)
def test_what_is_referenced_can_be_read_and_the_rest_is_deleted(steps):
    async def play(folder: Path) -> None:
        machine = Machine(folder)
        await machine.start()
        for name, value in steps:
            await getattr(machine, name)(value)
            machine.files.fail.pop("read", None)
            await machine.check()
        machine.files.fail.clear()
        await machine.rotate(None)
        await machine.collect(None)
        await machine.check()
        kept = {SegmentReference.parse(reference).file for reference in machine.expected}
        assert SharedFiles(folder).sizes().keys() == kept | {MARK_FILE}

    with tempfile.TemporaryDirectory() as folder:
        anyio.run(play, Path(folder))
