"""Settings have a fixed precedence, and each refusal names the key, variable or line at fault."""

import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.settings import Settings, is_loopback, load_settings
from rollout_service.settings.keys import iter_tables
from rollout_service.settings.sources import variable_name

KEY = "a-key-of-enough-characters"
TABLES = list(iter_tables(Settings))
LISTS_OF_TABLES = {".".join(table.path) for table in TABLES if table.repeated}
LISTS_OF_TEXTS = [
    key.dotted
    for table in TABLES
    for key in table.keys
    if "list" in str(key.field.annotation) and key.dotted not in (*LISTS_OF_TABLES, "store.url")
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_win_over_variables_over_the_file(empty_folder, monkeypatch):
    (empty_folder / "rollout.toml").write_text(
        "port = 1\nhold_seconds = 7.0\n[pipeline]\ninit_workers = 5\nrollout_workers = 6\n"
    )
    assert load_settings().port == 1
    monkeypatch.setenv("ROLLOUT_PORT", "2")
    monkeypatch.setenv("ROLLOUT_PIPELINE__ROLLOUT_WORKERS", "60")
    settings = load_settings(port=3)
    assert (settings.port, settings.hold_seconds) == (3, 7.0)
    assert (settings.pipeline.init_workers, settings.pipeline.rollout_workers) == (5, 60)
    assert load_settings().port == 2


def test_a_file_that_is_not_toml_is_refused(empty_folder):
    (empty_folder / "rollout.toml").write_text("port = ")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_settings()


def test_a_file_that_was_named_must_exist(empty_folder):
    with pytest.raises(ConfigurationError, match=r"the settings file .* does not exist"):
        load_settings(empty_folder / "other.toml")


def test_a_file_is_read_as_utf_8_in_every_locale(empty_folder):
    (empty_folder / "rollout.toml").write_bytes('secrets.folder = "/srv/geheimschlüssel"'.encode())
    done = subprocess.run(
        [sys.executable, "-c", "from rollout_service.settings import *; print(ascii(load_settings().secrets.folder))"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C"}
        | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=empty_folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "PosixPath('/srv/geheimschl\\xfcssel')", done.stderr


@pytest.mark.parametrize("key", ["hold_seconds", "pipeline.drain_seconds", "http.head_seconds"])
def test_a_time_without_end_is_refused(empty_folder, key):
    (empty_folder / "rollout.toml").write_text(f"{key} = inf")
    with pytest.raises(ConfigurationError, match=f"{key}: Input should be a finite number"):
        load_settings()


def test_beyond_loopback_needs_a_key():
    with pytest.raises(ConfigurationError, match="no key is set"):
        load_settings(host="0.0.0.0")
    settings = load_settings(host="0.0.0.0", keys=[KEY])
    assert (settings.keys[0].key.get_secret_value(), settings.keys[0].role) == (KEY, "admin")
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    "value",
    [KEY, f" {KEY} ", f'["{KEY}"]', f'[{{"name": "key-1", "key": "{KEY}"}}]'],
    ids=["plain", "spaces", "list", "table"],
)
def test_a_key_in_a_variable_is_a_plain_value_or_json(value, monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEYS", value)
    (key,) = load_settings(host="0.0.0.0").keys
    assert (key.key.get_secret_value(), key.role, key.name) == (KEY, "admin", "key-1")
    monkeypatch.setenv("ROLLOUT_KEYS", f"{KEY},{KEY}2")
    assert len(load_settings().keys) == 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('[""]', "needs 16"),
        ("", "empty"),
        ("abc", "Generate one with `python3"),
        (f"{KEY},", "empty"),
        (f'["{KEY} with spaces"]', "visible ASCII"),
        (f'["{KEY}", "{KEY}"]', "two keys have the same value"),
        (f'["{KEY}"', "not valid JSON"),
        (f'[{{"name": "x", "role": "root", "key": "{KEY}"}}]', "'read', 'submit' or 'admin'"),
        (f'[{{"key": "{KEY}"}}]', "keys.0.name"),
        ("[7]", "keys.0"),
    ],
)
def test_a_key_that_would_protect_nothing_is_refused_without_being_shown(value, says, monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEYS", value)
    with pytest.raises(ConfigurationError, match=re.escape(says)) as refused:
        load_settings(host="0.0.0.0")
    assert KEY not in str(refused.value)
    assert refused.value.__cause__ is None


def test_addresses_of_engines_in_a_variable_may_be_plain(monkeypatch):
    monkeypatch.setenv("ROLLOUT_BACKENDS", "http://gpu-1:30000, http://gpu-2:30000")
    assert [backend.url.host for backend in load_settings().backends] == ["gpu-1", "gpu-2"]


@pytest.mark.parametrize("key", LISTS_OF_TEXTS)
@pytest.mark.parametrize("value", ['["one", "two"]', "one,two"], ids=["json", "commas"])
def test_every_list_of_texts_may_be_json_or_plain_in_a_variable(key, value, monkeypatch):
    monkeypatch.setenv(variable_name(key), value)
    found = attrgetter(key)(load_settings())
    assert [str(one) for one in found] == ["one", "two"]


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://one/0", ["redis://one/0"]),
        ("redis://one/0, rediss://two:1/0", ["redis://one/0", "rediss://two:1/0"]),
        ('["unix:///one", "unix:///two"]', ["unix:///one", "unix:///two"]),
    ],
)
def test_a_store_has_one_address_or_one_for_each_shard(url, found, monkeypatch):
    monkeypatch.setenv("ROLLOUT_STORE__URL", url)
    assert load_settings().store.url == found


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ({"url": ["redis://one", "redis://one"]}, "given twice"),
        ({"url": ["redis://one", "http://two"]}, "not the address of a Redis"),
        ({"url": ["redis://one", "redis://:secret@two"]}, "contains a password"),
        ({"url": ["redis://one", "redis://two"], "shards": 2}, "each of them is a shard"),
        ({"shards": 2}, "divides the store at one"),
        ({"url": [f"redis://host-{number}" for number in range(17)]}, "at most 16"),
        ({"url": ["redis://one"], "shards": 17}, "less than or equal to 16"),
    ],
)
def test_shards_that_cannot_be_are_refused(store, why):
    with pytest.raises(ConfigurationError, match=why) as refused:
        load_settings(store=store)
    assert "secret" not in str(refused.value)


def test_a_clients_key_for_a_server_without_keys_is_distinguished(monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEY", KEY)
    with pytest.raises(ConfigurationError, match=r"ROLLOUT_KEYS \(ROLLOUT_KEY is the client's\)"):
        load_settings(host="0.0.0.0")


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback(host, inside):
    assert is_loopback(host) is inside


def test_the_local_provider_must_be_asked_for():
    assert Settings().sandbox.provider == "apptainer"
    assert load_settings(sandbox={"provider": "local"}).sandbox.provider == "local"


def test_the_ceiling_of_sandboxes_is_what_the_stages_can_hold_unless_it_is_set(monkeypatch):
    settings = load_settings(pipeline={"init_workers": 1, "rollout_queue": 1, "rollout_workers": 8})
    assert settings.sandbox_ceiling == 1 + 1 + 8 + 4 + 256 + 4
    monkeypatch.setenv("ROLLOUT_SANDBOXES__CEILING", "12")
    monkeypatch.setenv("ROLLOUT_SANDBOXES__WARM__SIZE", "3")
    settings = load_settings()
    assert (settings.sandbox_ceiling, settings.sandboxes.warm.size) == (12, 3)
    with pytest.raises(ConfigurationError, match="did you mean sandboxes\\.ceiling"):
        load_settings(sandboxes={"ceilling": 3})


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("\nprot = 1", "rollout.toml:2: prot: unknown setting; did you mean port?"),
        (
            "[pipeline]\n\nrollout_worker = 1",
            "rollout.toml:3: pipeline.rollout_worker: unknown setting; did you mean pipeline.rollout_workers?",
        ),
        ("port = 'x'", "rollout.toml:1: port: "),
        ("port = 99999", "rollout.toml:1: port: "),
        ("[sandbox]\nprovider = 'chroot'", "rollout.toml:1: sandbox: "),
        ("[sandbox]\nmemroy = 1", "rollout.toml:2: sandbox.memroy: unknown setting"),
        ("pipeline = {init_workers = 0}", "rollout.toml:1: pipeline.init_workers: "),
        ("[[backends]]\nurl = 'x'", "rollout.toml:1: backends.0.url: "),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(empty_folder, toml, says):
    (empty_folder / "rollout.toml").write_text(toml)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert f"{empty_folder}/{says}" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ROLLOUT_PORT", "x", "ROLLOUT_PORT: port: "),
        ("ROLLOUT_PROT", "1", "ROLLOUT_PROT is not a setting; did you mean ROLLOUT_PORT?"),
        ("ROLLOUT_PIPELINE__INIT_WORKERS", "0", "ROLLOUT_PIPELINE__INIT_WORKERS: pipeline.init_workers: "),
        ("ROLLOUT_PIPELINE", '{"init_worker": 2}', "ROLLOUT_PIPELINE: pipeline.init_worker: unknown"),
        ("ROLLOUT_ENVIRONMENTS", "[./mine", "ROLLOUT_ENVIRONMENTS: environments: not valid JSON"),
        ("ROLLOUT_POOLS", "judge", "ROLLOUT_POOLS is not valid JSON"),
        (
            "ROLLOUT_EMBEDDED__POOLS",
            '{"judge": calc-base}',
            "ROLLOUT_EMBEDDED__POOLS: embedded.pools: not valid JSON",
        ),
        ("ROLLOUT_BACKENDS", "gpu-1:30000", "ROLLOUT_BACKENDS: backends.0.url"),
        ("ROLLOUT_SANDBOXES__WARM", "3", "ROLLOUT_SANDBOXES__WARM: sandboxes.warm: "),
        ("ROLLOUT_SANDBOX__MEMROY", "1", "ROLLOUT_SANDBOX__MEMROY is not a setting"),
    ],
)
def test_a_mistake_in_a_variable_names_the_variable(monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert str(caught.value).startswith(says)


def test_a_key_of_the_sandbox_needs_no_provider(empty_folder, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SANDBOX__RUN_DIR", "/run/mine")
    assert load_settings().sandbox.run_dir == Path("/run/mine")
    (empty_folder / "rollout.toml").write_text("[sandbox]\nuser = 'agent'\n")
    sandbox = load_settings().sandbox
    assert (sandbox.provider, sandbox.user, sandbox.run_dir) == ("apptainer", "agent", Path("/run/mine"))


def test_variables_of_the_scripts_are_accepted(monkeypatch):
    without = load_settings().model_dump()
    monkeypatch.setenv("ROLLOUT_PYTHON", "python3.12")
    monkeypatch.setenv("ROLLOUT_SGLANG_ENV", "/opt/sglang")
    assert load_settings().model_dump() == without


@pytest.mark.parametrize(
    "value",
    [
        "frozen-1=calc-tuned,frozen-2=/models/old=er",
        '["frozen-1=calc-tuned", "frozen-2=/models/old=er"]',
        '{"frozen-1": "calc-tuned", "frozen-2": "/models/old=er"}',
    ],
)
def test_models_of_further_pools_in_a_variable(value, monkeypatch):
    monkeypatch.setenv("ROLLOUT_EMBEDDED__POOLS", value)
    assert load_settings().embedded.pools == {"frozen-1": "calc-tuned", "frozen-2": "/models/old=er"}


def test_a_variable_may_name_a_key_of_a_table(monkeypatch):
    monkeypatch.setenv("ROLLOUT_EMBEDDED__POOLS__JUDGE", "calc-base")
    monkeypatch.setenv("ROLLOUT_POOLS__JUDGE__MAX_IN_FLIGHT", "8")
    settings = load_settings()
    assert (settings.embedded.pools, settings.pools["judge"].max_in_flight) == ({"judge": "calc-base"}, 8)


def test_models_of_further_pools_in_the_file_and_by_flags(empty_folder):
    (empty_folder / "rollout.toml").write_text('[embedded.pools]\nfrozen-1 = "calc-base"\n')
    assert load_settings().embedded.pools == {"frozen-1": "calc-base"}
    flags = {"embedded": {"pools": ["frozen-2=calc-tuned"]}}
    assert load_settings(**flags).embedded.pools == {"frozen-2": "calc-tuned"}


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("frozen-1", "not of the form NAME=VALUE"),
        ("=calc-tuned", "not of the form NAME=VALUE"),
        ("frozen-1=", "not of the form NAME=VALUE"),
        ("policy=calc-base", "is the key `model`"),
        ("a pool=calc-base", "embedded.pools"),
    ],
)
def test_a_bad_model_of_a_pool_is_refused_by_its_flag(flag, says):
    with pytest.raises(ConfigurationError, match=f"--pool-model.*{says}"):
        load_settings(embedded={"pools": [flag]})
    with pytest.raises(ConfigurationError, match="given twice"):
        load_settings(embedded={"pools": ["frozen-1=a", "frozen-1=b"]})
