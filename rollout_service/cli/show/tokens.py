"""Shows a trajectory token by token, in colors. Whatever a terminal would obey, or hide, is shown escaped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from rollout_service.base.terminal_text import escape_controls
from rollout_service.cli.common import count
from rollout_service.cli.show.colors import Coloring, Mark, Token, legend, mark, plain_legend

if TYPE_CHECKING:
    from api_schemas.rollouts.tokens import SegmentOutline, TokenRange, TrajectoryOutline
    from rollout_client.client import RolloutClient


TOKENS_AT_ONCE = 4_096
_BRACKETS = str.maketrans({"⟦": "\\u27e6", "⟧": "\\u27e7"})


async def render(
    client: RolloutClient,
    rollout_id: str,
    coloring: Coloring,
    *,
    node: int | None = None,
    plain: bool = False,
) -> AsyncIterator[list[Segment]]:
    """Yield a trajectory as styled texts, a part at a time; with `plain`, brackets stand for colors."""
    outline = await client.outline(rollout_id, node=node)
    yield head(outline, coloring, plain=plain)
    for segment in outline.segments:
        yield [Segment(f"\n{title(segment)}\n", Style.parse("bold"))]
        for start in range(0, segment.tokens, TOKENS_AT_ONCE):
            part = await client.tokens(rollout_id, segment=segment.index, start=start, count=TOKENS_AT_ONCE, node=node)
            yield list(styled(tokens_of(part), segment, coloring, plain=plain))
        yield [Segment("\n")]


def head(outline: TrajectoryOutline, coloring: Coloring, *, plain: bool) -> list[Segment]:
    parts = [Segment(f"{coloring}: ")]
    if plain:
        parts.append(Segment(plain_legend(coloring)))
    else:
        for text, style in legend(coloring):
            parts += [Segment(text, Style.parse(style)), Segment("  ")]
    if not outline.has_text:
        parts.append(Segment("\nThe pool's tokenizer is not known here, so ids are shown instead of text."))
    return [*parts, Segment("\n")]


def title(segment: SegmentOutline) -> str:
    text = f"segment {segment.index}, {segment.fork_reason}"
    if segment.parent is not None:
        text += f", forked from {segment.parent} after {count(segment.shared_prefix, 'shared token')}"
    if segment.first_difference is not None:
        text += f", differs at token {segment.first_difference}"
    text += f": {count(segment.tokens, 'token')}, {segment.sampled} sampled"
    return text if segment.trained else f"{text} ({segment.role}, not trained)"


def tokens_of(part: TokenRange) -> Iterator[Token]:
    mask, versions, turns = (
        [value for value, times in runs for _ in range(times)] for runs in (part.mask, part.versions, part.turns)
    )
    for number, text in enumerate(_texts(part)):
        yield Token(
            index=part.start + number,
            text=escape_controls(text),
            sampled=bool(mask[number]),
            version=versions[number],
            turn=turns[number],
            logprob=part.logprobs[number],
        )


def styled(tokens: Iterator[Token], segment: SegmentOutline, coloring: Coloring, *, plain: bool) -> Iterator[Segment]:
    """Yield styled texts, or texts in brackets; neighbors with the same mark become one."""
    marked = ((mark(coloring, token, segment), token) for token in tokens)
    for _, group in groupby(marked, key=lambda one: one[0].key):
        pairs = list(group)
        text, how = "".join(token.text for _, token in pairs), pairs[0][0]
        yield Segment(_in_brackets(text, how)) if plain else Segment(text, Style.parse(how.style))


def _in_brackets(text: str, how: Mark) -> str:
    text = text.translate(_BRACKETS)
    if how.label is None:
        return text
    if how.label.startswith("-"):  # a log-probability
        return f"⟦{text} {how.label}⟧"
    return f"⟦{how.label}: {text}⟧" if how.label else f"⟦{text}⟧"


def _texts(part: TokenRange) -> Iterator[str]:
    """Yield each token's text: its id if texts are not known, nothing for the first parts of a character."""
    if part.text is None:
        yield from (f"<{token_id}>" for token_id in part.ids)
        return
    units = part.text.encode("utf-16-le", "surrogatepass")
    start = 0
    for end in part.ends:
        yield units[2 * start : 2 * end].decode("utf-16-le", "replace")
        start = end
