"""Recorded turns as bytes, and a session's capture anew from them.

A rebuilt capture has the same trajectory as the encoded one, id for id and bit for bit, and continues conversations as
that one would. A turn is stored without the parts that it shares with the one that it extends or follows. A turn
without a body keeps its id, and nothing else.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import orjson

from api_schemas.trajectories import FinishReason, ForkReason, Message, SegmentRole
from rollout_service.base.errors import RecordLostError
from rollout_service.engines.contract import Generation
from rollout_service.gateway.capture import CapturePolicy, PlannedTurn, TurnCapture
from rollout_service.gateway.capture.echoes import Match, RecordedTurn
from rollout_service.gateway.capture.history import Head, as_messages, canonical
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, Lane, ModelCall
from rollout_service.live.contract import TurnRecord
from rollout_service.live.detectors import texts_in
from rollout_service.tokens import ChatRenderer, ToolSpec, TreePrompt, TreeTurn
from rollout_service.tokens.trajectory import shared_length

LIVE = CapturePolicy(trains=frozenset(SegmentRole))
"""All delivered turns are in `segments`; which of them are trained on is decided when a part is made."""
_FORMAT = b"\x01"
_LEVEL = 1
_LENGTH = 4


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    messages: list[Message]
    """Each answer of the policy as it was sampled."""
    tools: Sequence[ToolSpec]
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class PackedTurn:
    head: Mapping[str, Any]
    columns: Sequence[bytes]
    """New ids of the prompt, sampled ids, and their log-probabilities."""

    def texts(self) -> Iterator[str]:
        """Yield all texts in the bytes, arguments also by their values."""
        yield from texts_in(self.head)
        for message in self.head["messages"]:
            for _, _, arguments in message.get("calls", ()):
                yield canonical(arguments)

    def encode(self) -> bytes:
        written = orjson.dumps(self.head)
        parts = [len(written).to_bytes(_LENGTH), written, *self.columns]
        return _FORMAT + zlib.compress(b"".join(parts), _LEVEL)


def pack(capture: TurnCapture, planned: PlannedTurn, generation: Generation, *, delivered: bool) -> PackedTurn:
    """Pack a complete turn that is about to be recorded in a capture."""
    prompt, call = planned.prompt, planned.call
    base = prompt.parent or prompt.after
    shared = _shared_ids(prompt, base)
    history = _shared_messages(capture, planned)
    logprobs = np.asarray(generation.logprobs, np.float64)
    is_single = bool(np.all(logprobs.astype(np.float32) == logprobs))
    tools = planned.head.tools
    is_known = any(each.head.tools == tools for each in capture.turns.values())
    head = {
        "key": planned.turn_key,
        "parent": prompt.parent.turn_id if prompt.parent is not None else None,
        "after": prompt.after.turn_id if prompt.after is not None else None,
        "reason": prompt.reason,
        "compacts": planned.compacts,
        "ids": [shared, len(prompt.ids) - shared, len(generation.output_ids)],
        "logprobs": "f" if is_single else "d",
        "versions": [(version, len(list(run))) for version, run in groupby(generation.versions)],
        "finish": generation.finish_reason,
        "matched": generation.matched,
        "cached": generation.cached_tokens,
        "delivered": delivered,
        "state": planned.match.state.hex(),
        "head": [planned.head.system.hex(), tools.hex()],
        "tools": None if is_known or not prompt.tools else [dict(tool) for tool in prompt.tools],
        "deferred": [dict(tool) for tool in planned.found_tools],
        "shared": history,
        "messages": [_pack(message) for message in planned.messages[history:]],
        "call": _pack_call(call),
    }
    columns = (
        array("i", prompt.ids[shared:]),
        array("i", generation.output_ids),
        array("f" if is_single else "d", generation.logprobs),
    )
    return PackedTurn(head, [column.tobytes() for column in columns])


def rebuild(renderer: ChatRenderer, turns: Sequence[TurnRecord]) -> TurnCapture:
    """Rebuild a capture from all turns, in the order of their ids. Slow: call it in a thread.

    Raises:
        RecordLostError: A turn cannot be read.
    """
    return _SessionReplay.of(renderer, turns).capture


def prompt_of(renderer: ChatRenderer, turns: Sequence[TurnRecord], turn: int) -> TurnPrompt:
    """Find the prompt among the session's turns. Slow: call it in a thread.

    Raises:
        RecordLostError: A turn cannot be read, or nothing is kept of this one.
    """
    replay = _SessionReplay.of(renderer, [each for each in turns if each.turn <= turn])
    found = replay.capture.turns.get(turn)
    if found is None:
        raise RecordLostError(f"nothing is kept of turn {turn}", hint="Its text was redacted before it was stored.")
    ids = found.turn.ids()
    return TurnPrompt(
        messages=replay.messages(turn),
        tools=replay.tools.get(found.head.tools, ()),
        prompt_ids=ids[: found.turn.prompt_length],
        output_ids=ids[found.turn.prompt_length :],
    )


@dataclass(slots=True)
class _SessionReplay:
    capture: TurnCapture
    tools: dict[bytes, Sequence[ToolSpec]] = field(default_factory=dict)
    histories: dict[int, Sequence[ClientMessage]] = field(default_factory=dict)

    @classmethod
    def of(cls, renderer: ChatRenderer, turns: Sequence[TurnRecord]) -> _SessionReplay:
        replay = cls(TurnCapture(renderer, LIVE))
        for turn in turns:
            while replay.capture.next_id < turn.turn:
                replay.capture.skip()
            if not turn.body:
                replay.capture.skip()
                continue
            try:
                replay._add(turn)
            except (ValueError, KeyError, TypeError, zlib.error, IndexError) as error:
                raise RecordLostError(
                    f"turn {turn.turn} of session {turn.session_id} cannot be read: {error}",
                    hint="Check the disk that has the store.",
                ) from error
        return replay

    def messages(self, turn: int) -> list[Message]:
        history = self.histories[turn]
        index = self.capture.calls
        rendered = as_messages(history, index)
        own = self._answers_in(turn)
        return [own[place].turn.message if place in own else message for place, message in enumerate(rendered)]

    def _answers_in(self, turn: int) -> Mapping[int, RecordedTurn]:
        """Return the turns that a turn extends, by the places of their answers."""
        found = {}
        each = self.capture.turns[turn].turn.parent
        while each is not None:
            found[len(self.histories[each.turn_id])] = self.capture.turns[each.turn_id]
            each = each.parent
        return found

    def _add(self, record: TurnRecord) -> None:
        head, columns = _read(record.body)
        parent, after = self._tree_turn(head["parent"]), self._tree_turn(head["after"])
        base = parent or after
        hashes = Head(bytes.fromhex(head["head"][0]), bytes.fromhex(head["head"][1]))
        if head["tools"] is not None:
            self.tools[hashes.tools] = head["tools"]
        tools = self.tools.get(hashes.tools, ())
        shared, new, sampled = head["ids"]
        ids = array("i", base.ids()[:shared] if base is not None else ())
        ids.frombytes(columns[: 4 * new])
        prompt = TreePrompt(ids, tools, parent, after, ForkReason(head["reason"]))
        before = self.histories[base.turn_id] if base is not None else ()
        messages = (*before[: head["shared"]], *(_unpack(packed) for packed in head["messages"]))
        call = replace(_unpack_call(head["call"], tools), deferred_tools=tuple(head.get("deferred", ())))
        match = Match(bytes.fromhex(head["state"]))
        again = {"compacts": head["compacts"], "key": head["key"]}
        planned = PlannedTurn(self.capture.renderer, call, prompt, hashes, match, messages, **again)
        self.histories[record.turn] = messages
        generation = _generation(head, columns[4 * new :], sampled)
        planned.complete(generation)
        self.capture.record(planned, generation, delivered=head["delivered"])

    def _tree_turn(self, turn: int | None) -> TreeTurn | None:
        return None if turn is None else self.capture.turns[turn].turn


def _read(body: bytes) -> tuple[dict[str, Any], bytes]:
    if body[:1] != _FORMAT:
        raise ValueError("its format is of another release")
    data = zlib.decompress(body[1:])
    end = _LENGTH + int.from_bytes(data[:_LENGTH])
    return orjson.loads(data[_LENGTH:end]), data[end:]


def _generation(head: Mapping[str, Any], columns: bytes, sampled: int) -> Generation:
    output, logprobs = array("i"), array(head["logprobs"])
    output.frombytes(columns[: 4 * sampled])
    logprobs.frombytes(columns[4 * sampled :])
    return Generation(
        output_ids=output.tolist(),
        logprobs=logprobs.tolist(),
        versions=[version for version, count in head["versions"] for _ in range(count)],
        finish_reason=FinishReason(head["finish"]),
        matched=head["matched"],
        prompt_tokens=head["ids"][0] + head["ids"][1],
        cached_tokens=head["cached"],
        backend_id="",
        engine_seconds=0.0,
    )


def _shared_ids(prompt: TreePrompt, base: TreeTurn | None) -> int:
    """Count the ids of the base's prompt and output with which a prompt begins."""
    if base is None:
        return 0
    if base is prompt.parent:
        return base.end
    before, ids = np.asarray(base.ids(), np.int32), np.asarray(prompt.ids, np.int32)
    length = min(len(before), len(ids))
    other = np.flatnonzero(before[:length] != ids[:length])
    return int(other[0]) if len(other) else length


def _shared_messages(capture: TurnCapture, planned: PlannedTurn) -> int:
    """Count the messages shared with the turn that this one extends or follows."""
    prompt = planned.prompt
    if prompt.parent is not None:
        # Those before the answer mean the same; a capture keeps them for the last turn only.
        return planned.match.begin - 1
    before = capture.turns[prompt.after.turn_id].messages if prompt.after is not None else ()
    return shared_length(before, planned.messages)


def _pack(message: ClientMessage) -> dict[str, Any]:
    packed = {
        "role": message.role,
        "text": message.text,
        "reasoning": message.reasoning,
        "calls": [(call.id, call.name, call.arguments) for call in message.calls],
        "call_id": message.call_id,
        "tool_name": message.tool_name,
        "turn_key": message.turn_key,
        "is_error": message.is_error or None,
    }
    return {name: value for name, value in packed.items() if value not in (None, [])}


def _unpack(packed: Mapping[str, Any]) -> ClientMessage:
    calls = tuple(ClientToolCall(*call) for call in packed.get("calls", ()))
    return ClientMessage(**{**packed, "calls": calls})


def _pack_call(call: ModelCall) -> dict[str, Any]:
    lane = call.lane
    return {
        "dialect": call.dialect,
        "model": call.model,
        "lane": [lane.client, lane.session, lane.agent, lane.parent, lane.purpose],
        "schema": call.json_schema is not None,
        "stop": call.stop,
        "requested": call.requested,
        "fingerprint": call.fingerprint.hex(),
        "kind": call.kind,
        "train": call.train,
    }


def _unpack_call(packed: Mapping[str, Any], tools: Sequence[ToolSpec]) -> ModelCall:
    return ModelCall(
        dialect=Dialect(packed["dialect"]),
        model=packed["model"],
        messages=(),
        tools=tuple(tools),
        json_schema={} if packed["schema"] else None,
        stop=tuple(packed["stop"]),
        requested=packed["requested"],
        lane=Lane(*packed["lane"]),
        fingerprint=bytes.fromhex(packed["fingerprint"]),
        kind=packed["kind"],
        train=packed["train"],
    )
