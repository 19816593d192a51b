"""OpenEnv's messages, as models whose schemas the server publishes, so clients can check actions before sending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from api_schemas.errors import FieldError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ResetData(_Strict):
    """Which task an episode is about."""

    seed: int | None = Field(None, ge=0)
    """Chooses the task where no `index` does: seeds go round the data set."""
    index: int | None = Field(None, ge=0)
    """The task's place in the data set, or in its split."""
    split: str | None = None
    instance: dict[str, JsonValue] | None = None
    """The task itself, instead of one of the data set."""
    episode_id: str | None = Field(None, max_length=255)


class ActionCall(_Strict):
    """A call of a tool."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}


class TurnAction(_Strict):
    """One turn of the policy."""

    # Clients whose policy replies with text, such as verifiers, put it into the one field that is required.
    model_config = ConfigDict(json_schema_extra={"required": ["text"]})

    text: str = ""
    tool_calls: list[ActionCall] = []
    metadata: dict[str, Any] = {}


class SeenMessage(_Strict):
    """A message for the policy."""

    role: str
    content: str


class TurnObservation(_Strict):
    """The policy's next observation."""

    messages: list[SeenMessage] = []
    """The messages since the last turn; after a reset, those that begin the conversation."""
    tools: list[dict[str, Any]] = []
    """The definitions of the tools, in the observation of a reset alone."""
    metadata: dict[str, Any] = {}
    """At the end: `stop_reason`, `reward_parts` and `notes`."""


class EpisodeState(_Strict):
    """How far an episode has come."""

    episode_id: str | None = None
    step_count: int = 0


def schemas() -> dict[str, Any]:
    models = (("action", TurnAction), ("observation", TurnObservation), ("state", EpisodeState))
    return {name: model.model_json_schema() for name, model in models}


def observation(seen: TurnObservation, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
    data = {"observation": seen.model_dump(mode="json"), "reward": reward, "done": done}
    return {"type": "observation", "data": data | ({"metadata": seen.metadata} if seen.metadata else {})}


def failure(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def invalid(errors: ValidationError | Sequence[FieldError]) -> dict[str, Any]:
    if isinstance(errors, ValidationError):
        found = [
            {"type": one["type"], "loc": list(one["loc"]), "msg": one["msg"]}
            for one in errors.errors(include_url=False, include_input=False, include_context=False)
        ]
    else:
        found = [{"type": "value_error", "loc": one.path.split("."), "msg": one.message} for one in errors]
    text = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
    return failure("VALIDATION_ERROR", f"Invalid message: {text}", errors=found)
