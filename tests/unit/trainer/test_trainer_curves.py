"""The trainer writes a curve without gaps or repeats, its plots, and files for TensorBoard."""

import struct
from pathlib import Path

import anyio
import pytest
from tensorboardX.proto.event_pb2 import Event
from trainer.curves import PLOTS, SUB_AGENTS, Curves, draw_multiples, read_points, sub_agent_points
from trainer.stages import StageClock

from api_schemas.rollouts.figures import ParallelFigures
from tests.support.web_server import web_server

pytestmark = pytest.mark.slow  # it imports matplotlib
POINT = {"reward": 0.5, "acceptance": 0.8, "staleness": 0.1, "entropy": 0.7, "logprob_gap": 1e-4}
PNG = b"\x89PNG\r\n\x1a\n"


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Return the scalars that TensorBoard reads: records of a length, its checksum, an event and its checksum."""
    found = []
    for file in sorted(folder.glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += size + 16
    return found


@pytest.fixture
def curves(tmp_path):
    made = Curves(tmp_path)
    yield made
    made.close()


def test_every_plot_is_drawn(curves):
    for step in range(1, 4):
        curves.add({"step": step, **POINT} | ({"busy_rollout": 3.0} if step > 1 else {}))
    files = curves.draw()
    assert {file.stem for file in files} == set(PLOTS)
    for file in files:
        assert file.read_bytes().startswith(PNG)
        assert file.stat().st_size > 5_000


def test_the_use_of_sub_agents_is_drawn_where_there_is_any(curves, tmp_path):
    figures = ParallelFigures(rollouts=8, perf=0.4, assigns_per_turn=0.0, critical_steps=7.0)
    assert sub_agent_points(figures) == {"perf": 0.4, "assigns_per_turn": 0.0, "critical_steps": 7.0}
    full = dict.fromkeys(SUB_AGENTS, 0.5)
    curves.add({"step": 1, **POINT, **sub_agent_points(figures)})
    curves.add({"step": 2, **POINT, **full})
    (file,) = [file for file in curves.draw() if file.stem == "sub_agents"]
    arms = dict.fromkeys(("none", "annealed", "never"), curves.points)
    for drawn in (file, draw_multiples(arms, ["perf", "width"], tmp_path / "arms.png")):
        assert drawn.read_bytes().startswith(PNG)
        assert drawn.stat().st_size > 10_000


def test_the_figures_are_written_for_tensorboard(curves):
    curves.add({"step": 1, "reward": 0.25})
    curves.add({"step": 2, "reward": 0.75})
    curves.close()
    assert scalars(curves.folder / "tensorboard") == [("reward", 1, 0.25), ("reward", 2, 0.75)]


def test_a_curve_continues_after_the_checkpoint(curves, tmp_path):
    for step in range(1, 5):
        curves.add({"step": step, "reward": step / 10})
    with (tmp_path / "curve.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed in the middle of a line
    again = Curves(tmp_path, after_steps=3)
    again.add({"step": 4, "reward": 0.9})
    again.close()
    points = read_points(tmp_path / "curve.jsonl")
    assert [point["step"] for point in points] == [1, 2, 3, 4]
    assert points[-1]["reward"] == 0.9


def test_the_stages_are_read_without_the_proxy_of_the_environment(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with web_server(lambda _: (200, {}, b'rollout_stage_seconds_sum{stage="init"} 2.0\n')) as address:
        clock = StageClock(f"http://{address}")
        assert (anyio.run(clock.busy), anyio.run(clock.busy)) == ({}, {"busy_init": 0.0})
