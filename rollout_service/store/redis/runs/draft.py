"""A run's record as a transaction changes it.

Only the fields that changed are written, and a run that is over never changes its state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

from api_schemas.runs import RunRequest, RunState
from rollout_service.store import rules
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.runs_contract import RunRecord

_COUNTER = "n:"
_INTEGERS = ("version", "first_version", "tasks", "cursor", "batches", "held_bytes")
_TIMES = ("created_at", "changed_at", "settled_at")


class RunDraft:
    """The fields of a run's hash, as text, with the changes of a transaction."""

    def __init__(self, run_id: str, fields: Mapping[str, str]) -> None:
        self.run_id = run_id
        self._before = fields
        self._fields = dict(fields)

    @classmethod
    def from_reply(cls, run_id: str, reply: Sequence[bytes]) -> Self | None:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        fields = {name.decode(): value.decode() for name, value in pairs}
        return cls(run_id, fields) if fields else None

    @classmethod
    def create(cls, run_id: str, fields: Mapping[str, Any]) -> Self:
        draft = cls(run_id, {})
        draft.set(cursor=0, batches=0, held_bytes=0, settled_at=0.0, reported="{}")
        draft.set(**fields)
        return draft

    def __getitem__(self, name: str) -> Any:
        """Give the field its type, as the codecs read it."""
        if name == "run_id":
            return self.run_id
        text = self._fields.get(name)
        if text is None:
            return None
        if name in _INTEGERS or name == "total":
            return int(text)
        return float(text) if name in _TIMES else text

    def set(self, **fields: Any) -> None:
        """Change fields; None removes one."""
        for name, value in fields.items():
            if value is None:
                self._fields.pop(name, None)
            else:
                self._fields[name] = repr(value) if isinstance(value, float) else str(value)

    def count(self, name: str, added: int = 1) -> None:
        left = int(self._fields.get(_COUNTER + name, 0)) + added
        self.set(**{_COUNTER + name: left or None})

    @property
    def revision(self) -> str:
        """The revision that was read; empty for a run that is not stored yet."""
        return self._before.get("revision", "")

    @property
    def reported(self) -> dict[str, int]:
        """The counts of dropped groups that the latest batch reported."""
        return dict(json.loads(self["reported"]))

    @property
    def record(self) -> RunRecord:
        counters = {
            name.removeprefix(_COUNTER): int(value) for name, value in self._fields.items() if name.startswith(_COUNTER)
        }
        return run_codec.decode_run(self, counters, request=_request(self._fields["request"]))

    @property
    def is_active(self) -> bool:
        """Whether the run still needs work: it is not over, or groups of it are open."""
        return RunState(self["state"]) not in rules.OVER or self._fields.get(f"{_COUNTER}open") is not None

    @property
    def was_active(self) -> bool:
        return bool(self._before) and RunDraft(self.run_id, self._before).is_active

    @property
    def changed_state(self) -> RunState | None:
        return None if self._before.get("state") == self._fields["state"] else RunState(self["state"])

    def written(self) -> list[str]:
        """Return names and values, one after the other."""
        changed = {name: text for name, text in self._fields.items() if self._before.get(name) != text}
        return [part for pair in changed.items() for part in pair]

    def removed(self) -> list[str]:
        return [name for name in self._before if name not in self._fields]


@lru_cache(maxsize=256)
def _request(text: str) -> RunRequest:
    """Parse a request, which nobody changes; that costs more than the rest of the record."""
    return RunRequest.model_validate_json(text)
