"""Steps of training with real rollouts, each compared with an independent computation."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import anyio

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Segment
from rollout_client.adapters.samples import Sample, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, run_in_order, task_text
from rollout_client.client import RolloutClient
from rollout_client.sync import SyncRolloutClient

T = TypeVar("T")

LOGPROB_TOLERANCE = 1e-4
ADVANTAGE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Row:
    """A row of a trainer's batch without its padding; the lists have an entry for each token."""

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantages: list[float]
    """One for each token, as the trainer computed it; only those with mask 1 count."""


class Trainer(ABC):
    """A trainer's own code around its hook."""

    package: str
    """The distribution whose version is reported."""
    std_ddof = 1
    std_epsilon = 1e-6
    divides_by_std = True
    """How the trainer's configuration, as it is used here, normalizes the rewards of a group."""
    drops_failures: bool
    """Whether a rollout without a reward removes its group from the batch; otherwise it ends the step."""

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        """`policy` is the folder of the model, with its tokenizer."""
        self.submitter, self.policy, self.group = submitter, policy, group
        self.step = 1

    @abstractmethod
    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        """Run a group of rollouts for each task through the hook; return the trainer's batch with its advantages."""

    @abstractmethod
    def loss(self, logprobs: Sequence[Any]) -> Any:
        """Return the trainer's loss on the last batch; `logprobs` has a tensor per row, with an entry per token."""

    @abstractmethod
    def evaluate(self, tasks: Sequence[Task]) -> float:
        """Return the mean reward of one rollout for each task, as the trainer computes it in an evaluation."""


MakeTrainer = Callable[[RolloutSubmitter, str, int], Trainer]
"""Makes a trainer with a submitter, the model's folder and the size of groups."""


@dataclass(frozen=True, eq=False)
class Recorder(RolloutSubmitter):
    """Keeps the rollouts that a trainer gets; the first of several turns comes in two segments."""

    given: list[Rollout] = field(default_factory=list)
    splits: list[Rollout] = field(default_factory=list)
    """The rollouts that came in two segments, as they were in one."""
    failing: Task | None = None
    """The task whose rollouts are cancelled before they begin, so that they have no reward."""

    async def run(self, request: RolloutRequest) -> Rollout:
        if request.task == self.failing:
            async with RolloutClient(self.url, self.key) as client:
                await client.cancel(str(request.rollout_id))
        rollout = await super().run(request)
        if not self.splits and (split := in_two_segments(rollout)) is not None:
            self.splits.append(rollout)
            rollout = split
        self.given.append(rollout)
        return rollout

    def run_all_blocking(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return run_together(self, [partial(self.run, request) for request in requests])


def in_two_segments(rollout: Rollout) -> Rollout | None:
    """Return a rollout of several turns as if its first turn had been a segment of its own; None for others."""
    if rollout.trajectory is None or len(rollout.trajectory.segments) != 1 or rollout.reward is None:
        return None
    whole = rollout.trajectory.segments[0]
    turns = sorted({turn for turn in whole.turn_ids if turn >= 0})
    if len(turns) < 2:
        return None
    end = len(whole.turn_ids) - whole.turn_ids[::-1].index(turns[0])

    def without_first(values: list[Any], nothing: Any) -> list[Any]:
        return [nothing] * end + values[end:]

    lists = ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids")
    first = {name: getattr(whole, name)[:end] for name in lists}
    rest = Segment(
        token_ids=whole.token_ids,
        loss_mask=without_first(whole.loss_mask, 0),
        logprobs=without_first(whole.logprobs, 0.0),
        versions=without_first(whole.versions, -1),
        turn_ids=without_first(whole.turn_ids, -1),
        fork_reason=ForkReason.BRIDGE_REFUSED,
        parent=0,
    )
    segments = [whole.model_copy(update=first), rest]
    return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update={"segments": segments})})


@dataclass
class Step:
    """A step of training, and how far the trainer and the service agree."""

    step: int
    reward: float
    rows: int
    segments: int
    """The most segments of a rollout."""
    sampled_tokens: int
    max_logprob_diff: float
    """The largest difference between the engine and the trainer's weights at a sampled token."""
    wrong_rows: int
    """Rows that no rollout has, or with another mask or other log-probabilities."""
    wrong_advantages: int
    versions: list[int]
    version: int = 0
    """The version that the service was given last, which all tokens should have."""
    loss: float = 0.0
    seconds: float = 0.0


@dataclass
class Report:
    trainer: str
    version: str
    steps: list[Step]
    failure: str
    """The fate of a group with a rollout without a reward."""
    evaluation_reward: float
    problems: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {
            "max_logprob_diff": max(step.max_logprob_diff for step in self.steps),
            "wrong_advantages": sum(step.wrong_advantages for step in self.steps),
            "reward_before": self.steps[0].reward,
            "reward_after": self.steps[-1].reward,
        }


@dataclass(frozen=True)
class Plan:
    tasks: list[Task]
    steps: int = 2
    group: int = 4
    learning_rate: float = 3e-4
    pool: str = "policy"
    weights: str | None = None
    """A folder that the engines can read; a temporary one by default."""


class Policy:
    """A copy of the served model in torch, which is trained, and whose weights the engines get."""

    def __init__(self, client: SyncRolloutClient, folder: str, plan: Plan) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.client, self.pool, self.folder = client, plan.pool, Path(folder)
        self.served = next(one for one in client.backends() if one.pool == plan.pool)
        self.version = self.served.weight_version
        self.model = AutoModelForCausalLM.from_pretrained(self.served.model_path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(self.served.tokenizer_path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.learning_rate)

    def train(self, loss: Any, name: str) -> None:
        import torch

        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        self._push(str(self.folder / name))

    def restore(self) -> None:
        """Give the engines the weights that they had before, as a new version."""
        if self.version > self.served.weight_version:
            self._push(self.served.model_path)

    def _push(self, folder: str) -> None:
        self.version += 1
        self.client.update_weights(folder, self.version, pool=self.pool)


def run(make: MakeTrainer, submitter: RolloutSubmitter, plan: Plan, say: Callable[[str], None]) -> Report:
    with (
        SyncRolloutClient(submitter.url, submitter.key) as client,
        tempfile.TemporaryDirectory() as temporary,
    ):
        policy = Policy(client, plan.weights or temporary, plan)
        path = policy.served.model_path
        try:
            steps = []
            for number in range(1, plan.steps + 1):
                steps.append(_train(make, submitter, plan, policy, number))
                say(_line(steps[-1]))
            failing = _recorder(submitter, failing=plan.tasks[1])
            failure = _fail(make(failing, path, plan.group), plan)
            say(f"a rollout without a reward: {failure}")
            recorder = _recorder(submitter)
            trainer = make(recorder, path, 1)
            evaluation = trainer.evaluate(plan.tasks)
        finally:
            policy.restore()
    report = Report(trainer.package, _version(trainer.package), steps, failure, evaluation)
    report.problems += [problem for step in steps for problem in _problems(step)]
    expected = statistics.fmean(one.reward for one in recorder.given if one.reward is not None)
    if _differ(evaluation, expected) > ADVANTAGE_TOLERANCE:
        report.problems.append(f"the evaluation gave {evaluation:.4f}, but the mean reward is {expected:.4f}")
    return report


def _train(make: MakeTrainer, submitter: RolloutSubmitter, plan: Plan, policy: Policy, number: int) -> Step:
    began = time.monotonic()
    recorder = _recorder(submitter)
    trainer = make(recorder, policy.served.model_path, plan.group)
    trainer.step = number
    rows = trainer.collect(plan.tasks)
    logprobs = _logprobs(policy.model, rows)
    loss = trainer.loss(logprobs)
    step = _compare(number, trainer, recorder, rows, logprobs)
    step.loss, step.version = float(loss), policy.version
    policy.train(loss, f"step-{number}")
    step.seconds = time.monotonic() - began
    return step


def run_together(submitter: RolloutSubmitter, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run calls at once in an event loop, and close the submitter's connections."""

    async def main() -> list[T]:
        try:
            return await run_in_order(calls)
        finally:
            await submitter.aclose()

    return anyio.run(main)


def _recorder(submitter: RolloutSubmitter, failing: Task | None = None) -> Recorder:
    return Recorder(
        submitter.url,
        submitter.key,
        pool=submitter.pool,
        limits=submitter.limits,
        retries=submitter.retries,
        failing=failing,
    )


def _fail(trainer: Trainer, plan: Plan) -> str:
    """Return the fate of a group whose rollouts get no reward, next to another group."""
    try:
        rows = trainer.collect(plan.tasks[:2])
    except Exception as error:
        if trainer.drops_failures:
            raise
        return f"ends the step with {type(error).__name__}"
    if not trainer.drops_failures:
        raise AssertionError("the trainer went on with a rollout that has no reward")
    return f"drops its group; {len(rows)} rows of the other one are left"


def _logprobs(model: Any, rows: Sequence[Row]) -> list[Any]:
    """Return the log-probability of each token of each row; 0 for the first one of a row."""
    import torch

    length = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        attention[number, : len(row.token_ids)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
    later = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    whole = torch.cat([torch.zeros(len(rows), 1), later], dim=1)
    return [whole[number, : len(row.token_ids)] for number, row in enumerate(rows)]


def _compare(number: int, trainer: Trainer, recorder: Recorder, rows: Sequence[Row], logprobs: Sequence[Any]) -> Step:
    """Compare a trainer's batch with its rollouts, and with the same model in torch."""
    samples: dict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for rollout in [*recorder.given, *recorder.splits]:  # a trainer may join segments that extend each other
        for one in samples_of(rollout):
            samples[tuple(one.token_ids)].append(one)
    advantages = _advantages(recorder.given, trainer)
    diffs, wrong_rows, wrong_advantages = [0.0], 0, 0
    for row, ours in zip(rows, logprobs, strict=True):
        sampled = [position for position, mask in enumerate(row.mask) if mask]
        diffs += [_differ(float(ours[position]), row.logprobs[position]) for position in sampled]
        same = [sample for sample in samples[tuple(row.token_ids)] if _is_equal(row, sample)]
        if not same:
            wrong_rows += 1
            continue
        right = advantages.get(same[0].rollout_id, math.nan)  # none without a reward, so nothing is right
        wrong_advantages += any(_differ(row.advantages[position], right) > ADVANTAGE_TOLERANCE for position in sampled)
    scored = [one for one in recorder.given if one.reward is not None]
    return Step(
        step=number,
        reward=statistics.fmean(one.reward for one in scored if one.reward is not None),
        rows=len(rows),
        segments=max(len(samples_of(one)) for one in scored),
        sampled_tokens=sum(sum(row.mask) for row in rows),
        max_logprob_diff=max(diffs),
        wrong_rows=wrong_rows,
        wrong_advantages=wrong_advantages,
        versions=sorted({one for each in samples.values() for sample in each for one in sample.versions if one >= 0}),
    )


def _differ(one: float, other: float) -> float:
    """Return by how much two numbers differ; NaN, which no comparison finds, differs from all by infinity."""
    found = abs(one - other)
    return math.inf if math.isnan(found) else found


def _is_equal(row: Row, sample: Sample) -> bool:
    prompt = [0] * len(sample.prompt_ids)
    mask = prompt + sample.response_mask
    theirs = [value for value, sampled in zip(row.logprobs, row.mask, strict=True) if sampled]
    ours = [value for value, sampled in zip(sample.logprobs, sample.response_mask, strict=True) if sampled]
    return row.mask == mask and all(abs(one - other) < 1e-6 for one, other in zip(theirs, ours, strict=True))


def _advantages(rollouts: Sequence[Rollout], trainer: Trainer) -> dict[str, float]:
    """Normalize rewards in the group of their task, each rollout counting once."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for one in rollouts:
        if one.reward is not None:
            groups[task_text(one.task)][one.rollout_id] = one.reward
    advantages: dict[str, float] = {}
    for group in groups.values():
        mean = statistics.fmean(group.values())
        squares = sum((one - mean) ** 2 for one in group.values())
        deviation = (squares / max(1, len(group) - trainer.std_ddof)) ** 0.5 + trainer.std_epsilon
        scale = deviation if trainer.divides_by_std else 1.0
        advantages |= {name: (reward - mean) / scale for name, reward in group.items()}
    return advantages


def _problems(step: Step) -> list[str]:
    found = []
    if step.max_logprob_diff > LOGPROB_TOLERANCE:
        found.append(f"step {step.step}: log-probabilities differ by {step.max_logprob_diff:.2g}")
    if step.versions != [step.version]:
        found.append(f"step {step.step}: tokens have versions {step.versions}, and not {step.version}")
    if step.wrong_rows:
        found.append(f"step {step.step}: {step.wrong_rows} of {step.rows} rows are not those of a rollout")
    if step.wrong_advantages:
        found.append(f"step {step.step}: {step.wrong_advantages} of {step.rows} rows have wrong advantages")
    return found


def _line(step: Step) -> str:
    return (
        f"step {step.step}: reward {step.reward:.3f}, {step.rows} rows, {step.sampled_tokens} sampled tokens, "
        f"version {step.versions}, logprobs differ by at most {step.max_logprob_diff:.1e}, "
        f"{step.wrong_advantages} wrong advantages"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
