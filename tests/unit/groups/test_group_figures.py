"""The sums over a group divide each rollout's time once, over all its attempts."""

from datetime import UTC, datetime

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, Span, Stage, Usage
from rollout_service.groups.statistics import GroupFigures, group_figures
from tests.support import samples

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def span(stage: Stage, seconds: float, *, engine: float = 0.0, tool: float = 0.0, attempt: int = 1) -> Span:
    return Span(
        stage=stage,
        attempt=attempt,
        started_at=NOW,
        queued_seconds=0.5,
        seconds=seconds,
        engine_seconds=engine,
        tool_seconds=tool,
    )


def rollout(state: RolloutState, *spans: Span, turns: int = 0, tokens: int = 0) -> Rollout:
    failed = state is RolloutState.FAILED
    error = ErrorInfo(code="x", boundary=Boundary.INFERENCE, message="x", retryable=False) if failed else None
    usage = Usage(turns=turns, sampled_tokens=tokens)
    return samples.rollout("r", state, error=error, usage=usage, spans=list(spans))


def test_sums_and_phases():
    done = rollout(
        RolloutState.COMPLETED,
        span(Stage.INIT, 1.0),
        span(Stage.ROLLOUT, 2.0, engine=1.5, tool=0.25),
        span(Stage.ROLLOUT, 4.0, engine=3.0, tool=2.0, attempt=2),
        span(Stage.EVALUATE, 0.75, engine=0.5),
        turns=3,
        tokens=40,
    )
    lost = rollout(RolloutState.FAILED, span(Stage.INIT, 2.0), turns=1, tokens=2)
    gone = rollout(RolloutState.CANCELLED)
    seconds = {"queued": 2.5, "init": 3.0, "engine": 4.5, "tool": 2.25, "rollout": 0.25, "evaluate": 0.75}
    assert group_figures([done, lost, gone]) == GroupFigures(3, 1, 4, 42, seconds)


def test_a_group_without_rollouts_has_nothing():
    figures = group_figures([])
    assert (figures.samples, figures.failed, sum(figures.seconds.values())) == (0, 0, 0.0)
