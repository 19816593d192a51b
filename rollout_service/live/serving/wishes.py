"""What a client of a live session says beside its dialect: the kind of the turn, and its consent.

Guarantee: fields that no dialect knows are removed from the body before the dialect reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.contract import ModelCall
from rollout_service.gateway.dialects.fields import parse_json

KIND_HEADER, TRAIN_HEADER, SESSION_HEADER = "x-turn-type", "x-train", "x-session-id"
_FIELDS = ("turn_type", "train", "session_id")
_MARKS = tuple(f'"{name}"'.encode() for name in _FIELDS)
_YES, _NO = frozenset({"yes", "true", "1", "on"}), frozenset({"no", "false", "0", "off"})


class TurnTypeError(InvalidFieldError):
    """A header or field of a live session has no known value."""

    status = 400


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request says."""

    kind: Literal["", "main", "side"] = ""
    train: bool | None = None

    def apply(self, call: ModelCall) -> dict[str, Any]:
        """Return the fields of a call that they change; a repeated request must wish the same."""
        said = f"{self.kind}/{self.train}".encode()
        fingerprint = call.fingerprint + said if call.fingerprint else b""
        return {"kind": self.kind, "train": self.train, "fingerprint": fingerprint}


def read_wishes(headers: Mapping[str, str], body: bytes) -> tuple[Wishes, bytes]:
    """Return what a request says, and its body without the fields for it. Headers go before fields.

    Raises:
        TurnTypeError: A value is not known.
    """
    fields: dict[str, Any] = {}
    if any(mark in body for mark in _MARKS):
        fields, body = _take(body)
    kind = headers.get(KIND_HEADER, "") or fields.get("turn_type")
    train = headers.get(TRAIN_HEADER, "") or fields.get("train")
    return Wishes(_kind(kind), _consent(train)), body


def _take(body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        value = parse_json(body)
    except ValueError:  # the dialect says so in its own form
        return {}, body
    if not isinstance(value, dict):
        return {}, body
    taken = {name: value.pop(name) for name in _FIELDS if name in value}
    return taken, orjson.dumps(value) if taken else body


def _kind(value: object) -> Literal["", "main", "side"]:
    said = value.strip().lower() if isinstance(value, str) else value
    if said in (None, ""):
        return ""
    if said == "main":
        return "main"
    if said == "side":
        return "side"
    raise _unknown("turn_type", "must be main or side")


def _consent(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    said = value.strip().lower() if isinstance(value, str) else ""
    if said in _YES or said in _NO:
        return said in _YES
    raise _unknown("train", "must be yes or no")


def _unknown(name: str, message: str) -> TurnTypeError:
    return TurnTypeError([FieldError(path=name, message=message)])
