"""The service and a scripted engine as processes, for tests that stop, restart and break them."""

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from rollout_service.engines.shipped import policy_folder
from tests.support.turns import called, turn_of

START_SECONDS = 90.0
SHIPPED = policy_folder("calc-tuned")
GREETING = turn_of(called("bash", command="echo hello"))
ENVIRONMENT = """
name = "echo"
image = "base"
prompt = "Say {{{{ instance.number }}}}."
tools = ["bash"]
[limits]
max_turns = {turns}
[evaluate]
command = "echo '{{\\"reward\\": 1.0}}' > $ROLLOUT_RESULT"
"""


@dataclass
class Running:
    """A process that answers at a URL."""

    process: psutil.Popen
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        """The contents of its log."""
        return self.log_file.read_text()

    def said_of_the_store(self) -> list[str]:
        """Return the events of a log in JSON that say how the store works, and not what was done about its rollouts."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        about = re.compile("store|Redis|folder")
        said = [line for line in lines if "queued_again" not in line]
        return [line["event"] for line in said if about.search(f"{line['event']} {line.get('error')}")]

    def get(self, path: str, **params: Any) -> Any:
        """Return the JSON of an answer."""
        return httpx.get(f"{self.url}{path}", params=params, timeout=60).raise_for_status().json()

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self.url}/ready", timeout=60)

    def wait_until_ready(self) -> None:
        """Wait until rollouts can begin: a service listens before it has its engine."""
        eventually(lambda: self.ready().is_success, self)

    def submit(self, name: str, environment: str = "echo", *, wait: float = 0) -> httpx.Response:
        """Submit a rollout, whose instance is the number at the end of its name."""
        number = int(re.sub(r"\D", "", name) or 1)
        order = {"rollout_id": name, "task": {"environment": environment, "instance": {"number": number}}}
        return httpx.post(f"{self.url}/v1/rollouts", params={"wait": wait}, json=order, timeout=90)

    def submit_all(self, numbers: Iterable[int]) -> None:
        """Submit rollouts with the names r0, r1 and so on."""
        for number in numbers:
            self.submit(f"r{number}").raise_for_status()

    def counts(self) -> dict[str, int]:
        """Return how many rollouts are in each state."""
        return self.get("/v1/rollouts", limit=1)["counts"]

    def state(self, name: str) -> str:
        return self.get(f"/v1/rollouts/{name}")["state"]

    def events(self, after: str = "0") -> list[dict[str, Any]]:
        """Return the events after a position, which has a number for each shard of the store."""
        query = {"after": after, "follow": "false"}
        sent = httpx.get(f"{self.url}/v1/events", params=query, timeout=60).raise_for_status().text
        return [json.loads(line[5:]) for line in sent.splitlines() if line.startswith("data:")]

    def ends(self, after: str = "0") -> Counter[str]:
        """Return how often each rollout has ended, as the events say."""
        ended = ("completed", "failed", "cancelled")
        return Counter(one["subject"] for one in self.events(after) if one["data"].get("state") in ended)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), 0.0)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def ended(self, seconds: float) -> int:
        """Wait until it has ended; return its exit code."""
        code = self.process.wait(seconds)
        assert isinstance(code, int)
        return code


@contextmanager
def running(
    name: str, arguments: Sequence[str], folder: Path, before: Sequence[str] = (), **variables: str
) -> Iterator[Running]:
    """Run a module that writes its URL to a file; kill it at the end of the block if it still runs.

    `before` is a command that starts it, such as `prlimit`.
    """
    address, log = folder / f"{name}.address", folder / f"{name}.log"
    address.unlink(missing_ok=True)
    command = [*before, sys.executable, "-m", *arguments]
    with log.open("ab") as output:
        process = psutil.Popen(command, stdout=output, stderr=output, cwd=folder, env=os.environ | variables)
    try:
        eventually(lambda: address.exists() or process.poll() is not None, log)
        assert address.exists(), log.read_text()[-4_000:]
        yield Running(process, address.read_text().strip(), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def scripted_engine(folder: Path, *turns: str, delay: float = 0.0, name: str = "engine", model: str | Path = SHIPPED):
    """Run an engine whose turns take `delay` seconds."""
    arguments = ["rollout_service.testing", "--delay", f"{delay:g}", "--model", str(model)]
    arguments += [part for turn in turns or (GREETING,) for part in ("--turn", turn)]
    return running(name, [*arguments, "--address", str(folder / f"{name}.address")], folder)


@contextmanager
def service(
    folder: Path,
    engine_url: str | None,
    config: str = "",
    *flags: str,
    turns: int = 1,
    sandbox: str = "local",
    init: str = "",
) -> Iterator[Running]:
    """Run the service with the environment `echo`, whose rollouts have at most `turns` turns.

    `init` is the table of its `[init]`.
    """
    environment = folder / "echo"
    environment.mkdir(exist_ok=True)
    (environment / "environment.toml").write_text(ENVIRONMENT.format(turns=turns) + init)
    (folder / "service.toml").write_text(config)
    arguments = [
        "rollout_service.cli",
        "serve",
        "--config",
        str(folder / "service.toml"),
        "--sandbox",
        sandbox,
    ]
    arguments += ["--state-dir", str(folder / "state"), "--port-file", str(folder / "service.address")]
    arguments += ["--engine", "none", "--environment", str(environment), *flags]
    arguments += ["--backend", engine_url] if engine_url else []
    arguments += [] if "--port" in flags else ["--port", "0"]
    with running("service", arguments, folder) as server:
        # The log is kept through restarts: each start adds a line.
        eventually(lambda: server.url in server.log or server.process.poll() is not None, server.log_file)
        yield server


def eventually(
    condition: Callable[[], Any],
    where: Running | Path | Iterable[Running] = (),
    seconds: float = START_SECONDS,
) -> None:
    """Wait until a condition holds, or fail with the ends of the logs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            shown = [where] if isinstance(where, Running | Path) else where
            logs = [one if isinstance(one, Path) else one.log_file for one in shown]
            raise AssertionError([log.read_text()[-4_000:] for log in logs])
        time.sleep(0.02)
