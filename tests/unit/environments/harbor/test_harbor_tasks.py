"""Folders of Harbor's tasks as environments: found, described, and refused where this service cannot do them."""

import json
import math
import shutil
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.declarative.files import PackedFile
from rollout_service.environments.harbor import verifier
from rollout_service.environments.harbor.collection import load_harbor
from rollout_service.environments.harbor.verifier import (
    RewardEmptyError,
    RewardInvalidError,
    TestsNeverRanError,
    Verifier,
    combine,
    is_below,
    main_reward,
    parse_json,
    parse_text,
)
from rollout_service.environments.registry import EnvironmentRegistry, load_path
from rollout_service.settings.pipeline import HarborSettings
from sandboxes import ExecResult

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"
TOML = '[environment]\ndocker_image = "base"\n'
MCP = TOML + '[[environment.mcp_servers]]\nname = "x"\n'


def make(folder: Path, toml: str = TOML, *, steps: tuple[str, ...] = ()) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "tests/test.sh").write_text("#!/bin/bash\n")
    for step in steps:
        (folder / "steps" / step).mkdir(parents=True)
        (folder / "steps" / step / "instruction.md").write_text(f"Do {step}.")
    return folder


def spec(folder: Path, **settings):
    return load_harbor(folder, HarborSettings(**settings)).for_instance({"task": folder.name}).spec


def test_a_folder_of_tasks_is_an_environment_and_harbor_has_them_all(tmp_path):
    make(tmp_path / "set/one")
    make(tmp_path / "set/group/two")
    make(tmp_path / "single")
    registry = EnvironmentRegistry.load([tmp_path / "set", tmp_path / "single"], plugins=[])
    assert registry.problems == {}
    assert [one.spec.name for one in registry.list()] == ["harbor", "set", "single"]
    assert registry.get("set").dataset() == [{"task": "group/two"}, {"task": "one"}]
    assert registry.get("harbor").dataset() == [{"task": "group/two"}, {"task": "one"}, {"task": "single"}]
    assert registry.get("single").for_instance({"task": "single"}).spec.name == "single"


def test_tasks_of_the_same_name_are_told_apart_by_their_folder(tmp_path):
    make(tmp_path / "a/x")
    make(tmp_path / "b/x")
    registry = EnvironmentRegistry.load([tmp_path / "a", tmp_path / "b"], plugins=[])
    assert registry.get("harbor").dataset() == [{"task": "a/x"}, {"task": "b/x"}]


@pytest.mark.parametrize("task", ["../secret", "/etc", "{folder}", "", None, 5, ["one"]])
def test_an_instance_names_a_loaded_task_and_no_other_path(tmp_path, task):
    make(tmp_path / "set/one")
    make(tmp_path / "secret")
    environment = load_path(tmp_path / "set")
    named = str(tmp_path / "secret") if task == "{folder}" else task
    with pytest.raises(InvalidFieldError, match=r"^instance\.task: ") as caught:
        environment.check({"task": named})
    assert caught.value.fields[0].path == "instance.task"


def test_a_task_that_cannot_be_used_does_not_hide_the_others(tmp_path):
    make(tmp_path / "set/good")
    make(tmp_path / "set/bad", TOML + "gpus = 1\n")
    environment = load_path(tmp_path / "set")
    assert environment.dataset() == [{"task": "good"}]
    assert "environment.gpus: sandboxes have no GPU" in environment.findings()[0]
    with pytest.raises(InvalidFieldError, match=r"cannot be used: .*environment\.gpus"):
        environment.check({"task": "bad"})


def test_a_script_with_windows_line_endings_is_found_without_running_it(tmp_path):
    folder = make(tmp_path / "set/one")
    (folder / "solution").mkdir()
    (folder / "solution/solve.sh").write_bytes(b"#!/bin/bash\r\ntrue\r\n")
    (folder / "tests/table.csv").write_bytes(b"a,b\r\n")
    [finding] = load_path(tmp_path / "set").findings()
    assert finding.startswith("one: solution/solve.sh: it has Windows line endings")
    assert "dos2unix" in finding


def test_settings_of_a_task_become_those_of_its_sandboxes(tmp_path):
    toml = (
        '[agent]\ntimeout_sec = 70\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n'
        '[verifier]\ntimeout_sec = 30\n[environment]\ndocker_image = "base"\nnetwork_mode = "no-network"\n'
        'cpus = 0.5\nmemory_mb = 64\nstorage_mb = 32\nworkdir = "/app"\nenv = {A = "${HOST_A:-b}"}\n'
    )
    found = spec(make(tmp_path / "t", toml))
    assert (found.image, found.workdir, found.evaluate_in) == ("base", "/app", "fresh")
    sandbox = found.sandbox
    assert (sandbox.memory, sandbox.disk, sandbox.cpus, sandbox.env) == ("64M", "32M", 0.5, {"A": "b"})
    assert (sandbox.network, found.for_grader().sandbox.network) == (("pypi.org",), "none")
    limits = found.limits
    assert (limits.agent_seconds, limits.rollout_seconds, limits.evaluate_seconds) == (70, 190, 150)
    assert found.artifacts == [".", "/app", "/data", "/home", "/srv", "/logs/artifacts"]


def test_a_public_network_is_what_the_operator_says(tmp_path):
    folder = make(tmp_path / "t", TOML + 'network_mode = "public"\n')
    assert spec(folder).sandbox.network == "none"
    assert spec(folder, public_network=["pypi.org"]).sandbox.network == ("pypi.org",)


def test_a_shared_verifier_has_the_agents_sandbox_and_processes_if_the_operator_says_so(tmp_path):
    folder = make(tmp_path / "t")
    fresh, same = spec(folder), spec(folder, shared_verifier="same")
    assert (fresh.evaluate_in, fresh.agent_processes) == ("fresh", "end")
    assert (same.evaluate_in, same.agent_processes) == ("same", "keep")
    assert spec(folder, shared_verifier="same", agent_processes="end").agent_processes == "end"


def test_a_separate_verifier_gets_its_artifacts_alone(tmp_path):
    toml = 'artifacts = ["/app/out", {source = "/data/x"}]\n[verifier]\nenvironment_mode = "separate"\n' + TOML
    found = spec(make(tmp_path / "t", toml), shared_verifier="same")
    assert (found.evaluate_in, found.artifacts) == ("fresh", ["/app/out", "/data/x", "/logs/artifacts"])


def test_servers_of_a_task_become_those_of_its_agent(tmp_path):
    toml = MCP + 'transport = "stdio"\ncommand = "python3"\nargs = ["-m", "notes"]\n'
    (server,) = spec(make(tmp_path / "t", toml)).mcp
    assert (server.name, server.command) == ("x", ["python3", "-m", "notes"])
    steps = make(tmp_path / "s", toml + '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n', steps=("a", "b"))
    with pytest.raises(ConfigurationError, match="several steps cannot have servers"):
        load_path(steps)


def test_health_checks_of_steps_have_their_time(tmp_path):
    check = '[steps.healthcheck]\ncommand = "true"\nretries = 10\ntimeout_sec = 30\ninterval_sec = 10\n'
    toml = TOML + "".join(f'[[steps]]\nname = "{name}"\n{check}' for name in ("one", "two"))
    limits = spec(make(tmp_path / "task", toml, steps=("one", "two"))).limits
    assert limits.init_seconds == 120 + 400
    assert limits.rollout_seconds == 2 * (900 + 120) + 400


def test_steps_have_limits_of_their_own(tmp_path):
    toml = '[agent]\ntimeout_sec = 50\n[[steps]]\nname = "a"\n[steps.agent]\ntimeout_sec = 9\n[[steps]]\nname = "b"\n'
    folder = make(tmp_path / "t", toml + TOML, steps=("a", "b"))
    task = load_harbor(folder, HarborSettings()).tasks["t"].task
    assert [(step.agent.timeout_sec, step.instruction) for step in task.steps] == [
        (9, "Do a."),
        (50, "Do b."),
    ]
    assert spec(folder).limits.agent_seconds == 50


@pytest.mark.parametrize(
    ("whole", "own", "seconds", "env"),
    [
        ("timeout_sec = 900\nenv = {A = '1', B = '1'}", "env = {B = '2'}", 900, {"A": "1", "B": "2"}),
        ("timeout_sec = 30\nenv = {A = '1'}", "timeout_sec = 20", 20, {"A": "1"}),
        ("timeout_sec = 30", "", 600, {}),
    ],
)
def test_a_step_has_the_variables_and_the_time_of_the_tasks_verifier(tmp_path, whole, own, seconds, env):
    toml = f'[verifier]\n{whole}\n[[steps]]\nname = "a"\n[steps.verifier]\n{own}\n{TOML}'
    [step] = load_harbor(make(tmp_path / "t", toml, steps=("a",)), HarborSettings()).tasks["t"].task.steps
    assert (step.verifier.timeout_sec, step.verifier.env) == (seconds, env)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (MCP + 'url = "http://x.org/sse"\n', "environment.mcp_servers.0: the transport sse"),
        (
            MCP + 'transport = "stdio"\nurl = "http://x.org"\n',
            "environment.mcp_servers.0: a server has `command`",
        ),
        (
            MCP + 'transport = "streamable-http"\nurl = "x"\n',
            "environment.mcp_servers.0.url: String should match",
        ),
        (MCP + 'transport = "streamable-http"\nurl = "http://x.org"\n', "'x' cannot be reached"),
        (TOML + 'os = "windows"\n', "environment.os"),
        (TOML + 'env = {A = "${NOBODY_SETS_THIS}"}\n', "environment.env.A: the variable NOBODY_SETS_THIS"),
        (
            '[[steps]]\nname = "a"\nverifier.env = {A = "${NOBODY_SETS_THIS}"}\n' + TOML,
            "steps.0.verifier.env.A: the variable NOBODY_SETS_THIS",
        ),
        (TOML + 'network_mode = "allowlist"\nallowed_hosts = ["http://x"]\n', "environment.allowed_hosts: "),
        ('artifacts = [{source = "/x", service = "db"}]\n' + TOML, "artifacts.0.service"),
        ('artifacts = ["/usr/bin"]\n' + TOML, "would copy the agent's programs"),
        ('artifacts = ["x/../y"]\n' + TOML, "is not an absolute path"),
        ('[verifier]\ncollect = [{command = "x", service = "db"}]\n' + TOML, "verifier.collect.0.service"),
        ("", "neither environment/Dockerfile nor environment.docker_image"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_path(tmp_path, toml, said):
    with pytest.raises(ConfigurationError) as caught:
        spec(make(tmp_path / "t", toml, steps=("a",)))
    assert said in str(caught.value)


def test_a_task_without_tests_is_refused(tmp_path):
    folder = make(tmp_path / "t")
    (folder / "tests/test.sh").unlink()
    with pytest.raises(ConfigurationError) as caught:
        load_path(folder)
    assert "tests/test.sh is missing" in str(caught.value)


@pytest.mark.parametrize("name", ["tests/key", "solution", "environment"])
def test_a_link_out_of_the_tasks_folder_is_refused(tmp_path, name):
    folder, outside = make(tmp_path / "t"), tmp_path / "outside"
    outside.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(ConfigurationError, match="leads out of the task's folder"):
        load_path(folder)
    (folder / name).unlink()
    (folder / "tests/again").symlink_to("test.sh")
    load_path(folder)


def test_a_loop_of_links_hides_no_other_task(tmp_path):
    make(tmp_path / "set/one")
    folder = make(tmp_path / "set/two")
    (folder / "tests/loop").symlink_to("loop")
    assert load_path(tmp_path / "set").dataset() == [{"task": "one"}, {"task": "two"}]


@pytest.mark.parametrize("table", ["environment", "verifier.environment"])
@pytest.mark.parametrize(
    "image", ["/", "/etc", "~/x", "../other.sif", "{outside}", "none.sif", "oci-archive:/x.tar", "a\\u0000"]
)
def test_an_image_of_a_task_is_no_path_out_of_its_folder(tmp_path, table, image):
    (tmp_path / "other.sif").touch()
    named = image.replace("{outside}", str(tmp_path / "other.sif"))
    toml = TOML if table != "environment" else ""
    with pytest.raises(ConfigurationError, match=rf"task\.toml: {table}\.docker_image: ") as caught:
        load_path(make(tmp_path / "t", f'{toml}[{table}]\ndocker_image = "{named}"\n'))
    assert "An image file must be in the task's folder" in caught.value.hint


@pytest.mark.parametrize(
    ("named", "image"),
    [
        ("base", "base"),
        ("x/y:20251031", "docker://x/y:20251031"),
        ("docker://x/y", "docker://x/y"),
        ("own.sif", "{folder}/own.sif"),
    ],
)
def test_an_image_of_a_task_is_a_name_a_reference_or_a_file_of_its_own(tmp_path, named, image):
    folder = make(tmp_path / "t", f'[environment]\ndocker_image = "{named}"\n')
    (folder / "own.sif").touch()
    assert spec(folder).image == image.replace("{folder}", str(folder))


def test_the_name_of_an_image_changes_with_its_files(tmp_path):
    folder = Path(shutil.copytree(EXAMPLES / "word-count", tmp_path / "word-count"))

    def image() -> str:
        (name,) = load_harbor(folder, HarborSettings()).dockerfiles()
        return name

    names = [image()]
    assert names[0] == image()
    (folder / "environment/texts/a.txt").write_text("other")
    names.append(image())
    (folder / "environment/texts/a.txt").chmod(0o755)
    names.append(image())
    (folder / "instruction.md").write_text("other")
    assert image() == names[-1]
    assert len(set(names)) == 3
    assert all(len(name) <= 64 and name.startswith("harbor-word-count-") for name in names)


def test_the_examples_are_whole():
    environment = load_path(EXAMPLES)
    assert environment.findings() == environment.warnings() == []
    assert [one["task"] for one in environment.dataset()] == ["counter-service", "ledger", "word-count"]
    assert all(environment.for_instance(one).has_solution for one in environment.dataset())


@pytest.mark.parametrize(
    ("name", "why", "lost"),
    [
        ("uvx", "command not found", True),
        ("/root/.local/bin/env", "No such file or directory", True),
        ("/tests/run.py", "No such file or directory", True),
        ("/app/answer.txt", "No such file or directory", False),
        ("/data/answer.txt", "No such file or directory", False),
        ("answer.txt", "No such file or directory", False),
        ("./run.sh", "No such file or directory", False),
        ("", "No such file or directory", False),
    ],
)
async def test_a_file_that_the_agent_did_not_leave_is_no_failure_of_the_tests(tmp_path, name, why, lost):
    async def echo(command, **_):
        return ExecResult(0, "\n".join(command[4:]).encode(), b"", timed_out=False, truncated=False)

    [step] = load_harbor(make(tmp_path / "one"), HarborSettings()).tasks["one"].task.steps
    printed = f"one\n/tests/test.sh: line 3: {name}: {why}\ntwo\n".encode()
    done = ExecResult(0, b"", printed, timed_out=False, truncated=False)
    own, bare = Verifier(step, {}, ["/data"]), SimpleNamespace(workdir="/app", exec=echo)
    tests = [PackedFile("test.sh", f"#!/bin/bash\n{name}\n".encode())]
    missing = await own._missing(bare, done, tests, {})
    with pytest.raises(TestsNeverRanError) if lost else nullcontext():
        await own._require_run(bare, done, tests, missing)


@pytest.mark.parametrize(
    ("report", "ran"),
    [
        (b'{"results": {"summary": {"tests": 1}, "tests": [ {"name": "a"}]}}', True),
        pytest.param(b'{"results": {"tests": [' + b"{}," * 5_000_000 + b"{}]}}", True, id="long"),
        (b'{"results": {"summary": {"tests": 0}, "tests": []}}', False),
        (b'{"results": {"message": "\\"tests\\": [{"}}', False),
        pytest.param(b"[" * 1_000_000, False, id="deep"),
        (b"{}", False),
        (b"\xff", False),
    ],
)
async def test_a_report_shows_that_tests_ran_and_takes_no_memory(monkeypatch, report, ran):
    async def exported(*_):
        return report

    monkeypatch.setattr(verifier, "exported_file", exported)
    tracemalloc.start()
    with nullcontext() if ran else pytest.raises(TestsNeverRanError, match="names no test"):
        await verifier._require_report(None, ExecResult(0, b"", b"", timed_out=False, truncated=False))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1024 * 1024


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
REWARDS = st.dictionaries(st.text(min_size=1, max_size=8), NUMBERS, min_size=1, max_size=4)


@given(REWARDS)
def test_what_is_written_is_read(rewards):
    assert parse_json(json.dumps(rewards).encode()) == rewards


@given(NUMBERS)
def test_a_number_is_the_reward(value):
    assert parse_text(f" {value!r}\n".encode()) == {"reward": value}


@given(st.binary(max_size=40))
def test_whatever_else_is_written_is_a_failure_or_a_finite_number(data):
    for parse in (parse_json, parse_text):
        try:
            rewards = parse(data)
        except EnvironmentFailedError as error:
            assert error.code in ("reward_empty", "reward_invalid")  # noqa: PT017
        else:
            assert rewards
            assert all(math.isfinite(value) for value in rewards.values())


@pytest.mark.parametrize(
    ("parse", "error", "data"),
    [
        *((parse_json, RewardInvalidError, data) for data in (b"[1]", b'"1"', b'{"a": "1"}', b'{"a": NaN}', b"{")),
        *((parse_json, RewardInvalidError, b'{"a": %s}' % value) for value in (b"1e308", b"1e999", b"null", b"true")),
        *((parse_json, RewardEmptyError, data) for data in (b"", b" \n", b"{}")),
        *((parse_text, RewardInvalidError, data) for data in (b"1e39", b"inf", b"-Infinity", b"nan", b"1 2", b"one")),
        (parse_text, RewardInvalidError, b"\xff"),
        (parse_text, RewardEmptyError, b" \n"),
    ],
)
def test_a_reward_of_another_form_is_a_failure(parse, error, data):
    with pytest.raises(error):
        parse(data)


def test_the_reward_is_its_key_or_the_mean():
    assert main_reward({"reward": 0.25, "a": 1.0}) == 0.25
    assert main_reward({"a": 1.0, "b": 0.0}) == 0.5


@pytest.mark.parametrize(
    ("least", "below"), [(None, False), (0.5, False), (0.6, True), ({"a": 1.0}, False), ({"b": 0.0}, True)]
)
def test_a_key_that_is_missing_is_below(least, below):
    assert is_below({"reward": 0.5, "a": 1.0}, least) is below


@given(st.lists(st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=4))
def test_the_mean_counts_a_missing_key_as_zero_and_stays_within_the_rewards(steps):
    score = combine(steps, "mean")
    for key in {key for _, rewards in steps for key in rewards}:
        values = [rewards.get(key, 0.0) for _, rewards in steps]
        if key not in {f"{name}.{inner}" for name, rewards in steps for inner in rewards}:
            assert score.parts[key] == pytest.approx(sum(values) / len(steps), abs=1e-6)
    everything = [value for _, rewards in steps for value in rewards.values()]
    assert min(0.0, *everything) - 1e-6 <= score.reward <= max(0.0, *everything) + 1e-6


def test_final_is_the_last_steps():
    score = combine([("a", {"reward": 1.0}), ("b", {"reward": 0.25, "x": 3.0})], "final")
    assert score.reward == 0.25
    assert score.parts == {"reward": 0.25, "x": 3.0, "a.reward": 1.0, "b.reward": 0.25, "b.x": 3.0}


def test_a_task_without_steps_has_its_own_keys_alone():
    assert combine([("", {"reward": 1.0})], "mean").parts == {"reward": 1.0}
