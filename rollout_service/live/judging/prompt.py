"""The prompts of the judge of served turns: rubrics over an answer and its next state.

Guarantees: both texts are quoted between markers that they cannot contain, and are cut in the middle. The judge votes
in boxes, and only the last box of its own answer counts. An operator's prompt that is not valid is refused at the
start.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.validation import describe_problems
from rollout_service.judging.rubric import Rubric, RubricSettings
from rollout_service.live.contract import NextStateRecord
from rollout_service.settings.live import LiveJudgeSettings

VALUES: Final = {"1": 1.0, "0": 0.0, "-1": -1.0}
"""The values of a turn, by the judge's vote."""
USABLE, USELESS = "1", "-1"
"""The votes on whether the next state holds a hint."""


def value_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Return the rubric for the value of a turn; it reads the prompt, so call it in a thread.

    Raises:
        ConfigurationError: The prompt or a setting cannot be used.
    """
    return _rubric(settings, "live-turn", _read(settings.prompt, "turn"), VALUES, "majority")


def hint_rubric(settings: LiveJudgeSettings) -> Rubric:
    """Return the rubric for hints, every vote of which is wanted; it reads the prompt, so call it in a thread.

    Raises:
        ConfigurationError: The prompt or a setting cannot be used.
    """
    labels = {USABLE: 1.0, USELESS: -1.0}
    return _rubric(settings, "live-hint", _read(settings.hint_prompt, "hint"), labels, "mean")


def question(answer: str, state: NextStateRecord) -> tuple[dict[str, JsonValue], dict[str, str]]:
    """Return a turn as the fields and the texts of a prompt."""
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
