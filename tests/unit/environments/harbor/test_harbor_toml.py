"""A `task.toml` is read as Harbor does, and what is wrong in it is said with its path."""

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.harbor.task_toml import read_task_toml
from rollout_service.environments.harbor.variables import missing, resolve


def read(text: str):
    return read_task_toml(text, where="task.toml")


def test_everything_has_a_default():
    toml = read("")
    assert (toml.verifier.timeout_sec, toml.environment.build_timeout_sec) == (600, 600)
    assert (toml.agent.timeout_sec, toml.multi_step_reward_strategy) == (None, "mean")
    assert not toml.verifier.is_separate


def test_old_keys_are_read():
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    toml = read(text)
    assert toml.schema_version == "1.0"
    table = toml.environment
    assert (table.memory_mb, table.storage_mb, table.network_mode) == (2048, 512, "no-network")
    assert read("[environment]\nallow_internet = true").environment.network_mode == "public"


def test_a_task_of_terminal_bench_2():
    toml = read(
        'version = "1.1"\n[metadata]\nauthor_name = "A"\ndifficulty = "hard"\n[verifier]\ntimeout_sec = 900.0\n'
        '[agent]\ntimeout_sec = 900.0\n[environment]\nbuild_timeout_sec = 600.0\ndocker_image = "x/y:20251031"\n'
        "cpus = 1\nmemory_mb = 2048\nstorage_mb = 10240\n"
    )
    assert (toml.environment.docker_image, toml.metadata["difficulty"]) == ("x/y:20251031", "hard")


def test_a_verifier_with_a_sandbox_of_its_own_is_separate():
    assert read("[verifier.environment]\nmemory_mb = 64").verifier.is_separate
    assert read('[verifier]\nenvironment_mode = "separate"').verifier.is_separate
    assert not read('[verifier]\nenvironment_mode = "shared"').verifier.is_separate


def test_steps():
    toml = read(
        'multi_step_reward_strategy = "final"\n[[steps]]\nname = "a"\nmin_reward = 0.5\n'
        '[[steps]]\nname = "b"\nmin_reward = {x = 1.0}\n[steps.agent]\ntimeout_sec = 5\n'
    )
    assert [step.min_reward for step in toml.steps] == [0.5, {"x": 1.0}]
    assert [step.agent.timeout_sec for step in toml.steps] == [None, 5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\ntimeout = 5", "agent.timeout: unknown field; did you mean timeout_sec?"),
        ("[environment]\nmemory_gb = 5", "environment.memory_gb: unknown field; did you mean memory_mb?"),
        ("[enviroment]\n", "enviroment: unknown field; did you mean environment?"),
        ('[[steps]]\nname = "a"\ntimeout = 1', "steps.0.timeout: unknown field"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec: Input should be greater than 0"),
        ("[environment]\nmemory = 5", "environment: `memory` must be a size"),
        (
            '[environment]\nmemory = "2G"\nmemory_mb = 5',
            "environment: `memory` is the old name of `memory_mb`",
        ),
        ("[environment]\nallow_internet = 1", "environment: `allow_internet` must be true or false"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment: `allowed_hosts` and network_mode"),
        ('[agent]\nallowed_hosts = ["a.org"]', "agent: `allowed_hosts` and network_mode"),
        ('[environment]\nworkdir = "app"', "environment.workdir: String should match"),
        ('[[steps]]\nname = "../a"', "steps.0.name: String should match"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "a"', "steps: two steps have the name 'a'"),
        ('schema_version = "2.0"', "schema_version: String should match"),
        ("x = [", "task.toml is not valid TOML"),
    ],
)
def test_mistakes_are_said_with_their_path(text, said):
    with pytest.raises(ConfigurationError) as caught:
        read(text)
    assert said in str(caught.value)


def test_every_mistake_is_said_at_once():
    with pytest.raises(ConfigurationError) as caught:
        read("a = 1\n[agent]\nb = 2\n")
    assert len(str(caught.value).splitlines()) == 2


def test_variables_of_the_host_must_be_allowed():
    host = {"TOKEN": "secret", "EMPTY": ""}
    table = {"A": "${TOKEN}", "B": "x-${TOKEN:-none}-${NO:-}", "C": "plain $TOKEN", "D": "${EMPTY:-d}"}
    assert resolve(table, [], host) == {"A": "", "B": "x-none-", "C": "plain $TOKEN", "D": "d"}
    assert resolve(table, ["TOKEN", "EMPTY"], host) == {
        "A": "secret",
        "B": "x-secret-",
        "C": "plain $TOKEN",
        "D": "d",
    }
    assert list(missing(table, "env", ["TOKEN"], host)) == []
    assert list(missing(table, "env", [], host)) == [
        "env.A: the variable TOKEN may not be read by tasks: see [harbor] variables"
    ]
    assert list(missing({"A": "${UNSET}"}, "env", ["UNSET"], host)) == [
        "env.A: the variable UNSET is not set"
    ]
