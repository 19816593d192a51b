"""After kill -9 of the service, rollouts continue from their last turns, token for token."""

import json
import signal
from collections import Counter

import httpx
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing.engine_turn import EngineTurn, Fault
from rollout_service.testing.script import Replies
from rollout_service.testing.sglang_engine import ScriptedEngine
from tests.support.processes.service import Running, eventually, service
from tests.support.turns import called, turn_of

ROLLOUTS, TURNS = 8, 10
TURN_SECONDS = 0.4
KEPT_SHARE = 0.9
MODEL = policy_folder("calc-tuned")
CONFIG = f"[pipeline]\ninit_workers = 4\nrollout_workers = {ROLLOUTS}\n[sandboxes.pressure]\nenabled = false\n"


class CountingEngine(ScriptedEngine):
    """Answers every turn with a different call, and counts how often it has answered each prompt."""

    def __init__(self) -> None:
        commands = [f"echo step {number} | tee -a steps; wc -l < steps" for number in range(TURNS)]
        texts = [turn_of(called("bash", command=command)) for command in commands]
        vocab_size = json.loads((MODEL / "config.json").read_bytes())["vocab_size"]
        script = Replies.from_texts(texts, MODEL)
        super().__init__(script, latency=TURN_SECONDS, vocab_size=vocab_size, model_path=MODEL)
        self.answered: Counter[tuple[int, ...]] = Counter()

    def _answer(self, turn: EngineTurn, fault: Fault | None) -> web.Response:
        self.answered[tuple(turn.asked.ids)] += 1
        return super()._answer(turn, fault)


@pytest.mark.timeout(300)
def test_kill_9_in_mid_rollout_costs_no_finished_turn(tmp_path):
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(CountingEngine()) as engine:
        with service(tmp_path, engine.url, CONFIG, turns=TURNS) as running:
            for number in range(ROLLOUTS):
                running.submit(f"disturbed-{number}").raise_for_status()
            eventually(lambda running=running: saved(running) >= ROLLOUTS * TURNS // 2, running.log_file)
            # Answers that began together end together; a kill at that very moment would cost each rollout a turn.
            portal.call(engine._hold_turns)
            eventually(lambda running=running: engine.answered.total() - saved(running) <= 2, running.log_file)
            running.stop(signal.SIGKILL)
            running.ended(30)
            finished = engine.answered.total()
            portal.call(engine._release_turns)
        with service(tmp_path, engine.url, CONFIG, turns=TURNS) as running:
            results = wait_for_all(running, "disturbed")
            lost = engine.answered.total() - len(engine.answered)
            for number in range(ROLLOUTS):
                running.submit(f"undisturbed-{number}").raise_for_status()
            expected = wait_for_all(running, "undisturbed")
            counted = running.metric("rollout_resumed_turns_total")
    assert lost <= (1 - KEPT_SHARE) * finished, f"{lost} of {finished} finished turns were sampled again"
    assert counted == finished - lost
    for result, undisturbed in zip(results, expected, strict=True):
        assert result["usage"] == undisturbed["usage"]
        assert result["trajectory"] == undisturbed["trajectory"]
        assert [result["attempt"], undisturbed["attempt"]] == [2, 1]
        assert "step 9" in result["trajectory"]["messages"][-1]["tool_calls"][0]["raw"]


def saved(running: Running) -> float:
    """Return how many turns are saved."""
    return running.metric('rollout_saved_turns_total{outcome="saved"}')


def wait_for_all(running: Running, name: str) -> list[dict]:
    results = []
    for number in range(ROLLOUTS):
        url = f"{running.url}/v1/rollouts/{name}-{number}"
        eventually(lambda url=url: httpx.get(url, timeout=30).json()["state"] == "completed", running.log_file)
        result = httpx.get(url, timeout=30).json()
        result["trajectory"] = httpx.get(f"{url}/trajectory", timeout=30).raise_for_status().json()
        results.append(result)
    return results
