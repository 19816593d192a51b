"""The rollouts of the benchmark of lists: most are of one long run of groups of eight, some of short runs and some of
none; a twentieth has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, Stage, StopReason, Usage
from api_schemas.tasks import Task
from rollout_service.store.codec.rollouts import encode_result

GROUP_SIZE = 8
SHORT_RUNS = 20
LONG = "long"
"""The id of the run with most of the rollouts."""
START = 1_750_000_000.0
ENVIRONMENTS = ("math", "calc", "swe", "code")
CODES = ("engine_unreachable", "stage_timeout", "sandbox_start_failed", "agent_failed")
RARE = "grader_failed"


Member = tuple[int, str, int | None, int | None]
"""A rollout: its number, its id, the number of its run, and that of its group."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A run: its rollouts follow one another."""

    number: int
    name: str
    groups: int
    first: int
    """The number of its first rollout."""

    def members(self) -> Iterator[Member]:
        for n in range(self.groups * GROUP_SIZE):
            group, sample = divmod(n, GROUP_SIZE)
            yield self.first + n, f"{self.name}.{group}.{sample}", self.number, group


def layout(rollouts: int) -> Sequence[Layout]:
    """Return the runs of so many rollouts."""
    long = rollouts * 8 // 10 // GROUP_SIZE
    groups = [rollouts // 10 // SHORT_RUNS // GROUP_SIZE] * SHORT_RUNS
    groups.insert(SHORT_RUNS // 2, long)
    runs, first = [], 1
    for number, count in enumerate(groups, start=1):
        name = LONG if count == long else f"short-{number}"
        runs.append(Layout(number, name, count, first))
        first += count * GROUP_SIZE
    return runs


def alone(rollouts: int) -> Iterator[Member]:
    """Yield the rollouts of no run, which are the last ones."""
    end = layout(rollouts)[-1]
    for number in range(end.first + end.groups * GROUP_SIZE, rollouts + 1):
        yield number, f"alone-{number}", None, None


def row(member: Member) -> tuple[object, ...]:
    """Return what a store has of a rollout, as `lists.py` inserts it."""
    number, name, run, group = member
    at = START + number * 0.1
    state, reward, stop, code = "completed", number % 11 / 10, StopReason.FINISHED.value, None
    if number % 20 == 0:
        rare = number % 100_000 == 0
        code = RARE if rare else CODES[number // 20 % len(CODES)]
        state, reward, stop = "failed", None, StopReason.ERROR.value
    elif number % 101 == 0:
        state, reward, stop = "cancelled", None, StopReason.CANCELLED.value
    environment = ENVIRONMENTS[number % 7 % len(ENVIRONMENTS)]
    where = (environment, run, group, state, reward, stop, code)
    return (number, name, *where, at, at, at + 60, number % 9, number % 4_000, 42.5)


def result() -> Rollout:
    """Return a result of usual size."""
    now = datetime.fromtimestamp(START, UTC)
    return Rollout(
        rollout_id="x",
        state=RolloutState.COMPLETED,
        task=Task(environment="math", instance={}),
        pool="policy",
        reward=0.5,
        usage=Usage(turns=4, prompt_tokens=9_000, sampled_tokens=900, tool_calls=3),
        spans=[Span(stage=stage, attempt=1, started_at=now, queued_seconds=0.1, seconds=9.5) for stage in Stage],
        created_at=now,
    )


REQUEST = RolloutRequest(
    rollout_id="x", task=Task(environment="math", instance={"question": "1 + 1 = ?" * 9})
).model_dump_json()
RESULT = encode_result(result())
