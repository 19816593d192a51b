"""Tokens are shown by what a person asks for, with and without colors, and nothing in them reaches the terminal."""

import re
import sys
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment

from api_schemas.rollouts.tokens import SegmentOutline, TokenRange, TrajectoryOutline
from api_schemas.trajectories import ForkReason, SegmentRole
from rollout_service.cli.console import SafeConsole
from rollout_service.cli.show import pages
from rollout_service.cli.show.colors import Coloring
from rollout_service.cli.show.pages import as_text, page, print_parts
from rollout_service.cli.show.tokens import render

STYLE = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
WORDS = ["ask", " me", "ok", "\x1b[2J", " no"]
MASK, VERSIONS, TURNS = [0, 0, 1, 0, 1], [-1, -1, 3, -1, 4], [-1, -1, 0, -1, 1]
LOGPROBS = [None, None, -0.01, None, -5.0]


class Served:
    """A server with one trajectory of two segments with the same tokens; the second was forked from the first."""

    def __init__(self, words: list[str] | None = None, *, has_text: bool = True) -> None:
        self.words = WORDS if words is None else words
        self.has_text = has_text
        self.asked: list[tuple[int, int, int | None]] = []

    async def outline(self, rollout_id: str, *, node: int | None = None) -> TrajectoryOutline:
        first = SegmentOutline(index=0, trained=True, tokens=len(self.words), sampled=2, fork_reason=ForkReason.FIRST)
        second = first.model_copy(
            update={
                "index": 1,
                "trained": False,
                "role": SegmentRole.MAIN,
                "fork_reason": ForkReason.HISTORY_EDITED,
                "parent": 0,
                "shared_prefix": 2,
                "first_difference": 2,
            }
        )
        return TrajectoryOutline(rollout_id=rollout_id, node=node, segments=[first, second], has_text=self.has_text)

    async def tokens(self, rollout_id: str, *, segment: int, start: int, count: int, node: int | None) -> TokenRange:
        self.asked.append((segment, start, node))
        words = self.words[start : start + count]
        lengths = [len(word.encode("utf-16-le", "surrogatepass")) // 2 for word in words]
        ends = [sum(lengths[: number + 1]) for number in range(len(words))]

        def column(values: list[int]) -> list[tuple[int, int]]:
            return [(values[(start + number) % len(values)], 1) for number in range(len(words))]

        return TokenRange(
            segment=segment,
            start=start,
            count=len(words),
            total=len(self.words),
            ids=list(range(start, start + len(words))),
            text="".join(words) if self.has_text else None,
            ends=ends if self.has_text else [],
            mask=column(MASK),
            versions=column(VERSIONS),
            turns=column(TURNS),
            logprobs=[LOGPROBS[(start + number) % len(LOGPROBS)] for number in range(len(words))],
        )


async def shown(served: Served, coloring: Coloring, *, plain: bool = True, node: int | None = None) -> str:
    console = SafeConsole()
    parts = render(served, "r-1", coloring, node=node, plain=plain)  # type: ignore[arg-type]
    return "".join([as_text(console, part) async for part in parts])


@pytest.mark.parametrize(
    ("coloring", "expected"),
    [
        (Coloring.MASK, r"ask me⟦ok⟧\x1b[2J⟦ no⟧"),
        (Coloring.LOGPROB, r"ask meok\x1b[2J⟦ no -5.00⟧"),
        (Coloring.VERSION, r"ask me⟦version 3: ok⟧\x1b[2J⟦version 4:  no⟧"),
        (Coloring.TURN, r"ask me⟦turn 0: ok⟧\x1b[2J⟦turn 1:  no⟧"),
        (Coloring.SEGMENT, r"ask me⟦ok\x1b[2J no⟧"),
    ],
)
async def test_brackets_say_what_colors_would(coloring, expected):
    text = await shown(Served(), coloring)
    assert expected in text
    assert "\x1b" not in text


async def test_each_segment_says_where_it_comes_from():
    text = await shown(Served(), Coloring.MASK)
    assert "segment 0, first: 5 tokens, 2 sampled" in text
    assert (
        "segment 1, history_edited, forked from 0 after 2 shared tokens, differs at token 2: 5 tokens, 2 sampled "
        "(main, not trained)"
    ) in text


async def test_brackets_of_the_policy_are_not_ours():
    text = await shown(Served(["⟦x⟧", "a", "b"]), Coloring.MASK)
    assert r"\u27e6x\u27e7a⟦b⟧" in text


async def test_ids_stand_for_a_text_that_is_not_known():
    text = await shown(Served(has_text=False), Coloring.MASK)
    assert "<0><1>⟦<2>⟧<3>⟦<4>⟧" in text
    assert "tokenizer is not known" in text


async def test_a_long_segment_is_read_in_ranges(monkeypatch):
    monkeypatch.setattr("rollout_service.cli.show.tokens.TOKENS_AT_ONCE", 2)
    served = Served()
    text = await shown(served, Coloring.MASK, node=7)
    assert [start for segment, start, _ in served.asked if segment == 0] == [0, 2, 4]
    assert {node for *_, node in served.asked} == {7}
    assert r"ask me⟦ok⟧\x1b[2J⟦ no⟧" in text


@given(words=st.lists(st.text(max_size=5), min_size=1, max_size=8), coloring=st.sampled_from(Coloring))
async def test_nothing_that_a_terminal_obeys_is_ever_shown(words, coloring):
    for plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            patch.setenv("TERM", "xterm-256color")
            patch.delenv("NO_COLOR", raising=False)
            text = await shown(Served(words), coloring, plain=plain)
        assert not UNSAFE.search(STYLE.sub("", text))
        assert not plain or "⟦" in text or coloring is not Coloring.SEGMENT


async def test_colors_are_there_with_a_terminal_and_not_with_no_color(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert STYLE.search(await shown(Served(), Coloring.MASK, plain=SafeConsole().is_plain))
    assert SafeConsole(color=False).is_plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert SafeConsole().is_plain
    assert not STYLE.search(await shown(Served(), Coloring.MASK, plain=True))


def test_a_pager_gets_the_whole_text(tmp_path, monkeypatch):
    paged = tmp_path / "paged"
    monkeypatch.setenv("PAGER", f'{sys.executable} -c \'import sys; open("{paged}", "w").write(sys.stdin.read())\'')
    assert page("a\nb\n")
    assert paged.read_text() == "a\nb\n"


def test_a_pager_that_is_left_early_or_missing_is_no_error(monkeypatch):
    monkeypatch.setenv("PAGER", "true")
    assert page("x" * 1_000_000)
    monkeypatch.setenv("PAGER", "/no/such/pager")
    assert not page("text")


async def test_off_a_terminal_parts_are_printed_as_they_come(monkeypatch, capsys):
    monkeypatch.setattr(pages, "page", lambda text: pytest.fail("a pager was started"))
    printed: list[str] = []

    async def parts() -> AsyncIterator[list[Segment]]:
        yield [Segment("a  \n")]
        printed.append(capsys.readouterr().out)
        yield [Segment("b")]

    await print_parts(SafeConsole(), parts(), pager=True)
    assert printed == ["a  \n"]
    assert capsys.readouterr().out == "b"
