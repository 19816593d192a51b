"""Whatever the order of writes, drops, failures, crashes and collections, exactly what is referenced is kept."""

import tempfile
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.base.errors import StoreError
from rollout_service.store.segments import SegmentFolder
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.ledger import SegmentReference
from rollout_service.store.segments.proof import MARK_FILE
from tests.support.store.segments import IO_ERROR, NO_SPACE, FaultyFiles, MemoryLedger

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
            self.folder,
            self.ledger,
            owner=str(self.number),
            name=f"{self.number:012x}",
            files=self.files,
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
        totals = await self.segments.totals()
        assert (totals.records, totals.bytes) == (len(found), sum(map(len, self.expected.values())))


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
        assert set(SharedFiles(folder).names()) == kept | {MARK_FILE}

    with tempfile.TemporaryDirectory() as folder:
        anyio.run(play, Path(folder))
