"""Saved sandboxes: which file a rollout goes on from, which are removed, and what happens if saving fails."""

import os
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio
import pytest

from api_schemas.trajectories import ForkReason, Message
from rollout_service.base.errors import RecordLostError, StoreError
from rollout_service.engines.serving.saved_turns import GivenMessages, SavedTurn
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline import saved_sandboxes
from rollout_service.pipeline.saved_sandboxes import SavedSandboxes, SavedWork, digest_of
from rollout_service.store import Store
from sandboxes import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.errors import FileTooLargeError, SandboxError, SandboxUnsavedError
from tests.support import samples

DATA = bytes(range(256)) * 1_000


class Saves:
    """The parts of a sandbox, and of its provider, that saving uses."""

    id, spec = "s", SandboxSpec(image="base")

    def __init__(self, error: Exception | None = None, *, hangs: bool = False) -> None:
        self.error, self.hangs = error, hangs

    async def save(self, *, limit: int) -> AsyncGenerator[bytes, None]:
        assert limit == 1 << 20
        yield DATA[:1_000]
        if self.hangs:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        yield DATA[1_000:]

    async def saves(self, spec: SandboxSpec) -> bool:
        return spec.image == "base"

    async def identity(self, spec: SandboxSpec) -> str:
        return f"identity of {spec.image}"


class Rollouts:
    """A store that knows the rollouts under way."""

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.names, self.error = names, error

    async def get(self, rollout_id: str) -> object:
        if self.error is not None:
            raise self.error
        return samples.rollout(rollout_id, state="rollout") if rollout_id in self.names else None


def turn(number: int, *given: GivenMessages) -> SavedTurn:
    messages = list(given) or [GivenMessages([tool(f"result {number - 1}")], None)]
    return SavedTurn(messages, [1], samples.generation([number, number]), 1.0)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


TURN = [turn(number) for number in range(4)]
WORK = SavedWork(
    rollout_id="r",
    turns=2,
    digest=digest_of([one.generation.output_ids for one in TURN[:2]]),
    results=[tool("result 1")],
    is_prepared=False,
    tool_state={"editor": [["/a", None]]},
    tool_error_turns=[0],
    proposed_turns=[1, 2],
)


def make(folder: Path, budget: int = 1 << 20, *, shared: bool = False) -> SavedSandboxes:
    async def flush() -> None:
        pass

    return SavedSandboxes(folder, Metrics(), flush, seconds=1.0, limit=1 << 20, budget=budget, shared=shared)


async def save(saved: SavedSandboxes, work: SavedWork = WORK, sandbox: Saves | None = None) -> None:
    one = sandbox or Saves()
    await saved.save(cast(Sandbox, one), cast(SandboxProvider, one), work)


def outcomes(saved: SavedSandboxes) -> dict[str, float]:
    [family] = [each for each in saved._metrics.registry.collect() if each.name == "rollout_sandbox_saves"]
    return {one.labels["outcome"]: one.value for one in family.samples if one.value and "total" in one.name}


@pytest.fixture
async def saved(tmp_path: Path) -> SavedSandboxes:
    found = make(tmp_path / "saved")
    await found.sweep(cast(Store, Rollouts()))
    return found


async def test_what_was_saved_is_found_and_starts_a_sandbox(saved: SavedSandboxes) -> None:
    await save(saved)
    found = await saved.find("r", TURN, "identity of base")
    assert found is not None
    assert found.work == WORK.model_copy(update={"image": "identity of base"})
    assert [[one.content for one in each] for each in found.results] == [["result 0"], ["result 1"]]
    async with saved.opened(found) as path:
        assert path.read_bytes() == DATA
    assert not path.exists()
    assert await saved.find("r", TURN[:2], "identity of base") == found


@pytest.mark.parametrize(
    ("turns", "image", "name"),
    [
        (TURN[:1], "identity of base", "r"),
        ([TURN[0], TURN[2], TURN[3]], "identity of base", "r"),
        ([TURN[0], replace(TURN[1], given=None)], "identity of base", "r"),
        ([TURN[0], turn(1, GivenMessages([tool("sum")], ForkReason.COMPACTION))], "identity of base", "r"),
        (TURN, "identity of a new base", "r"),
        (TURN, "identity of base", "other"),
    ],
    ids=["fewer", "others", "unknown", "compacted", "rebuilt", "another"],
)
async def test_a_file_that_does_not_suit_is_not_found(saved: SavedSandboxes, turns, image, name) -> None:
    await save(saved)
    assert await saved.find(name, turns, image) is None


async def test_a_damaged_file_starts_nothing(saved: SavedSandboxes) -> None:
    await save(saved)
    found = await saved.find("r", TURN, "identity of base")
    assert found is not None
    whole = found.path.read_bytes()
    for damaged in (whole[:-10] + bytes(10), whole[:-10], whole[: len(whole) // 2]):
        found.path.write_bytes(damaged)
        with pytest.raises(OSError, match="damaged"):
            async with saved.opened(found):
                pass
    found.path.write_bytes(whole[:2])
    assert await saved.find("r", TURN, "identity of base") is None
    assert len(list(found.path.parent.iterdir())) == 1


async def test_files_of_rollouts_that_ended_are_removed(tmp_path: Path, saved: SavedSandboxes) -> None:
    for name in ("r", "ended", "under-way"):
        await save(saved, WORK.model_copy(update={"rollout_id": name}))
    await saved.forget("r")
    await saved.forget("unknown")
    folder = tmp_path / "saved"
    (folder / "broken.sandbox").write_bytes(b"broken")
    (folder / "left.part").write_bytes(b"")
    again = make(tmp_path / "saved")
    await again.sweep(cast(Store, Rollouts("under-way")))
    assert len(list(folder.iterdir())) == 1
    work = await again.find("under-way", TURN, "identity of base")
    assert work is not None


@pytest.mark.parametrize("error", [StoreError("its shard is away"), RecordLostError("its record is damaged")])
async def test_a_service_starts_although_the_store_does_not_say_what_became_of_a_rollout(
    tmp_path: Path, saved: SavedSandboxes, error: Exception
) -> None:
    await save(saved)
    again = make(tmp_path / "saved")
    await again.sweep(cast(Store, Rollouts(error=error)))
    assert await again.find("r", TURN, "identity of base") is not None


async def test_a_service_starts_although_another_node_takes_a_file_meanwhile(tmp_path, saved) -> None:
    await save(saved)

    class Taken(Rollouts):
        async def get(self, rollout_id: str) -> object:
            [path] = (tmp_path / "saved").iterdir()
            path.unlink()
            return await super().get(rollout_id)

    again = make(tmp_path / "saved")
    await again.sweep(cast(Store, Taken("r")))
    assert await again.find("r", TURN, "identity of base") is None


@pytest.fixture
async def nodes(tmp_path: Path) -> list[SavedSandboxes]:
    """Three nodes that share a folder."""
    found = [make(tmp_path / name, shared=True) for name in ("a", "b", "c")]
    for each in found:
        await each.sweep(cast(Store, Rollouts()))
    return found


def names(folder: Path) -> list[str]:
    """Return the nodes that have a file."""
    return [path.parent.name for path in sorted(folder.glob("*/*"))]


def paths(folder: Path) -> dict[str, Path]:
    """Return the files of all nodes by their rollouts."""
    return {saved_sandboxes._read_head(path).rollout_id: path for path in folder.glob("*/*")}


async def test_a_rollout_goes_on_from_the_latest_file_of_any_node(tmp_path: Path, nodes: list[SavedSandboxes]) -> None:
    one, two, three = nodes
    late = {"turns": 3, "digest": digest_of([turn.generation.output_ids for turn in TURN[:3]])}
    await save(one)
    await save(two, WORK.model_copy(update=late))
    found = await three.find("r", TURN, "identity of base")
    assert found is not None
    assert (found.work.turns, found.path.parent.name) == (3, "c")
    async with three.opened(found) as path:
        assert path.read_bytes() == DATA
    assert names(tmp_path) == ["a", "c"]
    await one.forget("r", is_elsewhere=True)
    assert names(tmp_path) == ["a", "c"]
    await three.forget("r")
    await two.forget("r")  # it does not know yet that its file is gone
    assert names(tmp_path) == ["a"]
    assert await two.find("r", TURN, "identity of a new base") is None
    assert names(tmp_path) == ["a"]


async def test_what_a_lost_node_left_is_removed_by_another(tmp_path: Path, nodes: list[SavedSandboxes]) -> None:
    one, two, _ = nodes
    for name in ("ended", "under-way", "new"):
        await save(one, WORK.model_copy(update={"rollout_id": name}))
    files = paths(tmp_path)
    (written := tmp_path / "a" / "killed.part").write_bytes(files["under-way"].read_bytes())
    (now := tmp_path / "a" / "now.part").touch()
    for path in (files["ended"], files["under-way"], written):
        os.utime(path, (time.time() - 4_000,) * 2)
    await two.sweep(cast(Store, Rollouts("under-way")))
    assert not written.exists()
    now.unlink()
    assert paths(tmp_path).keys() == {"under-way", "new"}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SandboxUnsavedError("a program"), "refused"),
        (FileTooLargeError("large"), "large"),
        (SandboxError("broken"), "failed"),
        (OSError("no space"), "failed"),
    ],
)
async def test_a_sandbox_that_is_not_saved_leaves_the_last_file(saved: SavedSandboxes, error, outcome) -> None:
    await save(saved)
    await save(saved, WORK.model_copy(update={"turns": 3}), Saves(error))
    found = await saved.find("r", TURN, "identity of base")
    assert found is not None
    assert found.work.turns == 2
    assert outcomes(saved) == {"saved": 1, outcome: 1}


async def test_saving_is_bounded_in_time_and_space(
    tmp_path: Path, saved: SavedSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_sandboxes, "SAVE_SECONDS", 0.05)
    await save(saved, sandbox=Saves(hangs=True))
    assert outcomes(saved) == {"slow": 1}
    small = make(tmp_path / "saved", budget=100)
    await save(small)
    assert outcomes(small) == {"full": 1}
    assert list((tmp_path / "saved").iterdir()) == []


async def test_those_that_are_saved_at_once_share_the_space(saved: SavedSandboxes) -> None:
    await save(saved)
    flushes, goes_on = anyio.Event(), anyio.Event()

    async def flush() -> None:
        flushes.set()
        await goes_on.wait()

    saved._flush_turns, saved._budget = flush, 2 * sum(saved._sizes.values()) - 10
    await saved.forget("r")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save, saved)
        await flushes.wait()
        with anyio.fail_after(5):
            await save(saved, WORK.model_copy(update={"rollout_id": "s"}))
        goes_on.set()
    assert outcomes(saved) == {"saved": 2, "full": 1}
