"""Answers of a busy service, valid by the API's schema, for tests of pages that need no service."""

from datetime import UTC, datetime, timedelta

from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import (
    HoldView,
    NodeConcurrency,
    NodeState,
    NodeView,
    PressureView,
    SandboxCeiling,
    StageConcurrency,
    StageOverview,
)
from api_schemas.rollouts import RolloutState, Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.runs import RunState
from api_schemas.views.hangs import (
    HangFinding,
    HangReport,
    HangVerdict,
    OpenWait,
    RolloutActivity,
    StackFrame,
    UsualTimes,
)
from api_schemas.views.overview import (
    BackendOverview,
    Bottleneck,
    BottleneckKind,
    NextNode,
    Overview,
    RunOverview,
)
from api_schemas.views.summaries import ErrorGroup

GIB = 1 << 30


def now() -> datetime:
    return datetime.now(UTC)


def stages() -> list[StageOverview]:
    waits: list[dict[StepKind, int]] = [
        {StepKind.SANDBOX_START: 5, StepKind.HOST: 2, StepKind.SETUP: 1},
        {StepKind.ENGINE: 31, StepKind.TOOL: 12, StepKind.POOL_QUEUE: 4, StepKind.PLACE: 1},
        {StepKind.GRADER: 3},
    ]
    numbers = [(8, 8, 21, 32, 14.2), (48, 64, 0, 16, 312.0), (3, 16, 0, 64, 2.4)]
    return [
        StageOverview(
            stage=stage,
            working=working,
            workers=workers,
            waiting=waiting,
            places=places,
            oldest_seconds=oldest,
            waits_for=waits_for,
        )
        for stage, (working, workers, waiting, places, oldest), waits_for in zip(Stage, numbers, waits, strict=True)
    ]


def backend(number: int, state: BackendState = BackendState.READY, pool: str = "policy") -> BackendOverview:
    failed = state is BackendState.FAILED
    return BackendOverview(
        backend=BackendView(
            backend_id=f"b{number}",
            url=f"http://10.0.0.{number}:30000",
            pool=pool,
            state=state,
            model_path="/models/qwen3-8b",
            tokenizer_path="/models/qwen3-8b",
            weight_version=41 if failed else 42,
            context_length=32_768,
            in_flight=0 if failed else 12 + number,
            served=10_231 * number,
            failures=7 if failed else 0,
            last_error="the engine did not answer its probe within 5 s" if failed else None,
        ),
        cached_share=None if failed else 0.78 + number / 50,
        requests_per_second=0.0 if failed else 6.4 + number,
        tokens_per_second=0.0 if failed else 2_310.0 + 100 * number,
        p50_seconds=None if failed else 1.8 + number / 10,
    )


def node(name: str, *, held: bool = False, state: NodeState = NodeState.READY) -> NodeView:
    reason = "memory: 3.1 GiB available, 4.0 GiB kept free"
    return NodeView(
        node=name,
        state=state,
        address=f"http://{name}:8080",
        labels=["gpu"] if held else [],
        environments=["calc", "code", "swe"],
        images=["base", "swe-base"],
        rollouts=59,
        finished=12_840,
        places=120,
        silent_seconds=0.8,
        cpus=64,
        memory_bytes=256 * GIB,
        provider="apptainer",
        enforced=["memory", "processes", "disk"],
        live=64,
        in_use=58,
        warm=4,
        waiting=2 if held else 0,
        target=60,
        ceiling=96,
        holds=[HoldView(resource="memory", reason=reason)] if held else [],
        pressure=PressureView(
            load=41.5,
            cpu_percent=12.0,
            memory_percent=8.5 if held else 0.4,
            io_percent=1.2,
            memory_available_bytes=int(3.1 * GIB) if held else 180 * GIB,
            disk_free_bytes={"/var/lib/rollout": 812 * GIB},
            descriptors_free=900_000,
            processes_free=28_000,
        ),
        breaches={"memory": 3},
    )


def finding(number: int = 1, verdict: HangVerdict = HangVerdict.STUCK) -> HangFinding:
    engine = verdict is HangVerdict.STUCK
    return HangFinding(
        finding_id=f"f{number}",
        verdict=verdict,
        kind=StepKind.ENGINE if engine else StepKind.HOST,
        subject="http://10.0.0.3:30000" if engine else "node-b",
        stage=Stage.ROLLOUT if engine else Stage.INIT,
        environment="code",
        since=now() - timedelta(seconds=312),
        seconds=312.0,
        usual=UsualTimes(count=4_120, p50=1.9, p95=6.2, p99=11.8),
        responds=False if engine else None,
        rollouts=[f"r-stuck-{index}" for index in range(3)],
        count=14,
        message="14 rollouts wait for http://10.0.0.3:30000, which does not answer"
        if engine
        else "2 rollouts wait for a sandbox, since node-b is short of memory",
        hint="Their requests go to other engines in 48 s. Look at the engine's log, or drain it."
        if engine
        else "They go on once 4.0 GiB are free.",
        detail={"request": "req-8f2c"} if engine else {},
        stack=[
            StackFrame(file="rollout_service/pipeline/stage_runner.py", line=118, function="run", ours=True),
            StackFrame(file="rollout_service/engines/pool/calls.py", line=71, function="generate", ours=True),
            StackFrame(file="asyncio/locks.py", line=213, function="Event.wait"),
        ]
        if engine
        else [],
    )


def errors() -> list[ErrorGroup]:
    return [
        ErrorGroup(
            code="sandbox_out_of_memory",
            boundary="sandbox",
            stage="rollout",
            environment="swe",
            count=14,
            last_at=now() - timedelta(seconds=4),
            message="the sandbox reached its limit of 2.0 GiB of memory",
            hint="Raise `limits.memory_bytes` of the environment.",
            rollouts=["r-oom-1", "r-oom-2"],
        ),
        ErrorGroup(
            code="tool_timeout",
            boundary="tool",
            stage="rollout",
            environment="code",
            count=3,
            last_at=now() - timedelta(seconds=95),
            message="`pytest -x` did not end within 60 s",
            hint="",
            rollouts=["r-slow-1"],
        ),
    ]


def run(name: str = "math-grpo-7", state: RunState = RunState.RUNNING) -> RunOverview:
    return RunOverview(
        run_id=name,
        state=state,
        pool="policy",
        version=42,
        acceptance_rate=0.63,
        open_groups=9,
        ready_groups=5,
        acknowledged_groups=1_204,
        dropped={"all_equal": 310, "stale": 4},
        staleness=1.0,
    )


def overview() -> Overview:
    """Return the overview of a busy service with an engine that is down and a node that is short of memory."""
    return Overview(
        at=now(),
        version="0.1.0",
        node="node-a",
        uptime_seconds=86_400 * 2 + 4_000,
        last_event=8_120,
        ready=True,
        counts={
            RolloutState.QUEUED: 1_204,
            RolloutState.INIT: 29,
            RolloutState.ROLLOUT: 48,
            RolloutState.EVALUATE: 3,
            RolloutState.COMPLETED: 98_122,
            RolloutState.FAILED: 240,
            RolloutState.CANCELLED: 12,
        },
        finished_per_second=3.42,
        outcomes={"completed": 981, "sandbox_out_of_memory": 14, "tool_timeout": 3, "cancelled": 2},
        success_share=0.981,
        stages=stages(),
        nodes=[node("node-a"), node("node-b", held=True)],
        backends=[backend(1), backend(2), backend(3, BackendState.FAILED)],
        paused_pools=[],
        runs=[run(), run("code-dapo-2", RunState.PAUSED)],
        errors=errors(),
        findings=[finding(), finding(2, HangVerdict.HELD)],
        bottleneck=Bottleneck(
            kind=BottleneckKind.ENGINES,
            message="All 64 rollout workers are busy, and 73% of them wait for engines.",
            hint="Add engines.",
        ),
        next_node=NextNode(message="One more node would bring nothing: the engines are full; add engines."),
        sessions_open=2,
    )


def hang_report() -> HangReport:
    return HangReport(
        node="node-a",
        at=now(),
        working=80,
        loop_lag_seconds=0.012,
        findings=[finding(), finding(2, HangVerdict.HELD)],
    )


def concurrency() -> NodeConcurrency:
    stage = StageConcurrency(workers=8, queue=32, working=8)
    return NodeConcurrency(
        node="node-a",
        init=stage,
        rollout=StageConcurrency(workers=64, queue=16, working=48),
        evaluate=StageConcurrency(workers=16, queue=64, working=3),
        sandboxes=SandboxCeiling(ceiling=96, target=60, in_use=58, waiting=0),
    )


def activity(rollout_id: str = "r-stuck-0") -> RolloutActivity:
    since = now() - timedelta(seconds=312)
    wait = OpenWait(
        kind=StepKind.ENGINE,
        name="http://10.0.0.3:30000",
        stage=Stage.ROLLOUT,
        since=since,
        seconds=312.0,
        progress_seconds=312.0,
    )
    return RolloutActivity(
        rollout_id=rollout_id,
        node="node-a",
        environment="code",
        attempt=1,
        stage=Stage.ROLLOUT,
        since=since,
        waits=[wait],
        stack=finding().stack,
    )
