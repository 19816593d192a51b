"""Rewards that verifiers write: how they are read, and how those of several steps become one.

Guarantee: what is missing, empty, or no finite number is an error, never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rollout_service.environments.harbor.errors import RewardEmptyError, RewardInvalidError
from rollout_service.episodes import Score

REWARD = "reward"
"""The key that is the reward, where a verifier writes several numbers."""

Rewards = dict[str, float]

_FLAT = TypeAdapter(dict[str, float])


def parse_json(data: bytes) -> Rewards:
    """Return the numbers of a `reward.json`, a flat object.

    Raises:
        RewardEmptyError: The file has nothing in it.
        RewardInvalidError: The file has another form.
    """
    _require_content(data, "reward.json")
    try:
        rewards = _FLAT.validate_json(data, strict=True)
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, item["loc"])) or "the file"
        raise RewardInvalidError(f"reward.json: {place}: {item['msg']}", hint=_HINT) from error
    if not rewards:
        raise RewardEmptyError("reward.json has no number in it", hint=_HINT)
    for key, value in rewards.items():
        _require_finite(value, f"reward.json: {key}")
    return rewards


def parse_text(data: bytes) -> Rewards:
    """Return the number of a `reward.txt`, as the only reward.

    Raises:
        RewardEmptyError: The file has nothing in it.
        RewardInvalidError: The file has something else than a finite number.
    """
    text = _require_content(data, "reward.txt")
    try:
        value = float(text)
    except ValueError as error:
        raise RewardInvalidError(f"reward.txt: not a number: {text[:80]!r}", hint=_HINT) from error
    _require_finite(value, "reward.txt")
    return {REWARD: value}


def main_reward(rewards: Rewards) -> float:
    """Return the number that is the reward: that of the key `reward`, or the mean of all where there is none."""
    if REWARD in rewards:
        return rewards[REWARD]
    return math.fsum(rewards.values()) / len(rewards)


def is_below(rewards: Rewards, least: float | Mapping[str, float] | None) -> bool:
    """Return whether a step's rewards are too small for the task to go on; a key that is missing is too small."""
    if least is None:
        return False
    needed = least if isinstance(least, Mapping) else {REWARD: least}
    return any(rewards.get(key, -math.inf) < value for key, value in needed.items())


def combine(steps: Sequence[tuple[str, Rewards]], strategy: Literal["mean", "final"]) -> Score:
    """Return the score of a task from the rewards of its graded steps, by their names, if any; at least one.

    `mean` is that of each key over the graded steps, in which a missing key counts as 0; `final` is the last step's.
    """
    if strategy == "final":
        total = steps[-1][1]
    else:
        keys = {key for _, rewards in steps for key in rewards}
        total = {
            key: math.fsum(rewards.get(key, 0.0) for _, rewards in steps) / len(steps) for key in sorted(keys)
        }
    parts = dict(total)
    parts |= {f"{name}.{key}": value for name, rewards in steps if name for key, value in rewards.items()}
    return Score(main_reward(total), parts)


_HINT = "The verifier must write one number to reward.txt, or a flat object of numbers to reward.json."


def _require_content(data: bytes, name: str) -> str:
    text = data.decode(errors="replace").strip()
    if not text:
        raise RewardEmptyError(f"{name} is empty", hint=_HINT)
    return text


def _require_finite(value: float, where: str) -> None:
    if not math.isfinite(value):
        raise RewardInvalidError(f"{where}: {value} is not a finite number", hint=_HINT)
