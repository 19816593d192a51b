"""A policy that learns from its users while it serves them: scripted users and judge, and the reference trainer.

    python examples/live_demo.py --json demo.json      every arm, some minutes on two cores
    python examples/live_demo.py --arms binary         one of them

Users ask short questions through live sessions, with OpenAI's own client. They want right answers that end with `=`,
which the policy gives one time in five, and tell nobody but by what they say next: thanks, or a complaint. A judge
reads that, and a trainer learns from it, batch by batch, while the users go on.

Arms: `binary` learns from values, less what is usual; `shuffled` from values that went to other turns, which must teach
nothing; `hints` from hints in hindsight alone, with the policy itself as the teacher; `combined` from values and hints.
Before and after, users who agree to no training are asked the same questions, to see how many answers satisfy them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import anyio
import torch
from anyio.to_thread import run_sync
from trainer.checkpoint import Checkpoints
from trainer.curves import draw_multiples
from trainer.learner import Learner, Recipe
from trainer.live.judge import judging
from trainer.live.losses import BINARY, COMBINED, DISTILLATION, LiveLoss, Weights
from trainer.live.turns import turns_of
from trainer.live.users import Exchange, Pace, keep_talking, satisfaction
from trainer.publish import DiskPublisher

from api_schemas.inference import BackendSpec
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from rollout_client import RolloutClient
from rollout_client.client import ClientRun
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder

POLICY = policy_folder("live-base")
ARMS: Mapping[str, Weights] = {
    "binary": BINARY,
    "shuffled": replace(BINARY, shuffle=True),
    "hints": DISTILLATION,
    "combined": COMBINED,
}
DEFAULT_ARMS = ("binary", "shuffled", "hints")
RECIPE = Recipe(learning_rate=2e-4, warm_up=1, horizon=10**6, updates=1, discouragement=1.0)
SETTINGS = """\
[live.judge]
votes = 1
temperature = 0.0
hints = true
"""
GOOD = 0.97
"""Training ends early once this share of users was satisfied over the last five updates."""
DRAWN = ("satisfied", "staleness", "entropy")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train, and who talks."""

    updates: int
    minutes: float
    users: int
    sessions: int
    """The sessions of a batch."""
    guests: int
    """The sessions that are asked for their satisfaction, before and after, with each user."""
    seed: int
    served_teacher: bool = False
    """Whether the service asks its own engine what a teacher with the hint says, in place of the trainer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    start: Sequence[Exchange]
    final: Sequence[Exchange]
    points: Sequence[Mapping[str, float]]
    minutes: float
    counts: Mapping[str, float]

    def figures(self) -> dict[str, object]:
        """Return what is printed and written."""
        return {
            "start_satisfied": mean(each.satisfied for each in self.start),
            "final_satisfied": mean(each.satisfied for each in self.final),
            "start_right": mean(each.right for each in self.start),
            "final_right": mean(each.right for each in self.final),
            "updates": len(self.points),
            "minutes": self.minutes,
            "turns": self.counts,
            "satisfied": [point["satisfied"] for point in self.points],
        }


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[RolloutClient]:
    """Run a service with an engine for the policy and one for the judge."""
    await anyio.Path(folder).mkdir(parents=True)
    config = folder / "rollout.toml"
    await anyio.Path(config).write_text(SETTINGS)
    flags = ["--config", str(config), "--model", str(POLICY), "--sandbox", "local", "--log-level", "warning"]
    async with judging(POLICY) as judge, running_server(folder / "service", flags) as client:
        await client.add_backend(BackendSpec(url=judge, pool="judge"))  # type: ignore[arg-type]
        yield client


async def run_arm(name: str, plan: Plan, folder: Path) -> Outcome:
    """Train with one kind of loss, from the same start, and return what became of it."""
    learner = Learner(POLICY, RECIPE, seed=plan.seed)
    async with serving(folder) as client:
        start = await satisfaction(client, plan.users, plan.guests, plan.seed)
        run, pace = await client.create_run(run_request(plan)), Pace(ahead=2 * plan.sessions)
        began = time.monotonic()
        async with anyio.create_task_group() as users:
            for number in range(plan.users):
                seed = 1_000 * plan.seed + number
                users.start_soon(keep_talking, client, f"user-{number}", seed, pace)
            loss = LiveLoss(ARMS[name])
            points = await train(client, run, learner, loss, pace, plan, Checkpoints(folder, POLICY))
            users.cancel_scope.cancel()
        minutes = (time.monotonic() - began) / 60
        await run.end()
        final = await satisfaction(client, plan.users, plan.guests, plan.seed + 1)
        page = await client.session_page(limit=1)
    return Outcome(start, final, points, minutes, page.counts.model_dump(mode="json"))


def run_request(plan: Plan) -> RunRequest:
    """Return an order for parts of sessions: each is a group of one, and scripted users may fill a batch alone."""
    return RunRequest(
        run_id="live",
        source=InlineTasks(tasks=[], open=True),
        live=LiveDelivery(close_turns=100, max_user_share=1.0, max_session_share=1.0, teacher=plan.served_teacher),
        group_size=1,
        batch_size=plan.sessions,
        filters=[],
    )


async def train(
    client: RolloutClient,
    run: ClientRun,
    learner: Learner,
    loss: LiveLoss,
    pace: Pace,
    plan: Plan,
    saved: Checkpoints,
) -> list[dict[str, float]]:
    """Learn from batches until there were enough updates; return the figures of each."""
    began, publisher, points = time.monotonic(), DiskPublisher(client), []
    async for batch in run.batches(arrays=True):
        if batch.arrays is None:
            raise TypeError("the batch came without arrays")
        samples = await run_sync(loss.samples, batch.arrays, learner.model)
        watched = await run_sync(learner.step, samples)
        last = saved.save(learner.model, learner.state() | loss.means.state())
        await publisher.publish(last.folder, learner.model, learner.steps)
        await batch.ack()
        pace.train(len(batch.groups))
        values = [turn.mark.value for turn in turns_of(batch.arrays) if turn.mark.value is not None]
        minutes = (time.monotonic() - began) / 60
        points.append(
            {
                **watched,
                "step": float(learner.steps),
                "satisfied": mean(value > 0 for value in values) if values else 0.0,
                "turns": float(len(values)),
                "minutes": minutes,
            }
        )
        show(points[-1])
        if is_done(points, plan):
            break
    return points


def is_done(points: Sequence[Mapping[str, float]], plan: Plan) -> bool:
    recent = [point["satisfied"] for point in points[-5:]]
    good = len(recent) == 5 and mean(recent) >= GOOD
    return good or len(points) >= plan.updates or points[-1]["minutes"] >= plan.minutes


def show(point: Mapping[str, float]) -> None:
    bar = "#" * round(40 * point["satisfied"])
    rest = "  ".join(f"{name} {point[name]:.3g}" for name in ("turns", "staleness", "minutes") if name in point)
    print(f"update {point['step']:3.0f}  satisfied {point['satisfied']:.2f} {bar:40}  {rest}", flush=True)


def summary(outcomes: Mapping[str, Outcome]) -> dict[str, object]:
    """Return the figures of the first arm, with the satisfaction that the others end with, and all figures by arm."""
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    first = next(iter(figures.values()))
    found = {name: first[name] for name in ("start_satisfied", "final_satisfied", "updates", "minutes")}
    for name, others in list(figures.items())[1:]:
        found[f"{name}_satisfied"] = others["final_satisfied"]
    return {**found, "arms": figures}


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    plan = Plan(**{name: getattr(options, name) for name in Plan.__slots__})
    out = options.out or Path(tempfile.mkdtemp(prefix="live-demo-"))
    outcomes = {}
    for arm in options.arms:
        print(f"==> {arm}", flush=True)
        outcomes[arm] = await run_arm(arm, plan, out / arm)
        figures = outcomes[arm].figures()
        print(f"satisfied before {figures['start_satisfied']:.2f}, after {figures['final_satisfied']:.2f}")
    plot = draw_multiples({arm: each.points for arm, each in outcomes.items()}, DRAWN, out / "live_demo.png")
    found = summary(outcomes)
    print(f"curves: {plot}")
    print(json.dumps({name: value for name, value in found.items() if name != "arms"}))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", type=lambda text: text.split(","), default=list(DEFAULT_ARMS), help=f"of {', '.join(ARMS)}")
    add("--updates", type=int, default=60, help="of each arm, at most")
    add("--minutes", type=float, default=15.0, help="of each arm, at most")
    add("--users", type=int, default=4, help="who talk at the same time")
    add("--sessions", type=int, default=4, help="of a batch")
    add("--guests", type=int, default=10, help="sessions of each user before and after, without training")
    add("--seed", type=int, default=0)
    add("--served-teacher", action="store_true", help="let the service's engine be the teacher of hints")
    add("--quick", action="store_true", help="two updates of the first arm, to see that everything works")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="checkpoints, curves and the service's store; default a new folder",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    if unknown := set(options.arms) - ARMS.keys():
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if options.quick:
        options.arms, options.updates, options.guests = options.arms[:1], 2, 1
    return options


if __name__ == "__main__":
    anyio.run(main, parse())
