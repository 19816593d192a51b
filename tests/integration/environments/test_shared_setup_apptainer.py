"""In real sandboxes, `[init] shared` runs once for the rollouts of an instance, and each has its files for itself."""

import anyio
import httpx
import pytest

from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from tests.support.processes.service import eventually, scripted_engine, service

pytestmark = pytest.mark.apptainer

TOML = """
name = "prepared"
image = "base"
[init]
command = "bash /environment/prepare.sh"
each = "bash /environment/each.sh"
shared = true
[evaluate]
command = "bash /environment/grade.sh"
"""
SCRIPTS = {
    "prepare.sh": """
set -e
python3 -c 'import json, os; print(json.load(open(os.environ["ROLLOUT_INSTANCE"]))["n"])' >number
head -c 8 /dev/urandom | od -An -tx8 >made
rm -r /usr/share/doc
mkdir -p /opt/tools && echo 'echo tool' >/opt/tools/tool && chmod +x /opt/tools/tool
(sleep 1000 >/dev/null 2>&1 &)
""",
    "each.sh": "echo each >>each; ls -d /tmp/.rollout-* | wc -l >folders",
    "grade.sh": """
test ! -e /usr/share/doc && echo '{"reward": 0}' >"$ROLLOUT_RESULT" && exit
[ "$(cat "$ROLLOUT_WORKDIR/mine" 2>/dev/null)" = 1 ] && r=1 || r=0
echo "{\\"reward\\": $r}" >"$ROLLOUT_RESULT"
""",
}
WORK = """cat number each folders made; /opt/tools/tool; pgrep sleep; ls /usr/share/doc
echo 1 >>mine; rm number; cat mine"""


@pytest.fixture
def environment(tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "environment.toml").write_text(TOML)
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    return load_folder(folder)


async def play_all(environment, sandboxes, instances, setups):
    """Play one trial for each instance at once; return the agents' outputs and the rewards."""
    found = {}

    async def one(number, instance):
        policy = ScriptedPolicy([turn("", call("bash", command=WORK)), "Done."])
        trial = await play(environment, instance, policy, sandboxes, setups=setups)
        found[number] = next(m.content for m in policy.messages if m.role == "tool"), trial.score.reward

    async with anyio.create_task_group() as tasks:
        for number, instance in enumerate(instances):
            tasks.start_soon(one, number, instance)
    return [found[number] for number in range(len(instances))]


async def test_a_group_starts_from_one_setup(environment, sandboxes):
    counts = []
    setups = SharedSetups(count=counts.append)
    instances = [{"question": "?", "n": n} for n in (1, 1, 1, 2)]
    async with setups.running():
        found = await play_all(environment, sandboxes, instances, setups)
    assert sorted(counts) == [False, False, True, True]
    made = set()
    for (output, reward), instance in zip(found, instances, strict=True):
        number, each, folders, random, *rest = output.splitlines()
        assert (number, each, folders) == (str(instance["n"]), "each", "1")
        assert rest[:1] == ["tool"]
        assert "No such file or directory" in rest[1]
        assert rest[2:] == ["1"]
        assert reward == 1.0
        made.add((instance["n"], random))
    assert len(made) == 2
    assert sandboxes.live() == []


async def test_without_sharing_each_rollout_prepares_for_itself(environment, sandboxes):
    instances = [{"question": "?", "n": 1}] * 2
    (one, _), (two, _) = await play_all(environment, sandboxes, instances, None)
    assert one.splitlines()[:3] == two.splitlines()[:3] == ["1", "each", "1"]
    assert one.splitlines()[3] != two.splitlines()[3]
    for output in (one, two):
        assert output.splitlines()[4:6] == [
            "tool",
            "ls: cannot access '/usr/share/doc': No such file or directory",
        ]


def test_a_service_prepares_a_group_once_and_says_so(environment, tmp_path):
    folder = str(tmp_path / "prepared")
    request = {"task": {"environment": "prepared", "instance": {"question": "?", "n": 1}}}
    with (
        scripted_engine(tmp_path, "Done.", delay=0.0) as engine,
        service(tmp_path, engine.url, "", "--environment", folder, sandbox="apptainer") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        ids = [http.post("/v1/rollouts", json=request).json()["rollout_id"] for _ in range(4)]
        for rollout_id in ids:
            eventually(lambda one=rollout_id: http.get(f"/v1/rollouts/{one}").json()["state"] == "completed", server)
        metrics = http.get("/metrics").text
    assert 'rollout_shared_setups_total{outcome="made"} 1.0' in metrics
    assert 'rollout_shared_setups_total{outcome="reused"} 3.0' in metrics
