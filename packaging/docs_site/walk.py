"""The files of the service that a rollout, a call at the gateway, and a live turn pass, in their order: `scripts/walk`.

A file is passed if one of its functions runs between the first request of the walk and its last answer. Each walk is
done several times, after one that is not counted, and only files that were passed each time are printed, so that what
the service does in the background meanwhile is left out. The client and the engine run in other processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from textwrap import fill
from types import CodeType, FrameType

import httpx

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from api_schemas.sessions import OpenedSession, SessionRequest
from api_schemas.tasks import Task
from rollout_client import SyncRolloutClient
from rollout_service.server.api.serve import serve
from rollout_service.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("api_schemas", "rollout_service", "sandboxes"))
ROUNDS = 8
TITLES = {
    "rollout": "A rollout of `calc`, from `POST /v1/rollouts` to its result",
    "gateway": "A call of Chat Completions in a live session",
    "live": "A live turn, from the opening of its session to the batch that has it",
}
PAGE = """# Three walks through the code

The files that run between a request and its answer, in the order in which each is first passed. Those without a package
are of `rollout_service`; the [architecture](../architecture.md) says why each is there. `scripts/walk` watches a real
service, with an engine in a process of its own and sandboxes on the host, and `scripts/walk --page` writes this page.

Nobody needs to read a walk from end to end: begin with the file that your change is about, and go on to both sides.
"""

Walk = Callable[[], object]


class Steps:
    """A profile function: keeps the files whose functions run while it is `on`, in the order of their first calls."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}
        self._known: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            name = code.co_filename
            is_ours = name.startswith(PACKAGES) and code.co_name != "<module>"
            self._known[code] = str(Path(name).relative_to(ROOT)) if is_ours else None
        if (file := self._known[code]) is not None:
            self.files.setdefault(file)

    def obey(self) -> None:
        """Begin with a line of stdin, print what was found with the next, and so on."""
        while sys.stdin.readline():
            self.files.clear()
            self.on = True
            sys.stdin.readline()
            self.on = False
            print(json.dumps(list(self.files)), flush=True)


def serve_watched(folder: Path) -> None:
    """Run the service in this process, with its calls watched."""
    steps = Steps()
    threading.Thread(target=steps.obey, daemon=True).start()
    threading.setprofile(steps)
    sys.setprofile(steps)
    settings = load_settings(port=0, sandbox={"provider": "local"}, state_dir=folder, log_level="error")
    serve(settings, explain=print, port_file=folder / "address")


class Service:
    """The service in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], client: SyncRolloutClient) -> None:
        self.client = client
        self._process = process

    def files(self, walk: Walk) -> list[str]:
        """Return the files that a walk passes each time."""
        walk()
        rounds = [self._watch(walk) for _ in range(ROUNDS)]
        return [file for file in rounds[0] if all(file in other for other in rounds)]

    def _watch(self, walk: Walk) -> list[str]:
        print(file=self._process.stdin, flush=True)
        walk()
        print(file=self._process.stdin, flush=True)
        found: list[str] = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        return found


@contextmanager
def running_service() -> Iterator[Service]:
    """Start the service, and yield it once it is ready."""
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "docs_site.walk", "--serve", folder]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                while not (address := Path(folder, "address")).exists():
                    if process.poll() is not None:
                        sys.exit("the service did not start")
                    time.sleep(0.05)
                with SyncRolloutClient(address.read_text()) as client:
                    while not client.readiness().ready:
                        time.sleep(0.05)
                    yield Service(process, client)
            finally:
                process.terminate()


def take_walks(chosen: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the files of each walk."""
    with running_service() as service:
        return {name: service.files(WALKS[name](service.client)) for name in TITLES if name in chosen}


def rollout(client: SyncRolloutClient) -> Walk:
    """Return the walk of a rollout from its request to its result."""
    (instance,) = client.dataset("calc", limit=1)
    task = Task(environment="calc", instance=instance)
    return lambda: client.run(RolloutRequest(task=task))


def gateway(client: SyncRolloutClient) -> Walk:
    """Return the walk of a call at the gateway."""
    opened = client.open_session(SessionRequest(user="reader"))
    return lambda: _ask(opened)


def live(client: SyncRolloutClient) -> Walk:
    """Return the walk of a turn from its session to its batch."""
    delivery = LiveDelivery(max_user_share=1.0, max_session_share=1.0)
    source = InlineTasks(tasks=[], open=True)
    run = client.create_run(
        RunRequest(run_id="walk", source=source, live=delivery, group_size=1, batch_size=1, filters=[])
    )

    def walk() -> None:
        opened = client.open_session(SessionRequest(user="reader", train=True))
        _ask(opened)
        client.feedback(opened.session.session_id, 1.0)
        client.end_session(opened.session.session_id)
        if (leased := run.lease(timeout_seconds=30)) is None:
            sys.exit("the turn came in no batch")
        leased.ack()

    return walk


WALKS: Mapping[str, Callable[[SyncRolloutClient], Walk]] = {
    "rollout": rollout,
    "gateway": gateway,
    "live": live,
}


def _ask(opened: OpenedSession) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}
    headers = {"authorization": f"Bearer {opened.key}"}
    answer = httpx.post(f"{opened.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()


def by_folder(files: Sequence[str]) -> str:
    """Return files in order as Markdown, those of one folder that follow each other together."""
    paths = (Path(file.removeprefix("rollout_service/")) for file in files)
    groups = groupby(paths, key=lambda path: path.parent)
    parts = (f"{_prefix(folder)}{', '.join(path.stem for path in group)}" for folder, group in groups)
    return fill(" \u2192 ".join(parts), width=120, break_long_words=False, break_on_hyphens=False)


def _prefix(folder: Path) -> str:
    return "" if folder == Path() else f"`{folder}/` "


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(prog="scripts/walk")
    parser.add_argument("walk", nargs="*", choices=[[], *TITLES], help="which; by default all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_watched(arguments.serve)
        return
    found = take_walks(arguments.walk or list(TITLES))
    if arguments.page:
        print(PAGE)
        print("\n\n".join(f"## {TITLES[name]}\n{len(f)} files.\n\n{by_folder(f)}" for name, f in found.items()))
    else:
        print("\n\n".join("\n  ".join([f"{name}: {len(f)} files", *f]) for name, f in found.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
