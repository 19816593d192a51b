"""Handmade rollouts for the adapters' tests, and a client that returns them."""

from datetime import UTC, datetime

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, StopReason
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_client.adapters.submit import RolloutSubmitter

TASK = Task(environment="calc", instance={"question": "2+2", "answer": 4})


def segment(ids: list[int], mask: list[int], *, parent: int | None = None, version: int = 3) -> Segment:
    """Make a segment whose logprobs identify the tokens: -0.7 for token 7. A gap in the mask ends a turn."""
    turns, turn = [], -1
    for position, sampled in enumerate(mask):
        if sampled and not (position and mask[position - 1]):
            turn += 1
        turns.append(turn if sampled else -1)
    return Segment(
        token_ids=ids,
        loss_mask=mask,
        logprobs=[-token / 10 if sampled else 0.0 for token, sampled in zip(ids, mask, strict=True)],
        versions=[version if sampled else -1 for sampled in mask],
        turn_ids=turns,
        fork_reason=ForkReason.FIRST if parent is None else ForkReason.COMPACTION,
        parent=parent,
    )


def rollout(
    *segments: Segment,
    reward: float | None = 1.0,
    state: RolloutState = RolloutState.COMPLETED,
    trajectory: bool = True,
    rollout_id: str = "r-1",
    stop_reason: StopReason = StopReason.ANSWERED,
) -> Rollout:
    """Make a rollout of these segments; a failed one says that its sandbox did not start."""
    failed = state is RolloutState.FAILED
    return Rollout(
        rollout_id=rollout_id,
        state=state,
        task=TASK,
        pool="policy",
        reward=reward,
        stop_reason=StopReason.ERROR if failed else stop_reason,
        error=ErrorInfo(
            code="sandbox_start_failed",
            boundary=Boundary.SANDBOX,
            message="no memory",
            hint="free some memory",
        )
        if failed
        else None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        trajectory=Trajectory(
            segments=list(segments),
            messages=[Message(role="user", content="2+2"), Message(role="assistant", content="4")],
            finish_reasons=[FinishReason.STOP],
            fork_counts={},
        )
        if trajectory
        else None,
    )


class FakeClient:
    """Answers requests with these rollouts, one after the other."""

    def __init__(self, *answers: Rollout) -> None:
        self.answers = list(answers)
        self.ordered: list[str | None] = []
        self.requests: list = []

    async def run(self, request) -> Rollout:
        self.ordered.append(request.rollout_id)
        self.requests.append(request)
        return self.answers.pop(0)

    def submitter(self, **given) -> RolloutSubmitter:
        """Return a submitter whose rollouts come from this client."""
        client = self

        class Here(RolloutSubmitter):
            async def run(self, request) -> Rollout:
                return await client.run(request)

        return Here(**given)
