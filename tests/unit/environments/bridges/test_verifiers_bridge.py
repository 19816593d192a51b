"""The bridge to verifiers lists tasksets once, hands the library exact conversations, and takes nothing for a zero."""

import json
from pathlib import Path

import pytest

from api_schemas.trajectories import FinishReason, Trajectory
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.environments.bridges.process import library_process
from rollout_service.environments.bridges.verifiers.catalog import (
    VERIFIERS,
    Listing,
    list_tasksets,
)
from rollout_service.environments.bridges.verifiers.declaration import TasksetTable, read_declaration
from rollout_service.environments.bridges.verifiers.environment import (
    library_turns,
    open_tools,
    read_score,
    read_state,
)
from rollout_service.environments.libraries import Library
from rollout_service.environments.registry import load_declared
from rollout_service.tokens import ToolSpec
from tests.support.samples import segment
from tests.support.scripts import write_script

TABLES = [TasksetTable(id="words")]
LISTED = {"tasksets": [{"tasks": [{"key": "k", "data": {"prompt": "x"}}]}]}
DECLARED = 'kind = "verifiers"\n[[taskset]]\nid = "words"\n'


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library whose interpreter prints what is in the file `says`, and counts how often it was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lock = tmp_path / "requirements.lock"
    lock.write_text("# nothing\n")
    library = Library("verifiers", lock)
    python = library.folder / "bin" / "python"
    write_script(python, f'echo asked >>{tmp_path}/asked\ncat {tmp_path}/says\necho "no luck" >&2\n')
    says(tmp_path, json.dumps(LISTED))
    return library


def says(folder: Path, text: str) -> None:
    (folder / "says").write_text(text)


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


def list_words(library: Library, folder: Path) -> list[Listing]:
    package = folder / "packages"
    package.mkdir(exist_ok=True)
    return list_tasksets(library, TABLES, [package], folder)


def test_a_taskset_is_listed_again_only_when_its_package_changes(library, tmp_path):
    first = list_words(library, tmp_path)
    assert first[0].tasks[0].key == "k"
    assert list_words(library, tmp_path) == first
    assert asked(tmp_path) == 1
    (tmp_path / "packages" / "words.py").write_text("# new\n")
    list_words(library, tmp_path)
    assert asked(tmp_path) == 2


def test_a_listing_that_cannot_be_kept_is_used_all_the_same(library, tmp_path):
    (tmp_path / "cache" / "rollout-service" / "tasksets").touch()
    assert list_words(library, tmp_path)[0].tasks[0].key == "k"


def test_a_listing_with_a_problem_is_not_kept(library, tmp_path):
    says(tmp_path, json.dumps({"tasksets": [{"problem": "no network"}]}))
    assert list_words(library, tmp_path)[0].problem == "no network"
    says(tmp_path, json.dumps(LISTED))
    assert list_words(library, tmp_path)[0].problem is None


@pytest.mark.parametrize(
    ("text", "why"), [("", "ended while it listed.*no luck"), ('{"error": "x"}', "cannot be listed.*error")]
)
def test_a_library_that_lists_nothing_is_an_error(library, tmp_path, text, why):
    says(tmp_path, text)
    with pytest.raises(ConfigurationError, match=f"(?s){why}"):
        list_words(library, tmp_path)


def test_without_the_library_the_error_names_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "environment.toml").write_text(DECLARED)
    with pytest.raises(ConfigurationError) as caught:
        load_declared(tmp_path)
    assert "rollout-service env install verifiers" in caught.value.hint
    assert not VERIFIERS.is_installed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('kind = "verifiers"\n', "the key taskset is missing"),
        (DECLARED + 'ids = "x"\n', "there is no key taskset.0.ids"),
        (DECLARED + '[[taskset]]\nid = "words"\n', "two tables .* are named 'words'"),
        ('packages = ["lib"]\n' + DECLARED, "there is no folder .*lib"),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_key(tmp_path, text, why):
    (tmp_path / "environment.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        read_declaration(tmp_path)


def test_turns_have_the_ids_that_were_sampled():
    columns = {"logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0], "turn_ids": [-1, -1, 0, 0, -1, 1]}
    one = segment([1, 2, 30, 31, 4, 50], [0, 0, 1, 1, 0, 1], **columns)
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    trajectory = Trajectory(segments=[one], messages=[], finish_reasons=reasons, fork_counts={})
    first, second, unrecorded = library_turns(trajectory)
    assert first == {
        "truncated": False,
        "tokens": {"prompt_ids": [1, 2], "completion_ids": [30, 31], "completion_logprobs": [-0.5, -0.25]},
    }
    assert second["truncated"]
    assert second["tokens"]["prompt_ids"] == [1, 2, 30, 31, 4]
    assert unrecorded["tokens"] is None


def test_a_metric_never_hides_a_reward_of_the_same_name():
    score = read_score({"reward": 0.5, "rewards": {"a": 1.0}, "metrics": {"a": 7.0, "b": 2.0}})
    assert score.reward == 0.5
    assert score.parts == {"a": 1.0, "metric_a": 7.0, "b": 2.0}


TOOL: ToolSpec = {"type": "function", "function": {"name": "add", "parameters": {}}}
REPLIES = """
for reply in {replies!r}:
    input()
    print(reply, flush=True)
"""


async def test_other_tools_than_were_listed_are_a_failure():
    program = REPLIES.format(replies=['{"tools": ["sub"]}'])
    async with library_process(["/usr/bin/env", "python3", "-c", program], "echo") as process:
        with pytest.raises(EnvironmentFailedError, match=r"other tools than .* was listed with: sub"):
            await open_tools(process, {}, [TOOL])


async def test_the_state_is_read_after_the_reply_to_a_call_that_was_cut_off():
    program = REPLIES.format(replies=['{"text": "late"}', '{"state": "{}"}'])
    async with library_process(["/usr/bin/env", "python3", "-c", program], "echo") as process:
        assert await read_state(process) == "{}"
