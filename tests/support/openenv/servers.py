"""Real servers of OpenEnv, and OpenEnv's own client. It runs in an environment with the package, not in this project's.

It prints its address, and then plays what it is asked to, one JSON value a line, until its input ends:
`{"url", "reset", "actions"}` -> `{"first", "observations", "rewards", "done"}`, or `{"error"}`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from starlette.responses import RedirectResponse

MAX_GUESSES = 5
PING_SECONDS = 0.5


class Guess(Action):
    """Guess the number."""

    number: int


class Answer(Observation):
    text: str


class HigherLower(Environment[Guess, Answer, State]):
    """A number to guess; the reward is 1 at the end, or 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 100, **_: Any) -> Answer:
        self._secret = random.Random(seed).randint(1, max(most, 1))
        self._state = State(episode_id=episode_id, step_count=0)
        return Answer(text=f"A number from 1 to {most}.", done=most < 1)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        self._state.step_count += 1
        right = action.number == self._secret
        text = "right" if right else "higher" if action.number < self._secret else "lower"
        done = right or self._state.step_count >= MAX_GUESSES
        return Answer(text=text, done=done, reward=float(right) if done else None)

    @property
    def state(self) -> State:
        return self._state


class Say(Action):
    message: str


class Heard(Observation):
    words: list[str]
    left: int


class Talk(Environment[Say, Heard, State]):
    """Words are worth something each; some have effects."""

    REWARDS = {"please": 0.75, "no": -0.5}

    def reset(self, seed: int | None = None, episode_id: str | None = None, turns: int = 3, **_: Any) -> Heard:
        self._left = turns
        return Heard(words=[], left=turns)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        words = action.message.split()
        if "crash" in words:
            raise RuntimeError("the talk broke down")
        if "hang" in words:
            threading.Event().wait(3)
        self._left -= 1
        reward = None if "mute" in words else sum(self.REWARDS.get(word, 0.0) for word in words)
        return Heard(words=words, left=self._left, done=self._left == 0, reward=reward, metadata={"secret": "x"})

    @property
    def state(self) -> State:
        return State()


def servers() -> FastAPI:
    """Return both servers, and some that are none."""
    app = FastAPI()
    app.mount("/guess", create_fastapi_app(HigherLower, Guess, Answer, max_concurrent_envs=4, env_name="guess"))
    app.mount("/talk", create_fastapi_app(Talk, Say, Heard, env_name="talk"))
    rude = FastAPI()

    @rude.get("/schema")
    async def schema() -> dict[str, str]:
        return {"action": "none"}

    @rude.websocket("/ws")
    async def babble(websocket: WebSocket) -> None:
        await websocket.accept()
        message = json.loads(await websocket.receive_text())
        if message["data"].get("leave"):
            await websocket.close()
        else:
            await websocket.send_text(message["data"].get("say", "hello"))
            await websocket.receive_text()

    app.mount("/rude", rude)

    @app.get("/moved/{path}")
    async def moved(path: str) -> RedirectResponse:
        return RedirectResponse(f"/guess/{path}")

    return app


async def play(url: str, reset: dict[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    async with GenericEnvClient(base_url=url) as env:
        result = await env.reset(**reset)
        first, observations, rewards = result.observation, [], []
        for action in actions:
            result = await env.step(action)
            observations.append(result.observation)
            rewards.append(result.reward)
            if result.done:
                break
        return {"first": first, "observations": observations, "rewards": rewards, "done": result.done}


def tell(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(servers(), log_level="error", ws_ping_interval=PING_SECONDS, ws_ping_timeout=PING_SECONDS)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    tell({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
    for line in sys.stdin:
        try:
            reply = asyncio.run(play(**json.loads(line)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            reply = {"error": f"{type(error).__name__}: {error}"}
        tell(reply)
    server.should_exit = True


if __name__ == "__main__":
    main()
