"""Records in segment files come back as they were, or as typed errors, and files without references are deleted."""

from pathlib import Path

import anyio
import pytest
from obstore.store import MemoryStore

from rollout_service.base.errors import ConfigurationError, RecordLostError, StoreError
from rollout_service.store.segments import SegmentFiles, SegmentFolder
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.folder import sweep
from rollout_service.store.segments.ledger import FILE_HEADER, SegmentReference
from rollout_service.store.segments.objects import ObjectFiles
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.store.segments import (
    IO_ERROR,
    NAME,
    NO_SPACE,
    OWNER,
    FaultyFiles,
    MemoryLedger,
    keep,
    opened,
    read,
    segment_files,
)


@pytest.fixture
def folder(tmp_path: Path) -> SharedFiles:
    return SharedFiles(tmp_path)


@pytest.fixture(params=["folder", "bucket"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> SegmentFiles:
    if request.param == "folder":
        return SharedFiles(tmp_path)
    return ObjectFiles(MemoryStore(), "s3://bucket/prefix", write_seconds=0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_records_come_back_from_any_service_that_shares_the_files(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as one, await opened(files, ledger, "b" * 12) as two:
        references = await keep(one, ledger, b"first", b"", b"x" * 100_000)
        other = await keep(two, ledger, b"other")
        subjects = dict(zip("abc", references, strict=True))
        assert await two.read_all(subjects) == [b"first", b"", b"x" * 100_000]
        assert await read(one, other[0], "d") == b"other"
        assert await one.read_all({}) == []
        assert len(segment_files(files)) == 2


async def test_writes_at_the_same_time_share_flushes(tmp_path):
    ledger, files = MemoryLedger(), FaultyFiles(tmp_path)
    async with await opened(files, ledger) as segments:
        before = files.flushes
        async with anyio.create_task_group() as group:
            for number in range(64):
                group.start_soon(keep, segments, ledger, b"%d" % number)
        assert files.flushes - before <= 4  # the new file's header, the first record, and those that came meanwhile
        assert ledger.records == 64


async def test_a_write_completes_although_its_caller_is_cancelled(folder):
    ledger = MemoryLedger()
    async with await opened(folder, ledger) as segments:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await keep(segments, ledger, b"kept")
        assert ledger.records == 1
        assert await keep(segments, ledger, b"next")


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
@pytest.mark.parametrize("number", [NO_SPACE, IO_ERROR])
async def test_a_failed_write_is_an_error_and_the_next_one_works(tmp_path, operation, number):
    ledger, files = MemoryLedger(), FaultyFiles(tmp_path)
    async with await opened(files, ledger) as segments:
        earlier = [] if operation == "create" else await keep(segments, ledger, b"earlier")
        files.fail[operation] = number
        with pytest.raises(StoreError, match="shared folder") as caught:
            await keep(segments, ledger, b"lost")
        assert caught.value.hint
        later = await keep(segments, ledger, b"later")
        assert (
            await segments.read_all({text: text for text in earlier + later})
            == [b"earlier", b"later"][-len(earlier + later) :]
        )
        assert not earlier or SegmentReference.parse(earlier[0]).file != SegmentReference.parse(later[0]).file


async def test_all_callers_of_a_failed_write_get_the_error(tmp_path):
    ledger, files = MemoryLedger(), FaultyFiles(tmp_path)
    failed = []

    async def attempt(segments: SegmentFolder) -> None:
        try:
            await keep(segments, ledger, b"record")
        except StoreError as error:
            failed.append(error)

    async with await opened(files, ledger) as segments:
        await keep(segments, ledger, b"opens the file")
        files.fail["sync"] = IO_ERROR
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(attempt, segments)
        assert len(failed) + ledger.records == 9
        assert failed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "too early"),
        (lambda path: path.write_bytes(FILE_HEADER), "too early"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "checksum"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "checksum"),
    ],
)
async def test_a_damaged_record_is_lost_and_no_other(tmp_path, change, why, folder):
    ledger = MemoryLedger()
    async with (
        await opened(folder, ledger) as segments,
        await opened(folder, ledger, "b" * 12) as other,
    ):
        (damaged,) = await keep(segments, ledger, b"damaged")
        (intact,) = await keep(other, ledger, b"intact")
        assert callable(change)
        change(tmp_path / SegmentReference.parse(damaged).file)
        with pytest.raises(RecordLostError, match=why) as caught:
            await read(segments, damaged, "the rollout r1")
        assert "r1" in str(caught.value)
        assert caught.value.hint
        lost, found = await segments.read_all({"r1": damaged, "r2": intact})
        assert isinstance(lost, RecordLostError)
        assert found == b"intact"


async def test_a_reference_that_is_none_is_a_lost_record(folder):
    async with await opened(folder, MemoryLedger()) as segments:
        for text in ("", "../../etc/passwd:0:10:00000000", f"{NAME}-1.segment:0:x:00000000"):
            with pytest.raises(RecordLostError):
                await read(segments, text, "the rollout r1")


async def test_a_folder_that_went_away_loses_no_record(tmp_path):
    ledger, folder = MemoryLedger(), tmp_path / "shared"
    async with await opened(SharedFiles(folder), ledger) as segments:
        (reference,) = await keep(segments, ledger, b"record")
        folder.rename(tmp_path / "away")
        with pytest.raises(StoreError):
            await read(segments, reference, "r1")
        (tmp_path / "away").rename(folder)
        assert await read(segments, reference, "r1") == b"record"


async def test_a_disk_that_fails_to_read_loses_no_record(tmp_path):
    ledger, files = MemoryLedger(), FaultyFiles(tmp_path)
    async with await opened(files, ledger) as segments:
        (reference,) = await keep(segments, ledger, b"record")
        files.fail["read"] = IO_ERROR
        with pytest.raises(StoreError):
            await read(segments, reference, "r1")


async def test_a_file_is_deleted_once_it_is_full_and_nothing_refers_to_it(folder):
    ledger = MemoryLedger()
    async with await opened(folder, ledger, file_bytes=100) as segments:
        first = await keep(segments, ledger, b"x" * 100)
        second = await keep(segments, ledger, b"x" * 100)
        await keep(segments, ledger, b"the current file")
        ledger.drop(first[0])
        assert await segments.collect() == 1
        assert SegmentReference.parse(first[0]).file not in segment_files(folder)
        assert await read(segments, second[0], "r2") == b"x" * 100
        assert await segments.collect() == 0
        assert not ledger.collected


async def test_a_file_is_kept_while_somebody_is_about_to_refer_to_it(folder):
    ledger = MemoryLedger()
    async with await opened(folder, ledger, file_bytes=10) as segments:
        async with segments.keep([b"x" * 20]) as (reference,):
            await keep(segments, ledger, b"in the next file")
            await segments.collect()
            assert ledger.add(reference)
        assert await read(segments, reference, "r1") == b"x" * 20


async def test_the_files_of_a_service_that_is_gone_are_collected(folder):
    ledger = MemoryLedger()
    dead = await opened(folder, ledger)
    (reference,) = await keep(dead, ledger, b"record")
    async with await opened(folder, ledger, "b" * 12) as leader:
        ledger.dead.add(OWNER)
        await leader.collect()
        assert await read(leader, reference, "r1") == b"record"
        # The service was only stopped for long. What it writes now goes to another file.
        async with dead.keep([b"late"]) as (late,):
            assert not ledger.add(late)
            await dead.abandon(late)
        (again,) = await keep(dead, ledger, b"late")
        ledger.drop(reference)
        await leader.collect()
        assert segment_files(folder) == {SegmentReference.parse(again).file}
        assert await read(dead, again, "r1") == b"late"
    await dead.close()


async def test_closing_seals_the_file(folder):
    ledger = MemoryLedger()
    segments = await opened(folder, ledger)
    (reference,) = await keep(segments, ledger, b"record")
    await segments.close()
    await segments.close()
    assert not ledger.owners
    ledger.drop(reference)
    await segments.collect()
    assert not segment_files(folder)


async def test_the_sweep_deletes_old_files_that_the_ledger_does_not_know(files):
    ledger = MemoryLedger()
    async with await opened(files, ledger) as segments:
        (reference,) = await keep(segments, ledger, b"record")
        draft = "dddddddddddd-1.segment.draft" if isinstance(files, SharedFiles) else f"probe-{'d' * 32}"
        for name in ("cccccccccccc-1.segment", draft, "notes.txt"):
            files.store(name, b"12345")
        assert await sweep(files, ledger) == 0
        assert await sweep(files, ledger, age=0) == 2
        assert segment_files(files) == {SegmentReference.parse(reference).file, "notes.txt"}


async def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    ledger = MemoryLedger()
    async with await opened(SharedFiles(tmp_path / "one"), ledger):
        (tmp_path / "two").mkdir()
        for name in ("two", "absent"):
            with pytest.raises(ConfigurationError) as caught:
                await opened(SharedFiles(tmp_path / name), ledger)
            assert caught.value.hint
        assert not names(tmp_path / "two")


async def test_the_files_of_another_store_are_refused(files):
    async with await opened(files, MemoryLedger()):
        with pytest.raises(ConfigurationError, match="another store") as caught:
            await opened(files, MemoryLedger())
        assert caught.value.hint


async def test_folders_marked_at_the_same_time_are_told_apart(tmp_path):
    ledger = MemoryLedger()
    results: list[str] = []

    async def start(folder: str) -> None:
        try:
            await opened(SharedFiles(tmp_path / folder), ledger)
            results.append(folder)
        except ConfigurationError:
            results.append("refused")

    async with anyio.create_task_group() as group:
        for folder in ("one", "two", "one", "two"):
            group.start_soon(start, folder)
    assert sorted(results) in (["one", "one", "refused", "refused"], ["refused", "refused", "two", "two"])


async def test_services_that_start_at_the_same_time_agree_on_the_mark(files):
    ledger = MemoryLedger()
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(opened, files, ledger, f"{number:012x}")
    assert files.sizes().keys() == {MARK_FILE}


async def test_a_service_that_died_while_it_marked_the_folder_stops_no_other(tmp_path, folder):
    ledger = MemoryLedger()
    (tmp_path / MARK_FILE).write_text(f'{{"store": "{(await ledger.mark(None))[0]}", "mark": "m"}}')
    async with await opened(folder, ledger):
        assert (await ledger.mark(None))[1] == "m"


@pytest.mark.parametrize("operation", ["create", "write", "sync", "read"])
async def test_a_folder_that_fails_is_refused_at_the_start(tmp_path, operation):
    files = FaultyFiles(tmp_path)
    files.fail[operation] = NO_SPACE
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        await opened(files, MemoryLedger())
    assert "Free space" in caught.value.hint
    assert not names(tmp_path)


async def test_a_path_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigurationError):
        await opened(SharedFiles(path), MemoryLedger())


async def test_a_damaged_mark_is_refused(tmp_path, folder):
    (tmp_path / MARK_FILE).write_text("{")
    with pytest.raises(ConfigurationError, match="damaged"):
        await opened(folder, MemoryLedger())


async def test_only_the_owner_can_read_the_files(tmp_path, folder):
    ledger = MemoryLedger()
    async with await opened(folder, ledger) as segments:
        await keep(segments, ledger, b"record")
        assert {(tmp_path / name).stat().st_mode & 0o077 for name in names(tmp_path)} == {0}
