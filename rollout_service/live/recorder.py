"""Records the turns of one live session, as its gateway session serves them.

A turn is in the store before its last event can leave, or its client gets an error instead. Nothing of a request
without consent is stored, nor of a later one whose history has something of it, nor of a turn in which a detector finds
something; such turns are counted. What followed an answer is set when the next request arrives.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from api_schemas.trajectories import FinishReason, SegmentRole
from rollout_service.base.errors import StoreError
from rollout_service.engines.contract import Generation
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.capture.history import canonical, has_many_values
from rollout_service.gateway.capture.text_stream import SentAnswer
from rollout_service.gateway.contract import ClientMessage, ModelCall, map_roles
from rollout_service.live.consent import ConversationConsent, MessageHashes, new_messages, read_all
from rollout_service.live.contract import NextStateRecord, OptOuts, SessionRecord, TurnRecord
from rollout_service.live.detectors import Detectors
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.replay import PackedTurn, pack
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.tokens.conversation import check_output

log = structlog.get_logger(__name__)

T = TypeVar("T")

OPTED_OUT = "opted-out"
INLINE_IDS = 32_768
"""Turns with more new ids are encoded in a thread."""


@dataclass(frozen=True, slots=True)
class RecordingParts:
    """Shared by the recorders of all sessions."""

    store: SqliteLiveStore
    detectors: Detectors
    hashes: MessageHashes
    metrics: LiveMetrics
    tasks: TaskGroup
    followed: Callable[[], None] = lambda: None
    rated: Callable[[str, int], None] = lambda *_: None
    clock: Callable[[], float] = time.time

    def later(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write in the background."""
        self.tasks.start_soon(self._write, write)

    async def _write(self, write: Callable[[], Awaitable[object]]) -> None:
        try:
            with anyio.CancelScope(shield=True):  # a shutdown waits for it
                await write()
        except StoreError as error:
            log.error("a live session cannot be written", error=str(error), hint=error.hint)


@dataclass(slots=True)
class SessionRecorder:
    """Implements `gateway.contract.CallObserver`.

    Its methods raise StoreError if an opt-out cannot be noted: the request is then not answered.
    """

    session: SessionRecord
    capture: TurnCapture
    parts: RecordingParts
    consent: ConversationConsent
    default_kind: TurnKind
    sent: set[int] = field(default_factory=set)
    """Turns whose last token was sent."""
    latest: dict[bytes, int] = field(default_factory=dict)
    """By the state of its messages, the number of the last call."""
    calls: int = 0

    async def planned(self, call: ModelCall, planned: PlannedTurn) -> LiveTurn:
        kind = self._kind(call, planned)
        is_recorded = self._agrees(call) and await self.consent.allows(planned)
        self._note_echo(planned)
        if is_recorded:
            self._note_repeat(planned)
            if kind is TurnKind.MAIN:
                self._follow(planned)
        self.calls += 1
        turn = LiveTurn(self, planned, kind, "" if is_recorded else OPTED_OUT, self.calls)
        if is_recorded:
            self.latest[planned.match.state] = turn.number
        else:
            await self._refuse(new_messages(planned))
        return turn

    async def refused(self, call: ModelCall) -> None:
        if not self._agrees(call):
            await self._refuse(map_roles(call.messages))

    def _agrees(self, call: ModelCall) -> bool:
        return self.session.train if call.train is None else call.train

    async def _refuse(self, messages: Sequence[ClientMessage]) -> None:
        with anyio.CancelScope(shield=True):  # who goes away has not agreed either
            await self.opt_out(await self.consent.refuse(messages))

    def _kind(self, call: ModelCall, planned: PlannedTurn) -> TurnKind:
        if call.kind:
            return TurnKind(call.kind)
        if self.default_kind is TurnKind.SIDE or call.lane.purpose in ("side", "subagent"):
            return TurnKind.SIDE
        is_main = self.capture.role_of(planned) is SegmentRole.MAIN
        return TurnKind.MAIN if is_main else TurnKind.SIDE

    async def opt_out(self, added: OptOuts) -> None:
        await self.parts.store.opt_out(self.consent.conversation, added, self.parts.clock())

    def _note_echo(self, planned: PlannedTurn) -> None:
        """Note that a client which sends an answer back has received it."""
        before = planned.follows
        if before is not None:
            self.note_sent(before.turn.turn_id)

    def _note_repeat(self, planned: PlannedTurn) -> None:
        """Mask earlier answers to the same messages that did not arrive."""
        store, session_id = self.parts.store, self.session.session_id
        for each in self.capture.same_as(planned):
            turn = each.turn.turn_id
            if turn not in self.sent:
                self.parts.later(partial(store.mask, session_id, turn, MaskReason.SUPERSEDED))

    def _follow(self, planned: PlannedTurn) -> None:
        before, since = planned.follows, planned.since
        if planned.call.lane.purpose == "compaction":
            since = since[:-1]  # the client itself asks for a summary
        if before is not None and since:
            calls = {call.id: call.name for call in before.sent.calls}
            self.parts.later(partial(self._set_next_state, before.turn.turn_id, since, calls))

    async def _set_next_state(self, turn: int, messages: Sequence[ClientMessage], calls: dict[str, str]) -> None:
        state = await read_all(messages, partial(next_state, messages, self.parts.clock(), calls))
        if state is None:
            return
        store, session_id = self.parts.store, self.session.session_id
        if found := await self.parts.detectors.search([state.text]):
            self.parts.metrics.redacted(found)
            await store.mask(session_id, turn, MaskReason.REDACTED)
        elif await store.follow(session_id, turn, state):
            self.parts.followed()

    def note_sent(self, turn: int) -> None:
        if turn not in self.sent:
            self.sent.add(turn)
            self.parts.later(partial(self._deliver, turn))

    async def _deliver(self, turn: int) -> None:
        try:
            await self.parts.store.deliver(self.session.session_id, turn)
        except StoreError:
            self.sent.discard(turn)  # the client may send it back, which says so again
            raise


@dataclass(slots=True)
class LiveTurn:
    """Implements `gateway.contract.TurnObserver`."""

    recorder: SessionRecorder
    planned: PlannedTurn
    kind: TurnKind
    unrecorded_because: str
    """Empty if it is to be stored."""
    number: int
    """Among the calls that this process has seen."""
    turn: int | None = None
    """The turn's id, once it is stored."""

    async def record(self, generation: Generation, *, delivered: bool) -> None:
        """Store the turn, or only count it.

        Raises:
            RecordError: The engine's answer cannot be trained on.
            StoreError: The turn cannot be stored.
        """
        recorder, parts = self.recorder, self.recorder.parts
        if self.unrecorded_because:
            self.planned.complete(generation)
            await recorder.opt_out(recorder.consent.refuse_answer(self.planned.splitter.sent))
            await parts.store.served(recorder.session.session_id, parts.clock(), opted_out=True)
            return
        planned = self.planned
        check_output(generation.output_ids, generation.logprobs, generation.versions)
        planned.complete(generation)
        packed = await self._make(generation, partial(pack, recorder.capture, planned, generation, delivered=delivered))
        texts = await self._make(generation, partial(self._texts, packed, generation))
        if found := await parts.detectors.search(texts):
            parts.metrics.redacted(found)
            await parts.store.record(self._record(generation, None, delivered=delivered))
            recorder.capture.skip()
            return
        body = await self._make(generation, packed.encode)
        turn = recorder.capture.next_id
        await parts.store.record(self._record(generation, body, delivered=delivered))
        recorder.capture.record(planned, generation, delivered=delivered)
        self.turn = turn

    def sent(self) -> None:
        if self.turn is not None:
            self.recorder.note_sent(self.turn)

    async def _make(self, generation: Generation, make: Callable[[], T]) -> T:
        """Use a thread if the turn is long."""
        new = len(self.planned.prompt_ids) - self.planned.known + len(generation.output_ids)
        return await anyio.to_thread.run_sync(make) if new > INLINE_IDS else make()

    def _texts(self, packed: PackedTurn, generation: Generation) -> list[str]:
        sent = self.planned.splitter.sent
        said = self.recorder.capture.renderer.decode(generation.output_ids)
        return [*packed.texts(), said, answer_text(sent), *_calls(sent)]

    def _record(self, generation: Generation, body: bytes | None, *, delivered: bool) -> TurnRecord:
        """Without a body, keep nothing that was said."""
        planned, sent = self.planned, self.planned.splitter.sent
        return TurnRecord(
            session_id=self.recorder.session.session_id,
            turn=self.recorder.capture.next_id,
            kind=self.kind,
            answer="" if body is None else answer_text(sent),
            version=max(generation.versions, default=0),
            truncated=generation.finish_reason is FinishReason.LENGTH,
            malformed=planned.splitter.malformed,
            calls=() if body is None else tuple(_calls(sent)),
            recorded_at=self.recorder.parts.clock(),
            mask=self._mask(body, delivered=delivered),
            body=body or b"",
        )

    def _mask(self, body: bytes | None, *, delivered: bool) -> MaskReason | None:
        if not delivered and self.recorder.latest.get(self.planned.match.state) != self.number:
            return MaskReason.SUPERSEDED
        if body is None:
            return MaskReason.REDACTED
        if self.kind is TurnKind.SIDE:
            return MaskReason.SIDE
        return MaskReason.FOREIGN if self.planned.call.json_schema is not None else None


def answer_text(sent: SentAnswer) -> str:
    """Join an answer and its tool calls, as a judge reads them."""
    calls = [f"[call {call.name}]\n{call.arguments}" for call in sent.calls]
    return "\n\n".join(filter(None, [sent.text, *calls]))


def _calls(sent: SentAnswer) -> Iterator[str]:
    for call in sent.calls:
        yield json.dumps([call.name, canonical(call.arguments)])


_ERROR_TEXT: Final = re.compile(
    r"\s*(?:\[?error\]?\s*[:!]|<(?:tool_use_)?error>|traceback \(most recent call last\))", re.IGNORECASE
)
_FAILED: Final = frozenset({"error", "failed", "failure"})
_READ_CHARS: Final = 1_000_000
"""Longer results are not read as JSON, to not hold up the event loop, nor are those of more than `MAX_VALUES`."""


def next_state(
    messages: Sequence[ClientMessage], arrived_at: float, calls: Mapping[str, str] | None = None
) -> NextStateRecord | None:
    """Join the messages of users and tools since an answer into one text for a judge; return None without any.

    Every such message is in it, whole, with its role and the name of its tool, in the order in which it came. `calls`
    are the names of the answer's tool calls by the ids that the client knows, for results without the tool's name.
    """
    said = [message for message in messages if message.role in ("user", "tool")]
    if not said:
        return None
    roles = {message.role for message in said}
    later = {call.id: call.name for message in messages for call in message.calls if call.id is not None}
    names = {**(calls or {}), **later}
    return NextStateRecord(
        role="mixed" if len(roles) > 1 else "tool" if "tool" in roles else "user",
        text="\n\n".join(_titled(message, names) for message in said),
        is_error=any(message.role == "tool" and (message.is_error or says_error(message.text)) for message in said),
        arrived_at=arrived_at,
    )


def says_error(result: str) -> bool:
    """Look for a sign that the call failed.

    Only Anthropic's API has a field for that. In the others, the text begins with it, or is JSON with such a field.
    """
    if _ERROR_TEXT.match(result):
        return True
    text = result.strip()
    if not text.startswith("{") or len(text) > _READ_CHARS or has_many_values(text):
        return False
    try:
        read: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return False
    status = read.get("status")
    return (
        any(read.get(name) not in (None, False, "", 0, [], {}) for name in ("error", "is_error", "isError"))
        or (isinstance(status, str) and status.casefold() in _FAILED)
        or read.get("success") is False
    )


def _titled(message: ClientMessage, names: Mapping[str, str]) -> str:
    if message.role != "tool":
        return f"[{message.role}]\n{message.text}"
    name = message.tool_name or names.get(message.call_id or "", "")
    return f"[tool {name}]\n{message.text}" if name else f"[tool]\n{message.text}"
