"""Harbor's task.toml and Compose files are read, and what cannot be honored is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.harbor.collection import load_harbor
from rollout_service.environments.harbor.compose import (
    MAX_BYTES,
    MAX_SERVICES,
    missing,
    read_compose,
    resolve,
)
from rollout_service.environments.harbor.task_toml import read_task_toml
from rollout_service.settings.pipeline import HarborSettings

SHOP = """
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    depends_on: [web]
    environment: [URL=http://web:80]
  web:
    image: base
    command: python3 -m http.server "80"
    depends_on:
      db: {condition: service_healthy}
      migrate: {condition: service_completed_successfully}
    ports: ["8080:80"]
    environment: {SECRET: "$$x", COLOR: "${COLOR:-red}"}
  migrate:
    build: .
    entrypoint: [python3]
    command: [migrate.py, --all]
    working_dir: /srv
  db:
    image: base
    command: db --port 5432
    volumes: [data:/data]
    expose: ["5432"]
    healthcheck: {test: [CMD, db, "is ready"], interval: 5s, retries: 4, start_period: 1m30s}
volumes: {data: }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield (path := tmp_path_factory.mktemp("compose"))
    shutil.rmtree(path)


def read(folder, text, allowed=()):
    path = folder / "docker-compose.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_compose(path, images=lambda: {"base"}, allowed=allowed)


def one(**keys):
    return json.dumps({"services": {"db": {"command": "db"} | keys}})


def test_services_of_one_image_are_read_in_the_order_in_which_they_start(folder):
    compose = read(folder, SHOP)
    assert (set(compose.order()[:2]), compose.order()[2:]) == ({"db", "migrate"}, ["web", "main"])
    web, migrate, db = (compose.services[name] for name in ("web", "migrate", "db"))
    assert (web.argv, web.ports) == (("python3", "-m", "http.server", "80"), (80,))
    assert web.environment == {"SECRET": "$x", "COLOR": "red"}
    assert (migrate.argv, migrate.working_dir) == (("python3", "migrate.py", "--all"), "/srv")
    assert (compose.is_awaited("migrate"), compose.is_awaited("db")) == (True, False)
    assert (db.health.command, db.health.start_period_sec, db.health.interval_sec) == (
        "db 'is ready'",
        110,
        1,
    )
    assert (compose.seconds, compose.services["main"].argv) == (140, ())
    assert compose.environment == {"URL": "http://web:80"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (one(volumes=["/etc:/host"]), "services.db.volumes: '/etc:/host' is not NAME:/PATH: copy files in"),
        (one(volumes=["./data:/data"]), "services.db.volumes: './data:/data' is not"),
        (one(volumes=["~/x:/data"]), "services.db.volumes: '~/x:/data' is not"),
        (one(image="postgres:16"), "services.db.image: 'postgres:16' is another image than the task's"),
        (one(build="./db"), "services.db.build.context: is another image than the task's: install"),
        (one(build={"context": ".", "args": {"A": "b"}}), "services.db.build.args: is another image"),
        (one(networks=["back"]), "services.db.networks: cannot be had here: remove it: services share"),
        (one(privileged="true"), "services.db.privileged: cannot be had here: remove it: sandboxes have no"),
        (one(deploy={}), "services.db.deploy: cannot be had here: set the limits in [environment]"),
        (one(env_file=".env"), "services.db.env_file: cannot be had here: write the variables into"),
        (one(restart="always"), "services.db.restart: cannot be had here: remove it: a service that has ended"),
        (one(comand="x"), "services.db.comand: cannot be had here: remove it; did you mean command"),
        (one(command=[]), "services.db.command: is missing"),
        (one(command="echo 'x"), "services.db.command: No closing quotation"),
        (one(ports=["3000-3005:3000-3005"]), "services.db.ports.0: '3000-3005:3000-3005' must be one port"),
        (one(ports=["99999"]), "services.db.ports.0: Input should be less than or equal to 65535"),
        (one(environment=["A"]), "services.db.environment: 'A' has no value: write NAME=VALUE"),
        (one(environment=[[]]), "services.db.environment: [] has no value: write NAME=VALUE"),
        (one(environment={"A": "$B"}), "services.db.environment.A: write $$ for a dollar sign"),
        (one(environment={"A": "${HOME}"}), "services.db.environment.A: the variable HOME may not be read"),
        (one(depends_on=["bd"]), "services.db.depends_on.bd: there is no such service; did you mean db"),
        (one(depends_on=["db"]), "depend on each other: remove one of depends_on"),
        (one(depends_on={"main": {"condition": "service_healthy"}}), "services.db.depends_on.main: it has no health"),
        (one(healthcheck={"test": "x", "interval": "5"}), "services.db.healthcheck.interval: must be a time such"),
        (one(healthcheck={"test": "x", "interval": "2h"}), "services.db.healthcheck.interval: Input should be"),
        (one(healthcheck={}), "services.db.healthcheck.test: Field required"),
        ('{"services": {"../x": {"command": "x"}}}', "services.../x"),
        ('{"services": {}}', "services: Dictionary should have at least 1 item"),
        (json.dumps({"services": {f"s{n}": {"command": "x"} for n in range(MAX_SERVICES + 1)}}), "at most 16 items"),
        ("services: {a: {command: x, ports: [80]}, b: {command: x, expose: [80]}}", "services.b.ports: 'a' has the"),
        ("services: {a: {command: x, volumes: ['v:/a']}, b: {command: x, volumes: ['v:/b']}}", "use one path"),
        ("include: [other.yaml]\nservices: {a: {command: x}}", "include: cannot be had here: remove it"),
        ("services: &x {a: {command: x}}\nvolumes: *x", "line 2: `*x` is not read: write the values out"),
        ("services: " + "[" * 5_000, "more than 12 levels"),
        ("services: {a: {command: x}}\n" + "#" * MAX_BYTES, "has more than 65536 bytes: shorten it"),
        ("services: [", "while parsing"),
        ("x: 1\n---\ny: 2", "expected a single document"),
        (b"\xff\xfe\xfa", "docker-compose.yaml: "),
        ("", "docker-compose.yaml: services: Field required"),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_what_does_not_fit_into_one_sandbox_is_refused_with_its_key(folder, text, said):
    with pytest.raises(ConfigurationError) as caught:
        read(folder, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(folder / "docker-compose.yaml"))
    assert caught.value.hint


def test_a_file_reads_the_variables_that_the_operator_allows(folder, monkeypatch):
    monkeypatch.setenv("SHOP_COLOR", "blue")
    compose = read(folder, one(environment={"A": "${SHOP_COLOR}"}), allowed=["SHOP_COLOR"])
    assert compose.services["db"].environment == {"A": "blue"}


NAMES = st.sampled_from(["main", "a", "b", "c"])
WORDS = st.sampled_from(
    ["base", "x y", "/etc:/x", "v:/x", "80", "8:9", "5s", "${A:-b}", "$", "", ".", "service_started"]
)
TREES = st.recursive(
    WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | NAMES, inner, max_size=3)
)
KEYS = st.sampled_from(
    [
        "image",
        "build",
        "command",
        "entrypoint",
        "environment",
        "depends_on",
        "ports",
        "volumes",
        "healthcheck",
        "user",
    ]
)
SERVICES = st.dictionaries(NAMES, st.dictionaries(KEYS, TREES, max_size=4).map(lambda of: {"command": "x"} | of))


@given(st.binary(max_size=200) | TREES.map(json.dumps) | SERVICES.map(lambda of: json.dumps({"services": of})))
def test_a_file_of_any_content_is_refused_or_fits(folder, text):
    try:
        compose = read(folder, text)
    except ConfigurationError:
        return
    assert all(volume[0] not in "./~$" for one in compose.services.values() for volume in one.volumes)
    order = compose.order()
    assert sorted(order) == sorted(compose.services)
    for number, name in enumerate(order):
        assert {*compose.services[name].depends_on} - {"main"} <= {*order[:number]}


def test_a_task_with_services_has_their_variables_and_time(tmp_path):
    (tmp_path / "shop/environment").mkdir(parents=True)
    (tmp_path / "shop/tests").mkdir()
    (tmp_path / "shop/tests/test.sh").touch()
    (tmp_path / "shop/instruction.md").write_text("Do it.")
    (tmp_path / "shop/environment/Dockerfile").write_text("FROM base\n")
    (tmp_path / "shop/environment/docker-compose.yaml").write_text(SHOP)
    toml = tmp_path / "shop/task.toml"
    toml.write_text('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n')
    task = load_harbor(tmp_path, HarborSettings()).for_instance({"task": "shop"})
    assert (task.spec.sandbox.env, task.spec.limits.init_seconds) == ({"URL": "http://web:80"}, 260)
    toml.write_text(
        '[[verifier.collect]]\ncommand = "x"\nservice = "bd"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    )
    [finding] = load_harbor(tmp_path, HarborSettings()).findings()
    assert "verifier.collect.0.service: there is no service 'bd'" in finding
    assert "a task of several steps cannot have services" in finding


def test_the_example_of_the_page_is_read(folder):
    page = (Path(__file__).parents[4] / "docs/how-to/run-harbor-tasks.md").read_text()
    [example] = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert read(folder, example).order() == ["db", "web"]


def read_toml(text: str):
    return read_task_toml(text, where="task.toml")


def test_old_keys_are_read():
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    toml = read_toml(text)
    assert toml.schema_version == "1.0"
    table = toml.environment
    assert (table.memory_mb, table.storage_mb, table.network_mode) == (2048, 512, "no-network")
    assert read_toml("[environment]\nallow_internet = true").environment.network_mode == "public"


def test_a_task_of_terminal_bench_2():
    toml = read_toml(
        'version = "1.1"\n[metadata]\nauthor_name = "A"\ndifficulty = "hard"\n[verifier]\ntimeout_sec = 900.0\n'
        '[agent]\ntimeout_sec = 900.0\n[environment]\nbuild_timeout_sec = 600.0\ndocker_image = "x/y:20251031"\n'
        "cpus = 1\nmemory_mb = 2048\nstorage_mb = 10240\n"
    )
    assert (toml.environment.docker_image, toml.metadata["difficulty"]) == ("x/y:20251031", "hard")


def test_a_verifier_with_a_sandbox_of_its_own_is_separate():
    assert read_toml("[verifier.environment]\nmemory_mb = 64").verifier.is_separate
    assert read_toml('[verifier]\nenvironment_mode = "separate"').verifier.is_separate
    assert not read_toml('[verifier]\nenvironment_mode = "shared"').verifier.is_separate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\ntimeout = 5", "agent.timeout: unknown field; did you mean timeout_sec?"),
        ("[environment]\nmemory_gb = 5", "environment.memory_gb: unknown field; did you mean memory_mb?"),
        ("[enviroment]\n", "enviroment: unknown field; did you mean environment?"),
        ('[[steps]]\nname = "a"\ntimeout = 1', "steps.0.timeout: unknown field"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec: Input should be greater than 0"),
        ("[environment]\nmemory = 5", "environment: `memory` must be a size"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec: Input should be a finite number"),
        ("[environment]\ncpus = inf", "environment.cpus: Input should be a finite number"),
        (f"[environment]\nmemory_mb = {10**400}", "environment.memory_mb: Input should be less than"),
        (f'[environment]\nstorage = "{10**400}G"', "environment: `storage` must be a size"),
        (f'[environment.healthcheck]\ncommand = "x"\nretries = {10**400}', "healthcheck.retries: Input should be less"),
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
        pytest.param("x = " + "[" * 5_000, "task.toml is not valid TOML", id="deep"),
        pytest.param("x = " + "1" * 5_000, "task.toml is not valid TOML", id="long"),
    ],
)
def test_mistakes_are_said_with_their_path(text, said):
    with pytest.raises(ConfigurationError) as caught:
        read_toml(text)
    assert said in str(caught.value)


def test_every_mistake_is_said_at_once():
    with pytest.raises(ConfigurationError) as caught:
        read_toml("a = 1\n[agent]\nb = 2\n")
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
    assert list(missing({"A": "${UNSET}"}, "env", ["UNSET"], host)) == ["env.A: the variable UNSET is not set"]
