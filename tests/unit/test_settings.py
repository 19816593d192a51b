"""Settings: who wins, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from rollout_service.errors import ConfigurationError
from rollout_service.settings import Settings, is_loopback, known_keys, load_settings


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_win_over_variables_over_the_file(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("prot = 1", "did you mean port"),
        ("[pipeline]\nrollout_worker = 1", "did you mean pipeline.rollout_workers"),
        ("port = 'x'", "port: "),
        ("port = 99999", "port: "),
        ("port = ", "not valid TOML"),
        ("[sandbox]\nprovider = 'chroot'", "sandbox"),
    ],
)
def test_a_bad_file_is_refused_by_the_key_at_fault(empty_folder: Path, toml: str, says: str) -> None:
    (empty_folder / "rollout.toml").write_text(toml)
    with pytest.raises(ConfigurationError, match=says):
        load_settings()


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_PROT", "1")
    with pytest.raises(ConfigurationError, match="did you mean ROLLOUT_PORT"):
        load_settings()


def test_a_file_that_was_named_must_exist(empty_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no settings file"):
        load_settings(empty_folder / "other.toml")


def test_beyond_loopback_needs_a_key() -> None:
    with pytest.raises(ConfigurationError, match="no key is set"):
        load_settings(host="0.0.0.0")
    assert load_settings(host="0.0.0.0", keys=["secret"]).keys[0].get_secret_value() == "secret"
    assert "secret" not in repr(load_settings(host="0.0.0.0", keys=["secret"]))


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_the_local_provider_must_be_asked_for() -> None:
    assert Settings().sandbox.provider == "apptainer"
    assert load_settings(sandbox={"provider": "local"}).sandbox.provider == "local"


def test_the_ceiling_of_sandboxes_is_what_the_stages_can_hold_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_settings(pipeline={"init_workers": 1, "rollout_queue": 1, "rollout_workers": 8})
    assert settings.sandbox_ceiling == 1 + 1 + 8 + 4 + 256 + 4
    monkeypatch.setenv("ROLLOUT_SANDBOXES__CEILING", "12")
    monkeypatch.setenv("ROLLOUT_SANDBOXES__WARM__SIZE", "3")
    settings = load_settings()
    assert (settings.sandbox_ceiling, settings.sandboxes.warm.size) == (12, 3)
    with pytest.raises(ConfigurationError, match="did you mean sandboxes\\.ceiling"):
        load_settings(sandboxes={"ceilling": 3})


def test_known_keys_are_dotted() -> None:
    assert {"port", "pipeline", "pipeline.init_workers", "embedded.model"} <= set(known_keys(Settings))
