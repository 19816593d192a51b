"""A reference trainer: DAPO on PyTorch, using only the service's HTTP API. Read `train`, and change it.

    python examples/train_calc.py --engine embedded              starts its own service and engine
    python examples/train_calc.py --engine sglang --weights group --max-staleness 2
    python examples/train_calc.py --url http://127.0.0.1:8080    uses yours, which must be on this machine
    python examples/train_calc.py --environment pointers --auxiliary annealed    teaches to hand on work

Guarantees: each batch is trained on exactly once, however often the trainer is killed. Started again with the same
`--out`, training continues where it was. `scripts/train` installs the requirements first.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import torch
from anyio.to_thread import run_sync
from trainer.checkpoint import Checkpoints, load_state
from trainer.control import shuffled
from trainer.curves import Curves, sub_agent_points
from trainer.dividing import ENVIRONMENTS, Dividing, advantages_of, division_of
from trainer.launch import BASE, ORCHESTRATOR, Plan, serving
from trainer.learner import Learner, Recipe
from trainer.policy import samples_of
from trainer.publish import DiskPublisher, GroupPublisher
from trainer.stages import StageClock

from api_schemas.rollouts import Rollout, RolloutRequest, Sampling, TokenExtras
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import Batch, DatasetTasks, FilterSpec, RunRequest
from api_schemas.tasks import Task
from rollout_client.client import ClientRun, ConflictError, InvalidRequestError, NotFoundError, RolloutClient

RUN = "train"
DATASET_LIMIT = 10_000
"""The most instances that the service returns at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """The tasks to train on, and when to stop."""

    environment: str
    steps: int
    minutes: float
    target: float
    """The mean reward of two consecutive batches' tasks at which training ends; above 1, it never ends for this."""
    group_size: int
    batch_size: int
    """The number of groups in a step."""
    max_staleness: int
    """How stale tokens may be. With 0, nothing is sampled while the trainer works; from 1 on, the two overlap."""
    evaluations: int
    """The number of rollouts of held-out tasks, before and after."""
    weights: str
    seed: int
    shuffle_rewards: bool
    """Whether to train on rewards that went to other samples: a control, in which nothing can be learned."""
    every_group: bool
    """Whether groups count in which all outcomes are equal: rewards for handing on work may differ in them."""
    dividing: Dividing
    """The rewards for handing on work."""


async def train(client: RolloutClient, order: Order, learner: Learner, saved: Checkpoints, curves: Curves) -> None:
    """Train until the order is complete.

    Each batch is leased, trained on, saved in a checkpoint, published and acknowledged, in this order. A kill between
    any two of these loses nothing.
    """
    began, last = time.monotonic(), saved.latest()
    publisher = await GroupPublisher.join(client) if order.weights == "group" else DiskPublisher(client)
    if last is not None:  # the engines may have started with other weights
        await publisher.publish(last.folder, learner.model, learner.steps)
    run = await client.create_run(run_request(order))
    await give_back(run, saved.held())
    kind = advantages_of(order.environment)
    stages, trained = StageClock(client.base_url), load_state(last)["batch"] if last else None
    async for batch in run.batches(arrays=True):
        saved.hold(batch.batch_id)
        if batch.batch_id != trained:  # otherwise its acknowledgment was late or missing
            busy = await stages.busy()
            arrays = shuffled(batch.arrays, order.seed, kind) if order.shuffle_rewards else batch.arrays
            watched = await run_sync(learner.step, samples_of(arrays))
            trained, minutes = batch.batch_id, (time.monotonic() - began) / 60
            point = {"step": learner.steps, "batch": batch.batch.number, "minutes": minutes}
            division = await sub_agents_of(run)
            curves.add({**point, **rewards_of(batch.batch), **watched, **busy, **division})
            last = saved.save(learner.model, learner.state() | {"batch": trained})
            await publisher.publish(last.folder, learner.model, learner.steps)
            show(curves)
        await batch.ack()
        if is_done(order, curves, time.monotonic() - began):
            await run.end()
            return


def run_request(order: Order) -> RunRequest:
    """Return a standing order for groups whose outcomes differ (DAPO's dynamic sampling), with their advantages."""
    return RunRequest(
        run_id=RUN,
        source=DatasetTasks(environment=order.environment, split="train", epochs=None, shuffle=True, seed=order.seed),
        group_size=order.group_size,
        batch_size=order.batch_size,
        max_staleness=order.max_staleness,
        prefetch_batches=min(order.max_staleness, 1),
        advantages=advantages_of(order.environment),
        auxiliary=order.dividing.order(),
        # The first filter distinguishes groups that all failed from groups that all succeeded.
        filters=[] if order.every_group else [FilterSpec(name="all_failed"), FilterSpec(name="zero_variance")],
    )


async def give_back(run: ClientRun, batch_id: str | None) -> None:
    """Give back the batch that a killed trainer held, so it comes again now instead of when its lease expires."""
    if batch_id is not None:
        with suppress(ConflictError, NotFoundError):  # it was acknowledged, or its lease expired
            await run.settle(batch_id, "nack")


def rewards_of(batch: Batch) -> dict[str, float]:
    """Return the mean reward of all tasks that were tried for a batch, and the share of groups that were kept.

    This is exact if rewards are 0 or 1, since the dropped groups were then all wrong or all right.
    """
    kept = [group.reward_mean for group in batch.groups if group.reward_mean is not None]
    failed, solved = batch.dropped.get("all_failed", 0), batch.dropped.get("zero_variance", 0)
    tried = len(kept) + failed + solved
    return {"reward": (sum(kept) + solved) / tried, "acceptance": len(kept) / tried}


async def sub_agents_of(run: ClientRun) -> dict[str, float]:
    """Return how the latest rollouts divided their work, those of dropped groups included; {} without sub-agents."""
    figures = (await run.view(parallel=True)).parallel
    return {} if figures is None or figures.recent is None else sub_agent_points(figures.recent)


def is_done(order: Order, curves: Curves, seconds: float) -> bool:
    recent = [point["reward"] for point in curves.points[-2:]]
    good = len(recent) == 2 and mean(recent) >= order.target
    return good or curves.points[-1]["step"] >= order.steps or seconds >= order.minutes * 60


async def evaluate(client: RolloutClient, order: Order, temperature: float = 1.0) -> list[Rollout]:
    """Return rollouts of held-out tasks; temperature 0 is greedy."""
    tasks = await client.dataset(order.environment, split="held_out", limit=DATASET_LIMIT)
    requests = [
        RolloutRequest(
            task=Task(environment=order.environment, instance=tasks[number % len(tasks)]),
            sampling=Sampling(temperature=temperature),
            exports=TokenExtras(nodes=NodeDetail.SUMMARY),
        )
        for number in range(order.evaluations)
    ]
    return [rollout async for rollout in client.run_all(requests)]


def reward_of(rollouts: list[Rollout]) -> float:
    """Return the mean reward; a failure of the service is not a zero."""
    return mean(rollout.reward for rollout in rollouts if rollout.reward is not None)


def show(curves: Curves) -> None:
    point = curves.points[-1]
    bar = "#" * round(40 * point["reward"])
    shown = ("entropy", "staleness", "logprob_gap", "acceptance", "critical_steps", "width", "minutes")
    rest = "  ".join(f"{name} {point[name]:.3g}" for name in shown if name in point)
    print(f"step {point['step']:3.0f}  reward {point['reward']:.3f} {bar:40}  {rest}", flush=True)


async def main(arguments: argparse.Namespace) -> None:
    dividing = Dividing(**{name: getattr(arguments, name) for name in Dividing.__slots__})
    fields = {name: getattr(arguments, name) for name in Order.__slots__ if name != "dividing"}
    order = Order(**fields, dividing=dividing)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="train-"))
    torch.set_num_threads(arguments.threads)
    saved = Checkpoints(out / "checkpoints", arguments.start)
    last = saved.latest()
    start = last.folder if last else arguments.start
    recipe = Recipe(
        arguments.learning_rate,
        horizon=arguments.horizon,
        epochs=arguments.epochs,
        updates=arguments.updates,
        discouragement=arguments.discouragement,
    )
    learner = Learner(start, recipe, seed=order.seed)
    if last is not None:
        learner.restore(load_state(last))
        print(f"going on after step {learner.steps}", flush=True)
    curves = Curves(out, after_steps=learner.steps)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        stack.callback(curves.close)
        if arguments.url:
            client = await stack.enter_async_context(RolloutClient(arguments.url))
        else:
            plan = Plan(
                arguments.engine,
                arguments.sandbox,
                arguments.workers,
                arguments.add_environment,
                arguments.plug_in,
                [f"frozen-1={arguments.frozen}"] if arguments.environment in ENVIRONMENTS else [],
            )
            client = await stack.enter_async_context(serving(plan, start, out / "service"))
        evaluates = order.evaluations > 0
        try:
            before = reward_of(await evaluate(client, order)) if evaluates and last is None else None
            if before is not None:
                print(f"held-out reward before: {before:.3f}", flush=True)
            training = time.monotonic()
            await train(client, order, learner, saved, curves)
        except* (ConflictError, InvalidRequestError) as errors:
            raise SystemExit(f"the service refused: {errors.exceptions[0]}") from None
        minutes = (time.monotonic() - training) / 60
        after = await evaluate(client, order) if evaluates else []
        greedy = reward_of(await evaluate(client, order, temperature=0.0)) if evaluates else None
    final = reward_of(after) if evaluates else None
    plots = await run_sync(curves.draw)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "final_reward": final,
        "final_greedy_reward": greedy,
        "minutes": minutes,
        "steps": learner.steps,
        "reward_before": before,
        "whole_minutes": (time.monotonic() - began) / 60,
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in spent),
        "rewards": [point["reward"] for point in curves.points],
        **{f"final_{name}": value for name, value in division_of(after).items()},
    }
    print(
        f"held-out reward after {learner.steps} steps, {minutes:.1f} min: {final}, greedy {greedy}; "
        f"plots: {plots[0].parent}"
    )
    if arguments.json:
        settings = {"engine": arguments.engine, **asdict(order), **asdict(recipe)}
        arguments.json.write_text(json.dumps({**figures, "settings": settings}, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    folders: dict[str, Any] = folder | {"action": "append", "default": []}
    add("--engine", choices=("embedded", "sglang"), default="embedded", help="what samples")
    add("--weights", choices=("disk", "group"), default="disk", help="how new weights get to the engine")
    add(
        "--max-staleness",
        type=int,
        default=0,
        metavar="ETA",
        help="versions a token may lie behind; 0: in turns",
    )
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--out", **folder, help="checkpoints, curves and the service's store; default a new folder")
    add("--environment", default="calc", help="its data set has the splits `train` and `held_out`")
    add("--add-environment", **folders, help="a folder to serve")
    add("--plug-in", **folders, help="environments in Python to serve")
    add("--start", **folder, help="the policy to begin with; default calc-base, or parl-base for pointers and split")
    add("--frozen", **folder, default=ORCHESTRATOR, help="the policy of the sub-agents; default parl-base")
    add(
        "--auxiliary",
        choices=("none", "annealed", "constant"),
        default="none",
        help="rewards for handing on work",
    )
    add(
        "--every-group",
        action="store_true",
        help="train on groups of equal outcomes too: no dynamic sampling",
    )
    add("--measure", choices=("count", "width"), default=Dividing().measure, help="what they measure")
    add("--lambda1", type=float, default=Dividing().lambda1, help="weight of handing on work")
    add("--lambda2", type=float, default=Dividing().lambda2, help="weight of work that is done")
    add("--anneal", type=int, default=Dividing().anneal, help="steps over which the two weights fall to 0")
    add("--steps", type=int, default=60, help="at most")
    add("--minutes", type=float, default=15.0, help="at most")
    add("--target", type=float, default=0.93, help="end at this reward of two batches; above 1: never")
    add("--group-size", type=int, default=8)
    add("--batch-size", type=int, default=16, help="groups of a step")
    add("--learning-rate", type=float, default=Recipe().learning_rate)
    add("--horizon", type=int, default=Recipe().horizon, help="steps over which the learning rate falls")
    add("--epochs", type=int, default=Recipe().epochs, help="how often a batch is gone through")
    add(
        "--shuffle-rewards",
        action="store_true",
        help="a control: give each sample the reward of another one of its batch",
    )
    add("--updates", type=int, default=Recipe().updates, help="optimizer steps of an epoch")
    add("--discouragement", type=float, default=Recipe().discouragement, help="weight of negative advantages")
    add("--evaluations", type=int, default=128, help="held-out rollouts before and after; 0 for none")
    add("--workers", type=int, default=8, help="agents at once")
    add("--sandbox", choices=("apptainer", "local"), default="apptainer", help="local isolates nothing")
    add("--threads", type=int, default=1, help="of torch")
    add("--url", help="a service that runs, in place of one of its own")
    arguments = parser.parse_args()
    if arguments.weights == "group" and arguments.engine == "embedded" and not arguments.url:
        parser.error("the embedded engine takes weights from folders only; --weights group needs --engine sglang")
    if arguments.start is None:
        arguments.start = ORCHESTRATOR if arguments.environment in ENVIRONMENTS else BASE
    return arguments


if __name__ == "__main__":
    anyio.run(main, parse())
