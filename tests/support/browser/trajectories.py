"""Trajectories to look at: made of tokens that a test chooses, and answered as the API answers."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from starlette.requests import Request

from api_schemas.rollouts import Rollout, RolloutState, Span, Stage, StopReason, Usage
from api_schemas.rollouts.steps import RolloutStep, RolloutSteps, StepKind
from api_schemas.rollouts.tokens import RolloutMessages, TokenRange
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, ToolCall, Trajectory
from api_schemas.views.summaries import RolloutSummary, SummaryPage
from rollout_service.server.trajectories import outline, token_range
from rollout_service.tokens.tokenizer import TokenBytes
from tests.support.browser.fake_service import FakeService

BEGAN = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)


_IDS: dict[bytes, int] = {}
"""The ids of all tokens that a test has made, in their order."""


@dataclass(frozen=True)
class Piece:
    """A token: its bytes, and what sampled it, if anything did."""

    content: bytes
    turn: int = -1
    logprob: float = -0.01
    version: int = 3

    @property
    def id(self) -> int:
        """An id that is the same for the same bytes."""
        return _IDS.setdefault(self.content, len(_IDS))


@dataclass
class CannedSegment:
    """A segment of a trajectory."""

    pieces: list[Piece]
    fork_reason: ForkReason = ForkReason.FIRST
    parent: int | None = None
    shared_prefix: int = 0

    def segment(self, *, entropy: bool) -> Segment:
        """Return it as the store has it."""
        marked = [(piece, piece.turn >= 0 and at >= self.shared_prefix) for at, piece in enumerate(self.pieces)]
        return Segment(
            token_ids=[piece.id for piece in self.pieces],
            loss_mask=[int(sampled) for _, sampled in marked],
            logprobs=[piece.logprob if sampled else 0.0 for piece, sampled in marked],
            versions=[piece.version if sampled else -1 for piece, sampled in marked],
            turn_ids=[piece.turn if sampled else -1 for piece, sampled in marked],
            fork_reason=self.fork_reason,
            parent=self.parent,
            shared_prefix=self.shared_prefix,
            top_logprobs=[[piece.logprob] if sampled else [] for piece, sampled in marked] if entropy else None,
        )


def words(text: str, turn: int = -1, *, version: int = 3) -> list[Piece]:
    """Return a text as tokens of about a word each."""
    found: list[bytes] = []
    for character in text:
        if found and character not in " \n" and len(found[-1]) < 9:
            found[-1] += character.encode()
        else:
            found.append(character.encode())
    return [
        Piece(content, turn, round(-(abs(math.sin(at * 1.7 + len(content))) ** 5) * 4.5 - 0.004, 4), version)
        for at, content in enumerate(found)
    ]


@dataclass
class CannedRollout:
    """A rollout with all that its page asks for."""

    rollout_id: str
    segments: list[CannedSegment]
    messages: list[Message] = field(default_factory=list)
    steps: list[RolloutStep] = field(default_factory=list)
    turns: int = 1
    reward: float | None = 1.0
    entropy: bool = True
    has_text: bool = True
    summary: RolloutSummary | None = None
    changes: dict[str, object] = field(default_factory=dict)

    def rollout(self) -> Rollout:
        """Return the rollout itself."""
        rollout = Rollout(
            rollout_id=self.rollout_id,
            state=RolloutState.COMPLETED,
            task=Task(environment="code"),
            pool="policy",
            attempt=1,
            reward=self.reward,
            reward_parts={"tests": self.reward or 0.0, "format": 0.25},
            stop_reason=StopReason.FINISHED,
            usage=Usage(
                turns=self.turns,
                prompt_tokens=sum(len(one.pieces) for one in self.segments) * 2,
                cached_tokens=sum(len(one.pieces) for one in self.segments),
                sampled_tokens=sum(piece.turn >= 0 for one in self.segments for piece in one.pieces),
                tool_calls=2,
            ),
            spans=spans(),
            created_at=BEGAN,
            finished_at=BEGAN + timedelta(seconds=19.5),
        )
        return rollout.model_copy(update=self.changes)

    def trajectory(self) -> Trajectory:
        """Return its trajectory as the store has it."""
        return Trajectory(
            segments=[one.segment(entropy=self.entropy) for one in self.segments],
            messages=self.messages,
            finish_reasons=[FinishReason.STOP] * self.turns,
            fork_counts={},
        )

    def serve(self, fake: FakeService) -> None:
        """Answer for it."""
        path, trajectory = f"/v1/rollouts/{self.rollout_id}", self.trajectory()

        def tokens(request: Request) -> TokenRange:
            query = request.query_params
            return self.tokens(trajectory, int(query["segment"]), int(query["start"]), int(query["count"]))

        fake.answer(f"GET {path}", self.rollout())
        fake.answer(f"GET {path}/outline", outline(trajectory, self.rollout_id, None, has_text=self.has_text))
        fake.handlers[f"GET {path}/tokens"] = tokens
        talk = {"messages": self.messages, "finish_reasons": trajectory.finish_reasons}
        fake.answer(f"GET {path}/messages", RolloutMessages(rollout_id=self.rollout_id, **talk))
        fake.answer(f"GET {path}/steps", RolloutSteps(rollout_id=self.rollout_id, steps=self.steps))
        fake.answer("GET /v1/summaries", SummaryPage(rows=[self.summary] if self.summary else []))

    def tokens(self, trajectory: Trajectory, index: int, start: int, count: int) -> TokenRange:
        """Return a range as the service answers with it: without text, if it knows no tokenizer."""
        table = TokenBytes(list(_IDS)) if self.has_text else None
        return token_range(trajectory.segments[index], index, start, count, table)


def spans() -> list[Span]:
    """Return the stages of an attempt of 19 seconds."""
    began = BEGAN + timedelta(seconds=1.5)
    return [
        Span(
            stage=Stage.INIT,
            attempt=1,
            started_at=began,
            queued_seconds=1.2,
            seconds=2.5,
            sandbox_seconds=2.0,
        ),
        Span(
            stage=Stage.ROLLOUT,
            attempt=1,
            started_at=began + timedelta(seconds=3.5),
            queued_seconds=1.0,
            seconds=11.0,
            engine_seconds=7.0,
            tool_seconds=3.0,
        ),
        Span(
            stage=Stage.EVALUATE,
            attempt=1,
            started_at=began + timedelta(seconds=15),
            queued_seconds=0.3,
            seconds=2.9,
        ),
    ]


def step(kind: StepKind, at: float, seconds: float, name: str = "", lane: str = "", **detail: str | int) -> RolloutStep:
    """Return a step that began `at` seconds after the rollout."""
    return RolloutStep(
        kind=kind,
        name=name,
        lane=lane,
        stage=Stage.ROLLOUT,
        attempt=1,
        started_at=BEGAN + timedelta(seconds=at),
        seconds=seconds,
        detail=dict(detail),
    )


def call(number: int, name: str = "bash", **arguments: str) -> ToolCall:
    """Return a tool call."""
    return ToolCall(
        id=f"call_{number}",
        name=name,
        arguments=dict(arguments),
        raw=f"<tool_call>{name} {arguments}</tool_call>",
    )


SYSTEM = "You are an engineer. Use the tools to mend the program, and call finish once its tests pass.\n"
TASK = "The test `test_parse` fails since the last release. Find the cause and mend it.\n"
THOUGHT = "The parser cuts the last character. First look at the file, then run the tests.\n"
ANSWER = "The slice ended one short; it is mended, and all 42 tests pass.\n"
RESULT = "".join(f"tests/test_parse.py::test_{name} PASSED\n" for name in ("empty", "one", "many", "nested", "bytes"))


def coding_rollout(rollout_id: str = "math-7.g12.s3", answer: str = ANSWER) -> CannedRollout:
    """Return a rollout of two turns, whose history was compacted between them."""
    prompt = words(f"<|system|>{SYSTEM}<|user|>{TASK}<|assistant|>")
    first = words(f"{THOUGHT}<tool_call>bash sed -n 1,40p parse.py</tool_call>", 0)
    result = words(f"<|tool|>{RESULT}<|assistant|>")
    second = words(f"{answer}<tool_call>finish</tool_call>", 1, version=4)
    compacted = words("<|summary|>The parser was mended.<|assistant|>")
    return CannedRollout(
        rollout_id,
        [
            CannedSegment(prompt + first),
            CannedSegment(prompt + compacted + result + second, ForkReason.COMPACTION, 0, len(prompt)),
        ],
        messages=[
            Message(role="system", content=SYSTEM),
            Message(role="user", content=TASK),
            Message(
                role="assistant",
                reasoning=THOUGHT,
                tool_calls=[call(0, command="sed -n 1,40p parse.py\npython -m pytest -q")],
            ),
            Message(role="tool", name="bash", tool_call_id="call_0", content=RESULT),
            Message(role="assistant", content=answer, tool_calls=[call(1, "finish", answer="done")]),
        ],
        steps=[
            step(StepKind.SANDBOX_START, 1.6, 1.4, "swe-base", sandbox="sb-1"),
            step(StepKind.SESSION, 3.0, 0.6, "bash"),
            step(
                StepKind.ENGINE,
                5.1,
                3.2,
                "b1",
                turn=0,
                segment=0,
                prompt_tokens=1200,
                cached_tokens=800,
                tokens=56,
                version=3,
                request="req-1",
            ),
            step(
                StepKind.TOOL,
                8.4,
                2.6,
                "bash",
                call="call_0",
                command="sed -n 1,40p parse.py",
                sandbox="sb-1",
            ),
            step(StepKind.POOL_QUEUE, 11.1, 0.8, "policy"),
            step(
                StepKind.ENGINE,
                12.0,
                3.6,
                "b2",
                turn=1,
                segment=1,
                prompt_tokens=1420,
                cached_tokens=1256,
                tokens=48,
                version=4,
                request="req-2",
            ),
            step(StepKind.GRADER, 16.6, 2.6, "code"),
        ],
        turns=2,
        summary=summary(rollout_id, run_id="math-7", group=12),
    )


def summary(rollout_id: str, **changes: object) -> RolloutSummary:
    """Return a row of a list."""
    row = RolloutSummary(
        rollout_id=rollout_id,
        state=RolloutState.COMPLETED,
        environment="code",
        pool="policy",
        attempt=1,
        reward=1.0,
        stop_reason=StopReason.FINISHED,
        created_at=BEGAN,
        changed_at=BEGAN + timedelta(seconds=19),
        turns=2,
        tokens=104,
        seconds=16.4,
    )
    return row.model_copy(update=changes)
