"""A canary takes its share of new sessions, each always the same way, and survives a restart."""

import stat
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from api_schemas.sessions import Canary
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.live import canary as module
from rollout_service.live.canary import ABANDONED_SECONDS, Canaries

SESSIONS = [f"s-{number}" for number in range(2_000)]


def opened(folder: Path, *unserved: str) -> Canaries:
    return Canaries(folder / "canary.json", lambda pool: pool not in unserved)


def canary(share: float, pool: str = "policy", candidate: str = "next") -> Canary:
    return Canary(pool=pool, candidate=candidate, share=share)


def chosen(canaries: Canaries, pool: str = "policy") -> set[str]:
    """Return the sessions that go to the candidate."""
    return {session for session in SESSIONS if canaries.choose(pool, session) != pool}


async def test_without_a_canary_every_session_goes_where_it_asks(tmp_path):
    canaries = opened(tmp_path)
    assert not chosen(canaries)
    assert canaries.main_of("next") == "next"
    assert not await canaries.remove("policy")
    assert not await anyio.Path(tmp_path / "canary.json").exists()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
async def test_the_candidate_gets_its_share_of_one_pool(tmp_path, share):
    canaries = opened(tmp_path)
    await canaries.set(canary(share))
    assert len(chosen(canaries)) / len(SESSIONS) == pytest.approx(share, abs=0.03)
    assert not chosen(canaries, "other")
    assert not chosen(opened(tmp_path, "next")), "no engine serves the candidate"


async def test_raising_the_share_moves_no_session_back_and_lowering_it_moves_none_forth(tmp_path):
    canaries = opened(tmp_path)
    sets = []
    for share in (0.05, 0.3, 0.3, 0.9, 1.0):
        await canaries.set(canary(share))
        sets.append(chosen(canaries))
    assert all(before <= after for before, after in pairwise(sets))
    assert sets[1] == sets[2]


async def test_a_restart_changes_nothing_and_the_file_is_private(tmp_path):
    canaries = opened(tmp_path)
    await canaries.set(canary(0.4))
    again = opened(tmp_path)
    assert again.list() == [canary(0.4)]
    assert chosen(again) == chosen(canaries)
    assert stat.S_IMODE((tmp_path / "canary.json").stat().st_mode) == 0o600


async def test_after_a_removal_the_pool_of_a_candidate_is_still_known(tmp_path):
    canaries = opened(tmp_path)
    await canaries.set(canary(1.0))
    assert await canaries.remove("policy")
    again = opened(tmp_path)
    assert not chosen(again)
    assert (again.main_of("next"), again.main_of("policy")) == ("policy", "policy")


async def test_a_candidate_without_engines_is_abandoned_after_a_while(tmp_path):
    engines = {"next"}
    canaries = Canaries(tmp_path / "canary.json", engines.__contains__)
    await canaries.set(canary(1.0))
    await canaries.remove("policy")
    assert canaries.abandoned(0.0) == {}
    engines.clear()
    assert canaries.abandoned(10.0) == canaries.abandoned(9.0 + ABANDONED_SECONDS) == {}
    assert canaries.abandoned(10.0 + ABANDONED_SECONDS) == {"next": "policy"}
    engines.add("next")
    assert canaries.abandoned(11.0 + ABANDONED_SECONDS) == {}
    engines.clear()
    assert canaries.abandoned(12.0 + ABANDONED_SECONDS) == {}


async def test_a_candidate_that_becomes_a_main_pool_is_one_of_its_own(tmp_path):
    canaries = opened(tmp_path)
    await canaries.set(canary(1.0, "a", "b"))
    await canaries.remove("a")
    await canaries.set(canary(1.0, "b", "a"))
    assert (canaries.main_of("a"), canaries.main_of("b")) == ("b", "b")


@pytest.mark.parametrize(
    "wrong",
    [canary(0.1, "a", "a"), canary(0.1, "a", "next"), canary(0.1, "a", "policy"), canary(0.1, "next", "a")],
)
async def test_pools_of_another_canary_and_the_pool_itself_are_refused(tmp_path, wrong):
    canaries = opened(tmp_path)
    await canaries.set(canary(0.4))
    with pytest.raises(InvalidFieldError) as caught:
        await canaries.set(wrong)
    assert caught.value.hint
    assert canaries.list() == [canary(0.4)]


async def test_a_change_that_cannot_be_saved_has_no_effect(tmp_path, monkeypatch):
    canaries = opened(tmp_path)
    await canaries.set(canary(0.4))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_private", full)
    with pytest.raises(OSError, match="No space"):
        await canaries.set(canary(1.0))
    assert canaries.list() == opened(tmp_path).list() == [canary(0.4)]


@pytest.mark.parametrize("content", ["", "{", '{"canaries": [{"pool": "a"}]}', '{"unknown": 1}'])
def test_a_broken_file_is_named_at_the_start(tmp_path, content):
    (tmp_path / "canary.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"canary\.json") as caught:
        opened(tmp_path)
    assert "remove it" in caught.value.hint
