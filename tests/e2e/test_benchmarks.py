"""Every benchmark works: its smallest plan gives the figures that it documents, and nothing that it counts is lost."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandboxes.images.store import ImageStore

FOLDER = Path(__file__).parents[2] / "benchmarks"
OTHERS = {"common", "engine", "swe_instances"}
"""Modules in the folder that are no benchmarks."""
LOST_SHARE, MOST_LOST = 0.1, 0.5
"""The turns that may be sampled again, besides one of each rollout: a short turn ends while the last one is saved."""
DRAIN_AND_CLOSE_SECONDS = 1.0 + 3.0
SLACK_SECONDS = 1.0
"""Slack for a busy machine between a process's end and its parent's notice of it."""

pytestmark = pytest.mark.extended

Figures = Mapping[str, Any]
Check = Callable[[Figures, Mapping[str, Any]], None]
"""Asserts an invariant of a benchmark's figures and settings."""


def zero(*names: str) -> Check:
    """Return a check that these figures are 0."""

    def check(found: Figures, _: Mapping[str, Any]) -> None:
        assert {name: found[name] for name in names} == dict.fromkeys(names, 0)

    return check


def positive(*names: str) -> Check:
    """Return a check that these figures are greater than 0."""

    def check(found: Figures, _: Mapping[str, Any]) -> None:
        assert all((found[name] or 0) > 0 for name in names), {name: found[name] for name in names}

    return check


def most_turns_are_kept(found: Figures, _: Mapping[str, Any]) -> None:
    at_stake = found["turns_kept_of"]
    lost = at_stake * (1 - (found["turns_kept"] or 0))
    assert lost <= min(LOST_SHARE * at_stake + found["turns_kept_rollouts"], MOST_LOST * at_stake + 2)


def stops_in_time(found: Figures, _: Mapping[str, Any]) -> None:
    assert found["shutdown_seconds_max"] < DRAIN_AND_CLOSE_SECONDS + SLACK_SECONDS


def repairs_alone_are_rewarded(found: Figures, _: Mapping[str, Any]) -> None:
    assert (found["rollouts_rewarded"], found["rollouts_at_once"]) == (3, 4)


def images_share_layers(found: Figures, _: Mapping[str, Any]) -> None:
    """Each image file has all its layers; the cache of layers has each once."""
    assert found["images_mb"] > found["limit_images_mb"]
    assert found["layers"] == 1 + 2 + found["images"] * 2
    assert not [image for image in ImageStore().list() if image.name.startswith("image-")]


def agents_are_captured_whole(found: Figures, settings: Mapping[str, Any]) -> None:
    assert found["long_call_tokens"] > 90_000
    assert found["bridged_share"] > 0.8
    assert found["merge_factor"] > 2
    assert settings["replayed"]["codex"]["segments"] == 1


def sub_agents_run_at_once_and_in_turn(found: Figures, _: Mapping[str, Any]) -> None:
    assert found["branches_100_ok"] == 1
    assert found["fairness_max_min"] < 3
    assert found["width8_ratio"] < 2, "one after the other, 8 tasks take 8 times as long"


def the_model_goes_on(found: Figures, settings: Mapping[str, Any]) -> None:
    assert found["model_error"] == max(map(abs, settings["model_errors"].values()))
    assert found["redis_commands_per_rollout"] > found["requests_per_rollout_8"]
    assert [row["nodes"] for row in settings["model"]] == [16, 32, 64, 128, 256, 512, 1_000]
    assert settings["limits"][settings["first_bottleneck"]] == found["limit_nodes"]


@dataclass(frozen=True, slots=True)
class Case:
    """How a benchmark is run, and what must hold then."""

    parts: tuple[str, ...] = ()
    """The real parts that it needs."""
    checks: tuple[Check, ...] = ()
    flags: tuple[str, ...] = ()
    size: str = "smoke"
    gives_all: bool = True
    """Whether it gives all figures that its docstring has, with these flags."""


KILLED = (
    zero("lost", "failed", "torn", "duplicated", "left_on_frozen", "sandboxes_left"),
    positive("in_wave_min", "begun_again"),
)
CRASHED = (zero("lost", "failed", "duplicated"), positive("groups_acknowledged"))

UNBROKEN = (
    zero("lost", "failed", "duplicated", "leftovers"),
    positive("rollouts", "groups_acknowledged", "stored_before_retention"),
    most_turns_are_kept,
)

CASES: Mapping[str, tuple[Case, ...]] = {
    "asynchrony": (Case(("apptainer", "torch"), (positive("speedup"),)),),
    "budget": (Case((), (zero("over"), positive("turn", "rollout", "idle")), size="quick"),),
    "chaos": (
        Case(("redis",), UNBROKEN),
        Case(("redis", "seaweedfs"), UNBROKEN, ("--trajectories", "s3")),
        Case(("redis",), UNBROKEN, ("--shards", "2")),
    ),
    "crash": (Case((), CRASHED, ("--store", "sqlite")), Case(("redis",), CRASHED, ("--store", "redis"))),
    "dashboard": (Case(("browser",)), Case(("redis",), flags=("--store", "redis"), gives_all=False)),
    "environments": (Case(("apptainer", "swe"), (repairs_alone_are_rewarded, images_share_layers)),),
    "gateway": (Case((), (zero("lost_tokens", "invented_tokens"), agents_are_captured_whole), ("--peer", "none")),),
    "live": (Case((), (zero("lost", "duplicated", "inexact", "leftovers"), positive("delivered", "updates"))),),
    "neighbors": (Case(("apptainer",)),),
    "trainers": (Case(("apptainer", "trainers"), (zero("wrong_advantages", "wrong_rows"), positive("trainers"))),),
    "otel": (Case((), (zero("lost_spans"),)),),
    "parallel_agents": (
        Case(
            (),
            (
                sub_agents_run_at_once_and_in_turn,
                positive("cpu_ms_per_branch", "engine_ms_per_branch", "memory_kb_per_branch", "slots_busy_share"),
            ),
        ),
    ),
    # Its one round with `--smoke` kills at one random moment only, and no rollout may have begun again by then.
    "parallel_kill": (
        Case((), KILLED, ("--sandbox", "local"), size="quick"),
        Case(("apptainer",), KILLED, ("--sandbox", "apptainer"), size="quick"),
    ),
    "reclaim": (Case(("apptainer",), (zero("leftovers"),)),),
    "restarts": (
        Case(
            (),
            (
                zero("lost", "failed", "duplicated", "client_failures", "tracebacks"),
                positive("groups_acknowledged"),
                stops_in_time,
            ),
        ),
    ),
    "resume": (
        Case(
            ("redis", "apptainer"),
            (zero("resume_replayed_tools"), positive("rollouts", "pairs_sqlite", "pairs_redis")),
        ),
    ),
    "routing": (Case(("sglang",), flags=("--peer", "none")),),
    "sandboxes": (
        Case(("apptainer",), flags=("--peer", "none")),
        Case(
            ("apptainer", "docker"),
            (positive("docker_run_p50_ms", "docker_start_p50_s", "docker_parallel_sleep_s"),),
            ("--peer", "docker"),
        ),
    ),
    "scaling": (
        Case(
            ("redis",),
            (
                positive(
                    "efficiency_2",
                    "efficiency_4",
                    "efficiency_8",
                    "requests_per_rollout_8",
                    "redis_bytes_per_rollout",
                ),
                the_model_goes_on,
            ),
        ),
    ),
    "security": (Case(("apptainer",), (zero("broken"), positive("attacks"))),),
    "snapshots": (Case(("apptainer",), (zero("leftovers"), positive("children_seconds"))),),
    "store": (
        Case(("redis",), flags=("--store", "redis")),  # it begins with SQLite
        Case(("redis", "seaweedfs"), flags=("--store", "s3"), gives_all=False),
    ),
    "trace": (Case(("browser", "perfetto"), (positive("perfetto_seconds"),)),),
    "weights": (Case(("sglang",), (zero("lost_tokens", "duplicated_tokens"), positive("compared_tokens"))),),
}
"""The cases of benchmarks by their names; one that is not here is run without flags, and needs no real part."""


def cases() -> list[Any]:
    """Return the benchmarks in the folder with their cases, marked with the real parts that they need."""
    found = []
    for name in sorted({path.stem for path in FOLDER.glob("*.py")} - OTHERS):
        for case in CASES.get(name, (Case(),)):
            marks = [getattr(pytest.mark, part) for part in case.parts]
            if "sglang" in case.parts:  # one SGLang at a time: its scheduler spins on a core
                marks.append(pytest.mark.xdist_group("sglang"))
            found.append(pytest.param(name, case, id="-".join((name, *case.flags[1:])), marks=marks))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "case"), cases())
def test_a_benchmark_gives_its_figures(name, case, tmp_path):
    script, file = FOLDER / f"{name}.py", tmp_path / "figures.json"
    command = [sys.executable, str(script), f"--{case.size}", "--json", str(file), *case.flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2_000:] + result.stderr[-4_000:]
    document = json.loads(file.read_text())
    figures, settings = document["figures"], document["settings"]
    assert settings["size"] == case.size
    if case.gives_all:
        assert not [each for each in documented(script) if not any(map(each.search, figures))]
    for check in case.checks:
        check(figures, settings)


def documented(script: Path) -> Iterator[re.Pattern[str]]:
    """Yield patterns of the figures that the list in a benchmark's docstring begins its points with.

    `efficiency_N` stands for any number, `start_ms_*` and `tight_` for the figures that contain this.
    """
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    for point in re.findall(r"^- ((?:`\w[^`]*`(?:, |: ))+)", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", point):
            yield re.compile(name.replace("*", "").replace("_N", r"_\d+"))


def test_every_case_is_of_a_benchmark():
    assert set(CASES) <= {path.stem for path in FOLDER.glob("*.py")} - OTHERS
