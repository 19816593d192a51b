"""`reasoning-gym`: puzzles that the library makes from a seed, scored by the library's own scorers.

Guarantees: the reward is the library's own, except for answers that are code (see `worker`), which score like nonsense.
An answer is scored in a fresh sandbox with limits of time and memory, since the library executes some. The library's
own failure fails the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from pydantic import Field, JsonValue

from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.bridges.process import source_of
from rollout_service.environments.bridges.reasoning_gym.generate import (
    LEFT_OUT,
    REASONING_GYM,
    TASKS,
    WORKER,
)
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from rollout_service.environments.dataset_files import InstanceFields, read_instance
from rollout_service.environments.libraries import Library
from rollout_service.episodes import Episode, EpisodeLimits, Score
from sandboxes import ExecResult

INSIDE: Final = "/opt/reasoning-gym"
CPU_SECONDS: Final = 20
"""The limit of one answer, with two seconds for imports; the slowest tasks take about ten to be made again."""
MEMORY_KILOBYTES: Final = 2 * 1024 * 1024
MAX_ANSWER_CHARS: Final = 65_536
ReadAnswer = Callable[[str | None], str | None]
_LIMITED: Final = 'ulimit -v "$1" && ulimit -t "$2" && shift 2 && exec "$@"'
_KILLED: Final = (137, 152)
"""Exit codes of a process that the kernel ended for its memory, or its CPU time."""
BEGIN, END = "<answer>", "</answer>"

SPEC = EnvironmentSpec(
    name="reasoning-gym",
    description="Puzzles of reasoning-gym, scored by its own scorers; `env install reasoning-gym` installs it.",
    image="base",
    system=(
        "Solve the task step by step. Write your final answer between <answer> and </answer>, in the form that the "
        "task asks for, and nothing else there."
    ),
    limits=EpisodeLimits(max_turns=1, max_tokens=8_192, max_turn_tokens=8_192, evaluate_seconds=240.0),
    sandbox=SandboxSettings(memory="2G", max_processes=64),
    evaluate_in=EvaluateIn.FRESH,
)


class ReasoningTask(InstanceFields):
    question: str
    task: str = Field(pattern=r"^[a-z0-9_]+$")
    module: str = Field(pattern=r"^reasoning_gym(\.[a-z0-9_]+)+$")
    seed: int
    size: int = Field(ge=1)
    index: int = Field(ge=0)
    config: dict[str, JsonValue] = {}


class ReasoningGym(AgentEnvironment):
    def __init__(
        self,
        library: Library = REASONING_GYM,
        cpu_seconds: int = CPU_SECONDS,
        *,
        spec: EnvironmentSpec = SPEC,
        read_answer: ReadAnswer | None = None,
    ) -> None:
        """`read_answer` finds the answer in the policy's last text."""
        self._library = library
        self._cpu_seconds = cpu_seconds
        self._read_answer = read_answer or final_answer
        binds = {INSIDE: str(library.packages)} if library.is_installed else {}
        super().__init__(spec.model_copy(update={"binds": binds}))

    def check(self, instance: dict[str, JsonValue]) -> None:
        self._library.python()
        _read(instance)
        super().check(instance)

    async def evaluate(self, episode: Episode) -> Score:
        task, answer = _read(episode.instance), self._read_answer(episode.answer)
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return Score(0.0, {"answered": float(answer is not None)})
        request = {"op": "score", **task.model_dump(mode="json"), "answer": answer}
        limits = [str(MEMORY_KILOBYTES), str(self._cpu_seconds)]
        program = ["python3", "-I", "-c", source_of(WORKER), INSIDE]
        result = await episode.require_sandbox().exec(
            ["bash", "-c", _LIMITED, "bash", *limits, *program],
            stdin=json.dumps(request).encode() + b"\n",
            env={"OPENBLAS_NUM_THREADS": "1"},
            timeout=0.9 * episode.limits.evaluate_seconds,
        )
        return read_score(result)

    def dataset(self) -> list[dict[str, JsonValue]]:
        return self._library.instances(TASKS)


def final_answer(text: str | None) -> str | None:
    """Return what the last pair of marks encloses, in time linear in the length."""
    text, found, at = text or "", None, 0
    while (begin := text.find(BEGIN, at)) >= 0 and (end := text.find(END, begin)) >= 0:
        found, at = text[begin + len(BEGIN) : end].strip(), end + len(END)
    return found


def read_score(result: ExecResult) -> Score:
    """
    Raises:
        EnvironmentFailedError: The library failed, and not because of the answer.
    """
    replies = [_reply(line) for line in result.stdout.splitlines()]
    last = replies[-1] if replies else {}
    is_ready = bool(replies) and replies[0].get("ready") is True
    if is_ready and isinstance(score := last.get("score"), int | float):
        refused, raised = float("refused" in last), float("raised" in last)
        return Score(float(score), {"answered": 1.0, "refused": refused, "raised": raised})
    if is_ready and result.exit_code in _KILLED:
        return Score(0.0, {"answered": 1.0, "too_costly": 1.0})
    end = result.stderr.decode(errors="replace").strip()[-500:]
    raise EnvironmentFailedError(
        f"reasoning-gym gave no score: {last.get('error') or end or 'it took too long'}",
        hint="The sandbox image needs a python3 of the same minor version as the service's.",
    )


def _reply(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


def _read(instance: dict[str, JsonValue]) -> ReasoningTask:
    task = read_instance(ReasoningTask, instance, hint="Make tasks with the module `generate` of this bridge.")
    if task.task in LEFT_OUT:
        message = f"the library's scorer of {task.task} gives full marks to wrong answers"
        raise InvalidFieldError.at("instance.task", message)
    return task


environment = ReasoningGym()
