"""The judge of served turns, detached from serving: rules, votes, and hints in hindsight.

Every turn that the store has to judge is judged, once: those without a mark when the service ends are found again at
the next start. At most `queue` turns wait in memory, as ids, and `at_once` are judged. While no engine of the judge is
in service, turns wait. The judge is not asked where a rule decides. One that hangs or fails in any other way leaves a
mark without a value and with a reason, and stops nobody.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pydantic import JsonValue, ValidationError

from api_schemas.rollouts.sessions import Hint, JudgedBy, MarkReason, Votes
from rollout_service.base.errors import ConfigurationError, StoreError, describe
from rollout_service.base.signals import ChangeSignal
from rollout_service.base.validation import describe_problems
from rollout_service.engines.errors import InferenceError, NoBackendError
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.judging.contract import Judge, Vote, VoteOutcome
from rollout_service.judging.rubric import Rubric, RubricSettings
from rollout_service.live.contract import NextStateRecord, TurnMarkRecord, TurnRecord
from rollout_service.live.judging.overrides import LOOKBACK, Overrides
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveJudgeSettings
from sandboxes.task_groups import open_task_group

log = structlog.get_logger(__name__)

VALUES: Final = {"1": 1.0, "0": 0.0, "-1": -1.0}
USABLE, USELESS = "1", "-1"
"""Votes on whether the next state holds a hint."""


def value_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Make the rubric for values; this reads the prompt, so call it in a thread."""
    return _rubric(settings, "live-turn", _read(settings.prompt, "turn"), VALUES, "majority")


def hint_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Make the rubric for hints, of which every vote is wanted; this reads the prompt, so call it in a thread."""
    labels = {USABLE: 1.0, USELESS: -1.0}
    return _rubric(settings, "live-hint", _read(settings.hint_prompt, "hint"), labels, "mean")


def question(answer: str, state: NextStateRecord) -> tuple[dict[str, JsonValue], dict[str, str]]:
    """Return the fields and the texts of a prompt."""
    return {"role": state.role, "is_error": state.is_error}, {"answer": answer, "next_state": state.text}


def _read(path: Path | None, default: str) -> str:
    if path is None:
        return files(__package__).joinpath("prompts", f"{default}.jinja").read_text(encoding="utf-8")
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the judge's prompt {str(path)!r} cannot be read: {error}",
            hint="Correct the path in the settings `live.judge`, or leave it out.",
        ) from error


def _rubric(
    settings: LiveJudgeSettings,
    name: str,
    template: str,
    labels: dict[str, float],
    combine: Literal["majority", "mean"],
) -> Rubric:
    try:
        described = RubricSettings(
            name=name,
            template=template,
            texts=("answer", "next_state"),
            labels=labels,
            mark="boxed",
            pool=settings.pool,
            votes=settings.votes,
            combine=combine,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            vote_seconds=settings.vote_seconds,
            max_chars=settings.text_chars,
        )
    except ValidationError as error:
        raise ConfigurationError(
            f"live.judge: {'; '.join(describe_problems(error, RubricSettings))}",
            hint="Correct the settings of the judge.",
        ) from error
    return Rubric(described)


@dataclass(frozen=True, slots=True)
class FoundHint:
    hint: Hint | None
    dropped: str = ""
    away: InferenceError | None = None
    """Set if the judge's engines did not answer, so that asking again may help."""


FindHint = Callable[[TurnRecord], Awaitable[FoundHint]]
"""Failures are reasons, and never raised."""


@dataclass(frozen=True, slots=True)
class TurnJudge:
    judge: Judge
    rubric: Rubric
    overrides: Overrides
    find_hint: FindHint | None = None

    @property
    def pool(self) -> str:
        return self.rubric.settings.pool

    @property
    def asks_for_hints(self) -> bool:
        return self.find_hint is not None

    async def hint(self, turn: TurnRecord) -> FoundHint:
        """Return nothing if hints are not asked for."""
        return FoundHint(None) if self.find_hint is None else await self.find_hint(turn)

    async def mark(
        self, turn: TurnRecord, earlier: Sequence[TurnRecord] = (), *, is_last_try: bool = False
    ) -> TurnMarkRecord:
        """Judge a turn that has a next state, given the earlier turns of its session.

        At the last try, engines that do not answer are votes that failed.

        Raises:
            NoBackendError: The judge's pool has no backend.
            InferenceError: Every vote failed by its engine.
        """
        found = FoundHint(None)

        async def find_hint() -> None:
            nonlocal found
            found = await self.hint(turn)

        async with open_task_group() as tasks:
            tasks.start_soon(find_hint)
            if (decided := self.overrides.decide(turn, earlier)) is not None:
                name, value = decided
                source = f"override:{name}"
                mark = TurnMarkRecord(value=value, reason=MarkReason.OVERRIDE, source=source, at=0.0)
            else:
                mark = await self._ask(turn, is_last_try)
        return replace(mark, hint=found.hint, hint_dropped=found.dropped, at=time.time())

    async def _ask(self, turn: TurnRecord, is_last_try: bool) -> TurnMarkRecord:
        if turn.next_state is None:
            raise ValueError(f"turn {turn.turn} has no next state to judge it by")
        instance, texts = question(turn.answer, turn.next_state)
        poll = await self.judge.poll(self.rubric, instance, texts)
        if not is_last_try and (error := outage(poll.votes)) is not None:
            raise error
        judge = JudgedBy(pool=self.pool, model=poll.model, prompt_hash=self.rubric.prompt_hash)
        return replace(tally(poll.votes), judge=judge)


def tally(votes: Sequence[Vote]) -> TurnMarkRecord:
    """Make a mark of the votes; one with another label than -1, 0 or 1 has failed.

    The value with most valid votes counts; if several have most, it is 0, and the reason says so. Without valid votes
    there is no value, which is not the same as 0.
    """
    counts = Counter(VALUES[vote.label] for vote in votes if vote.label in VALUES)
    counted = Votes(minus=counts[-1.0], zero=counts[0.0], plus=counts[1.0], failed=len(votes) - counts.total())
    winners = [value for value, count in counts.items() if count == max(counts.values())]
    value, reason = (0.0, MarkReason.TIE) if len(winners) > 1 else (next(iter(winners), None), MarkReason.MAJORITY)
    if not winners:
        is_late = bool(votes) and all(vote.outcome is VoteOutcome.TIMED_OUT for vote in votes)
        reason = MarkReason.TIMEOUT if is_late else MarkReason.ALL_FAILED
    return TurnMarkRecord(value=value, reason=reason, source="judge", votes=counted, at=0.0)


def outage(votes: Sequence[Vote]) -> InferenceError | None:
    """Return an error if no vote reached a working engine, so that asking again may help."""
    errors = [vote.error for vote in votes]
    if errors and all(isinstance(error, InferenceError) and error.retryable for error in errors):
        return next(error for error in errors if isinstance(error, InferenceError))
    return None


TRIES: Final = 3
"""For turns whose votes all fail by their engines."""
RETRY_SECONDS: Final = 1.0
"""Before the second try; doubles from try to try."""
POLL_SECONDS: Final = 5.0
"""The longest wait of a turn that nobody announces."""

TurnKey = tuple[str, int]
OnMark = Callable[[TurnRecord, TurnMarkRecord], None]


@dataclass(eq=False)
class JudgeStage:
    store: SqliteLiveStore
    judge: TurnJudge
    serving: PolicyServing
    _: KW_ONLY
    at_once: int
    queue: int
    on_mark: OnMark = lambda *_: None
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        self._held: set[TurnKey] = set()
        self._rated: deque[TurnKey] = deque(maxlen=self.queue)
        self._changed = ChangeSignal()

    @property
    def waiting(self) -> int:
        """Turns in memory, those that are being judged included."""
        return len(self._held)

    def wake(self) -> None:
        """Look for turns now."""
        self._changed.notify()

    def note_feedback(self, session_id: str, turn: int) -> None:
        """Ask for a hint for a turn that its user has rated, if hints are asked for.

        Such turns are not in the store's queue: those that wait when the service ends, or that are too many, get none.
        """
        if self.judge.asks_for_hints:
            self._rated.append((session_id, turn))
            self._changed.notify()

    async def run(self) -> None:
        send, receive = anyio.create_memory_object_stream[TurnKey](self.queue)
        async with send, receive, anyio.create_task_group() as tasks:
            for _ in range(self.at_once):
                tasks.start_soon(self._work, receive)
            await self._feed(send)

    async def _feed(self, send: MemoryObjectSendStream[TurnKey]) -> None:
        while True:
            changed = self._changed.next
            room = self.queue - send.statistics().current_buffer_used
            while self._rated and room > 0:
                self._take(send, self._rated.popleft())
                room = self.queue - send.statistics().current_buffer_used
            if 2 * room >= self.queue:  # so that a long queue is not read again for each turn
                await self._fill(send, room)
            with anyio.move_on_after(POLL_SECONDS):
                await changed.wait()

    async def _fill(self, send: MemoryObjectSendStream[TurnKey], room: int) -> None:
        try:
            turns = await self.store.to_judge(len(self._held) + room)
        except StoreError as error:
            log.debug("turns to judge could not be read; trying again", error=str(error), hint=error.hint)
            return
        found = [(turn.session_id, turn.turn) for turn in turns]
        for key in [key for key in found if key not in self._held][:room]:
            self._take(send, key)

    def _take(self, send: MemoryObjectSendStream[TurnKey], key: TurnKey) -> None:
        if key not in self._held:
            self._held.add(key)
            send.send_nowait(key)

    async def _work(self, receive: MemoryObjectReceiveStream[TurnKey]) -> None:
        async for key in receive:
            try:
                await self._settle(*key)
            finally:
                self._held.discard(key)
                self._changed.notify()

    async def _settle(self, session_id: str, turn_id: int) -> None:
        """Judge a turn, unless it was decided in another way meanwhile."""
        attempt = 1
        while True:
            try:
                return await self._judge_once(session_id, turn_id, is_last_try=attempt >= TRIES)
            except NoBackendError:
                await self._until_served()
            except InferenceError as error:
                log.warning("the judge's engines fail; trying again", code=error.code, attempt=attempt)
                attempt += 1
            except StoreError as error:
                log.debug("a mark could not be set; trying again", error=str(error), hint=error.hint)
            await anyio.sleep(self.retry_seconds * 2 ** (attempt - 1))

    async def _judge_once(self, session_id: str, turn_id: int, *, is_last_try: bool) -> None:
        turn = await self.store.turn(session_id, turn_id)
        if turn is not None and _lacks_hint(turn) and self.judge.asks_for_hints:
            found = await self.judge.hint(turn)
            if found.away is not None and not is_last_try:
                raise found.away
            await self._add_hint(turn, found)
        if turn is None or not _is_open(turn):
            return
        mark = await self._mark(turn, is_last_try=is_last_try)
        if await self.store.mark(session_id, turn_id, mark):
            self.on_mark(turn, mark)
        elif (rated := await self.store.turn(session_id, turn_id)) is not None and _lacks_hint(rated):
            await self._add_hint(rated, FoundHint(mark.hint, mark.hint_dropped))

    async def _add_hint(self, turn: TurnRecord, found: FoundHint) -> None:
        if turn.mark is not None and (found.hint is not None or found.dropped):
            mark = replace(turn.mark, hint=found.hint, hint_dropped=found.dropped)
            await self.store.mark(turn.session_id, turn.turn, mark)

    async def _mark(self, turn: TurnRecord, *, is_last_try: bool) -> TurnMarkRecord:
        earlier = await self._earlier(turn)
        try:
            return await self.judge.mark(turn, earlier, is_last_try=is_last_try)
        except (InferenceError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001 - one turn must not keep the judge from the others
            # The error's message may quote the turn.
            code, kind = describe(error).code, type(error).__name__
            log.error(
                "a turn cannot be judged",
                session_id=turn.session_id,
                turn=turn.turn,
                code=code,
                error=kind,
                hint="Check the judge's prompts and the plug-ins of live.judge.",
            )
            return TurnMarkRecord(value=None, reason=MarkReason.ALL_FAILED, source="judge", at=time.time())

    async def _earlier(self, turn: TurnRecord) -> Sequence[TurnRecord]:
        if not self.judge.overrides:
            return ()
        turns = await self.store.turns(turn.session_id, max(0, turn.turn - LOOKBACK))
        return [one for one in turns if one.turn < turn.turn and one.kind is turn.kind]

    async def _until_served(self) -> None:
        while True:
            pools, changed = self.serving.in_service()
            if self.judge.pool in pools:
                return
            await changed.wait()


def _lacks_hint(turn: TurnRecord) -> bool:
    """Return whether a turn with a user's value could have a hint that nobody looked for."""
    mark = turn.mark
    if mark is None or mark.reason is not MarkReason.EXPLICIT or mark.hint is not None or mark.hint_dropped:
        return False
    return turn.next_state is not None and turn.mask is None and turn.part is None


def _is_open(turn: TurnRecord) -> bool:
    return turn.next_state is not None and turn.mark is None and turn.mask is None and turn.part is None
