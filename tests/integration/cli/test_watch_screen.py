"""`watch` takes the whole terminal, obeys its keys, follows its size, and leaves it as it was."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.processes.service import Running, scripted_engine, service
from tests.support.terminal.terminal import Terminal, terminal

ALTERNATE, ORDINARY, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("watched")
    with scripted_engine(folder, delay=0.0) as engine, service(folder, engine.url) as running:
        running.wait_until_ready()
        yield running


def watch(server: Running, *flags: str) -> list[str]:
    return [sys.executable, "-m", "rollout_service.cli", "watch", "--url", server.url, *flags]


def is_restored(shown: Terminal) -> bool:
    end = shown.drawn[shown.drawn.rindex(ALTERNATE) :]
    return ORDINARY in end and end.rindex(CURSOR) > 0 and shown.settings == shown.before


def test_the_view_shows_the_service_and_obeys_its_keys(server):
    with terminal(watch(server)) as shown:
        shown.until(lambda: "init" in shown.frame and "q quit" in shown.frame)
        for part in ("ready", "rollouts/s", "evaluate", "engine", "sandboxes", "127.0.0.1"):
            assert part in shown.frame
        body = {"task": {"environment": "echo", "instance": {"number": 1}}, "rollout_id": "seen"}
        httpx.post(f"{server.url}/v1/rollouts?wait=60", json=body, timeout=90).raise_for_status()
        shown.until(lambda: "rollout.state seen" in shown.frame and "1 completed" in shown.frame)
        shown.type("p")
        shown.until(lambda: "PAUSED" in shown.frame)
        shown.type("p")
        shown.until(lambda: "PAUSED" not in shown.frame)
        shown.type("?")
        shown.until(lambda: "pause the view, not the service" in shown.frame)
        shown.type("?q")
        assert shown.ended() == 0
        assert is_restored(shown)


def test_the_view_follows_the_size_of_the_window(server):
    with terminal(watch(server), size=(140, 50)) as shown:
        shown.until(lambda: "q quit" in shown.frame)
        shown.resize(50, 12)
        shown.drawn = ""
        shown.until(lambda: 0 < len(shown.frame.splitlines()) <= 12 and "q quit" in shown.frame)
        assert max(len(line) for line in shown.frame.splitlines()) <= 50
        shown.type("q")
        assert shown.ended() == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda shown: shown.type("\x03"), 130), (lambda shown: shown.process.terminate(), 143)],
    ids=["interrupt", "termination"],
)
def test_a_signal_leaves_the_terminal_as_it_was(server, end, code):
    with terminal(watch(server)) as shown:
        shown.until(lambda: "q quit" in shown.frame)
        end(shown)
        assert shown.ended() == code
        assert is_restored(shown)
        assert "Traceback" not in shown.drawn


def test_without_colors_nothing_but_the_cursor_is_moved(server):
    with terminal(watch(server), NO_COLOR="1") as shown:
        shown.until(lambda: "q quit" in shown.frame)
        shown.type("q")
        assert shown.ended() == 0
        assert not {one for one in shown.sequences if one.endswith("m")}


@pytest.mark.parametrize("command", [("backends", "list"), ("nodes", "list"), ("runs", "list"), ("env", "list")])
def test_no_color_is_obeyed_on_a_terminal(server, command):
    arguments = [sys.executable, "-m", "rollout_service.cli", *command, "--url", server.url]
    with terminal(arguments, NO_COLOR="1") as shown:
        assert shown.ended() == 0
        assert shown.drawn.strip()
        assert not shown.sequences


def test_the_list_of_nodes_ends_with_what_one_more_would_bring(server):
    command = [sys.executable, "-m", "rollout_service.cli", "nodes", "list", "--url", server.url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1].startswith("One more node would bring nothing: ")
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert found["next_node"]["message"] == said.splitlines()[-1].strip()
    assert [node["state"] for node in found["nodes"]] == ["ready"]
    assert [stage["stage"] for stage in found["nodes"][0]["stages"]] == ["init", "rollout", "evaluate"]


def test_a_server_that_is_gone_is_said_to_be(tmp_path):
    with scripted_engine(tmp_path, delay=0.0) as engine, service(tmp_path, engine.url) as own:
        own.wait_until_ready()
        with terminal(watch(own)) as shown:
            shown.until(lambda: "q quit" in shown.frame)
            own.stop()
            own.ended(30)
            shown.until(lambda: "no answer for" in shown.frame)
            assert "evaluate" in shown.frame  # what was known last stays
            shown.type("q")
            assert shown.ended() == 0
            assert is_restored(shown)


def test_the_tokens_of_a_rollout_are_shown(server):
    body = {"task": {"environment": "echo", "instance": {"number": 1}}, "rollout_id": "colored"}
    httpx.post(f"{server.url}/v1/rollouts?wait=60", json=body, timeout=90).raise_for_status()
    command = [sys.executable, "-m", "rollout_service.cli", "show", "colored", "--url", server.url]
    piped = subprocess.run([*command, "--color", "turn"], capture_output=True, text=True, check=True).stdout
    assert "segment 0, first" in piped
    assert '⟦turn 0: <tool_call>\n{"name": "bash"' in piped
    with terminal([*command, "--color", "mask", "--no-pager"]) as shown:
        assert shown.ended() == 0
        assert "\x1b[32m<tool_call>" in shown.drawn
    with terminal([*command, "--color", "mask"], PAGER="grep -c tool_call", size=(80, 5)) as shown:
        assert shown.ended() == 0
        assert "<tool_call>" not in shown.drawn  # the pager got it
    with terminal([*command, "--color", "logprob", "--no-pager"], NO_COLOR="1") as shown:
        assert shown.ended() == 0
        assert "<tool_call>" in shown.drawn
        assert not shown.sequences
