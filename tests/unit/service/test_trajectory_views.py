"""Tokens are shown by their bytes: whatever range is asked for, nothing of them is lost or changed."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.tokens import TokenRange
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Segment, Trajectory
from rollout_service.engines.shipped import policy_folder
from rollout_service.server.trajectories import TrajectoryViewer, join, outline, token_range
from rollout_service.tokens.tokenizer import TokenBytes
from tests.support import samples

TOKENIZER = tokenizers.Tokenizer.from_file(str(policy_folder("calc-base") / "tokenizer.json"))
BYTES = TokenBytes.of(TOKENIZER)
assert BYTES is not None
TEXTS = [
    "plain text, and more of it",
    "日本語とトークン",
    "naïve café — “quotes”",
    "👩‍👩‍👧 and 🏴 flags 🇯🇵",
    "a\u202eb\u200b<script>alert(1)</script>",
    "<|im_start|>user\nhi<|im_end|>",
]


def segment(ids: list[int], **more: Any) -> Segment:
    return samples.segment(ids, [0] * len(ids), **more)


def utf16(text: str, start: int, end: int) -> bytes:
    return text.encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le").encode()


def rebuilt(shown: TokenRange) -> bytes:
    """Return the bytes of a range's tokens, as a page puts them together."""
    assert len(shown.ends) == shown.count
    assert shown.ends == sorted(shown.ends)
    result, start = b"", 0
    for position, end in enumerate(shown.ends):
        if position in shown.pieces:
            result += bytes.fromhex(shown.pieces[position])
        else:
            result += utf16(shown.text, start, end)
        start = end
    assert not shown.ends or shown.ends[-1] == len(shown.text.encode("utf-16-le")) // 2
    assert shown.partial == sorted(shown.pieces)
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_text_are_those_of_its_tokens(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert b"".join(BYTES.of_ids(ids)) == text.encode()
    shown = token_range(segment(ids), 0, 0, len(ids), BYTES)
    assert shown.text == text
    assert rebuilt(shown) == text.encode()


@given(tokens=st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=3).map(str.encode)), max_size=40))
def test_any_bytes_come_back(tokens):
    table = TokenBytes(tokens)
    shown = token_range(segment(list(range(len(tokens)))), 0, 0, 1_000, table)
    assert rebuilt(shown) == b"".join(tokens)


@given(
    text=st.one_of(st.text(max_size=60), st.sampled_from(TEXTS)),
    cuts=st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=9),
)
def test_any_split_into_ranges_rebuilds_the_bytes_of_all_tokens(text, cuts):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    whole = segment(ids)
    result, start, number = b"", 0, 0
    while start < len(ids):
        count = cuts[number % len(cuts)]
        shown = token_range(whole, 0, start, count, BYTES)
        assert shown.ids == ids[start : start + count]
        result += rebuilt(shown)
        start, number = start + count, number + 1
    assert result == b"".join(BYTES.of_ids(ids))


def test_a_cut_character_ends_where_it_begins_except_for_its_last_part():
    shown = join([b"a", "日".encode()[:1], "日".encode()[1:2], "日".encode()[2:] + b"b", b"c"])
    assert shown.text == "a日bc"
    assert shown.ends == [1, 1, 1, 3, 4]
    assert shown.partial == [1, 2, 3]
    assert shown.pieces == {1: "e6", 2: "97", 3: "a562"}


def test_bytes_that_are_no_text_are_marked():
    shown = join([b"\xff", b"ok", b"\xe6"])
    assert shown.text == "\ufffdok\ufffd"
    assert (shown.ends, shown.partial) == ([1, 3, 4], [0, 2])
    assert shown.pieces == {0: "ff", 2: "e6"}


def byte_fallback() -> tokenizers.Tokenizer:
    words = ["▁Hello", "▁", "llo", "é"]
    names = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    model = models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|end▁of▁turn|>", special=True)])
    return tokenizer


def test_a_vocabulary_with_bytes_as_a_last_resort_has_a_table():
    tokenizer = byte_fallback()
    table = TokenBytes.of(tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("▁Hello", "<0xE6>", "<0x97>", "<0xA5>", "é", "▁")]
    assert b"".join(table.of_ids(ids)) == " Hello日é ".encode()
    end = tokenizer.token_to_id("<|end▁of▁turn|>")
    assert table.of_ids([end]) == ["<|end▁of▁turn|>".encode()]


def test_another_kind_of_vocabulary_has_none():
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    assert TokenBytes.of(words) is None
    assert token_range(segment([1, 2]), 0, 0, 2, None).text is None


def test_an_id_outside_of_the_vocabulary_is_empty():
    assert BYTES.of_ids([10_000_000, -1]) == [b"", b""]


def test_columns_are_runs_and_rounded():
    shown = token_range(
        segment(
            [5, 6, 7, 8, 9],
            loss_mask=[0, 0, 1, 1, 0],
            logprobs=[0.0, 0.0, -0.123456, -1.0, 0.0],
            versions=[-1, -1, 3, 4, -1],
            turn_ids=[-1, -1, 0, 0, -1],
        ),
        2,
        1,
        3,
        None,
    )
    assert (shown.segment, shown.start, shown.count, shown.total) == (2, 1, 3, 5)
    assert shown.ids == [6, 7, 8]
    assert shown.mask == [(0, 1), (1, 2)]
    assert shown.versions == [(-1, 1), (3, 1), (4, 1)]
    assert shown.turns == [(-1, 1), (0, 2)]
    assert shown.logprobs == [None, -0.1235, -1.0]
    assert shown.entropy is None
    assert TokenRange.model_validate_json(shown.model_dump_json()) == shown


def test_entropy_counts_the_rest_as_one_more_outcome():
    half = math.log(0.5)
    shown = token_range(
        segment(
            [5, 6, 7],
            loss_mask=[0, 1, 1],
            top_ids=[[], [1, 2], [3]],
            top_logprobs=[[], [half, math.log(0.25)], [0.0]],
        ),
        0,
        0,
        3,
        None,
    )
    expected = -(0.5 * half + 2 * 0.25 * math.log(0.25))
    assert shown.entropy == [None, pytest.approx(expected, abs=1e-4), 0.0]


def test_a_range_behind_the_end_is_empty():
    shown = token_range(segment([1, 2]), 0, 7, 10, BYTES)
    assert (shown.count, shown.ids, shown.text, shown.ends) == (0, [], "", [])


def test_the_outline_has_turns_and_where_a_segment_leaves_its_parent():
    first = segment(
        [1, 2, 3, 4, 5, 6],
        loss_mask=[0, 0, 1, 1, 0, 1],
        versions=[-1, -1, 3, 4, -1, 5],
        turn_ids=[-1, -1, 0, 0, -1, 1],
    )
    fork = segment([1, 2, 3, 9], fork_reason=ForkReason.HISTORY_EDITED, parent=0, shared_prefix=3)
    side = segment([1, 2], fork_reason=ForkReason.NEW_ROOT)
    trajectory = Trajectory(segments=[first, fork], messages=[], finish_reasons=[], fork_counts={}, untrained=[side])
    shown = outline(trajectory, "r", None, has_text=True)
    assert [each.trained for each in shown.segments] == [True, True, False]
    assert [(each.tokens, each.sampled) for each in shown.segments] == [(6, 3), (4, 0), (2, 0)]
    turns = [(turn.turn, turn.start, turn.end, turn.version) for turn in shown.segments[0].turns]
    assert turns == [(0, 2, 4, 3), (1, 5, 6, 5)]
    assert [each.first_difference for each in shown.segments] == [None, 3, None]
    assert not shown.has_entropy


def test_the_shipped_policies_can_be_shown():
    for path in Path(policy_folder("calc-base")).parent.glob("*/tokenizer.json"):
        table = TokenBytes.of(tokenizers.Tokenizer.from_file(str(path)))
        assert all(table.of_ids(list(range(len(table))))), path


class CountedStore:
    """A store with one rollout, which counts how often its trajectory is read."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self.reads = 0

    async def get(self, rollout_id: str) -> Rollout | None:
        return Rollout(
            rollout_id=rollout_id,
            state=RolloutState.COMPLETED,
            task=Task(environment="calc", instance={}),
            pool="policy",
            created_at=datetime.now(UTC),
        )

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        self.reads += 1
        return self._trajectory


class NoRenderers:
    """Knows no pool."""

    def renderer(self, pool: str) -> None:
        return None


def viewer_of(ids: list[int]) -> tuple[TrajectoryViewer, CountedStore]:
    store = CountedStore(Trajectory(segments=[segment(ids)], messages=[], finish_reasons=[], fork_counts={}))
    return TrajectoryViewer(store, NoRenderers()), store  # type: ignore[arg-type]


async def test_paging_reads_a_trajectory_once():
    viewer, store = viewer_of(list(range(1_000)))
    ids: list[int] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(viewer.outline, "one")
    for start in range(0, 1_000, 100):
        shown = await viewer.tokens("one", 0, start, 100)
        assert shown.text is None
        ids += shown.ids
    assert ids == list(range(1_000))
    assert store.reads == 1


async def test_what_was_deleted_is_not_shown_for_long(monkeypatch):
    viewer, store = viewer_of([1, 2])
    await viewer.outline("one")
    monkeypatch.setattr("rollout_service.server.trajectories.KEPT_SECONDS", 0.0)
    await viewer.outline("one")
    assert store.reads == 2


async def test_few_trajectories_are_kept_if_they_are_large(monkeypatch):
    monkeypatch.setattr("rollout_service.server.trajectories.MAX_KEPT_TOKENS", 250)
    viewer, store = viewer_of(list(range(100)))
    for name in ("one", "two", "three"):
        await viewer.outline(name)
    await viewer.outline("three")
    await viewer.outline("two")
    assert store.reads == 3
    await viewer.outline("one")
    assert store.reads == 4
