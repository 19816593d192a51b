"""Runs the shell blocks of a page as a reader does, who pastes one after the other and opens terminals as needed.

A block that starts a server is done when the server listens; the next is pasted into a new terminal. All is over with
the page: its processes have namespaces of their own, and so has its network if it starts a server, which then gets the
port that it wants.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.support.pages.blocks import ROOT, ShellBlock

BLOCK_SECONDS = 150.0
SERVER_END_SECONDS = 30.0
END_CHARS = 5_000
PASTED = "end of the block"
LISTENS = re.compile(r"\blistening\b.*address=http")
STARTS = re.compile(r"^(\w+=\S+ )?rollout-service serve", re.MULTILINE)
SERVES = re.compile(r"rollout-service serve|127\.0\.0\.1")


class Terminal:
    """A shell that ends at the first command that fails."""

    def __init__(self, enter: list[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log, self._pasted = log, 0
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*enter, "bash", "-e"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                text=True,
            )

    def paste(self, text: str, where: str) -> bool:
        """Run a block; return whether the terminal is free again, and not busy with a server."""
        self._pasted += 1
        start = len(self._shown())
        script = self._log.with_suffix(f".{self._pasted}.sh")
        script.write_text(text)
        self._process.stdin.write(f". {script} </dev/null\necho {PASTED}\n")
        self._process.stdin.flush()
        until = time.monotonic() + BLOCK_SECONDS
        while time.monotonic() < until:
            ended = self._process.poll() is not None
            shown = self._shown()[start:]
            if PASTED in shown:
                return True
            if LISTENS.search(shown) and not ended:
                return False
            assert not ended, f"{where} failed:\n{text}\n{shown[-END_CHARS:]}"
            time.sleep(0.05)
        raise AssertionError(f"{where} does not end:\n{text}\n{shown[-END_CHARS:]}")

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait until the server has ended; its shell ends with it."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if "serve" in child.cmdline():
                child.send_signal(signal.SIGINT)
        self._process.wait(SERVER_END_SECONDS)

    def close(self) -> None:
        """Close the terminal, whatever runs in it."""
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def _shown(self) -> str:
        return self._log.read_text(errors="replace")


def run_blocks(blocks: list[ShellBlock], folder: Path) -> None:
    """Run the blocks of a page in this empty folder, which gets what a checkout has.

    Raises:
        AssertionError: A block failed or did not end; the message has its end.
    """
    checkout = folder / "checkout"
    _fill(checkout)
    environment = _environment(folder)
    texts = [(text, f"{block.page}:{block.line}") for block in blocks for text in (block.after, block.text) if text]
    own_network = any(SERVES.search(text) for text, _ in texts)
    with ExitStack() as terminals, _namespaces(own_network=own_network) as enter:
        terminal: Terminal | None = None
        busy: Terminal | None = None
        for number, (text, where) in enumerate(texts):
            if busy and STARTS.search(text):
                busy.interrupt()
                busy = None
            if terminal is None:
                terminal = Terminal(enter, checkout, environment, folder / f"terminal-{number}.log")
                terminals.callback(terminal.close)
            if not terminal.paste(text, where):
                terminal, busy = None, terminal


@contextmanager
def _namespaces(*, own_network: bool) -> Iterator[list[str]]:
    """Yield the command that starts another within namespaces that end with the context."""
    network = ["--net"] if own_network else []
    flags = ["--pid", "--mount-proc", "--fork", "--kill-child=KILL", *network]
    line = f"{'ip link set lo up; ' if own_network else ''}echo ready; exec sleep infinity"
    with subprocess.Popen(["unshare", *flags, "sh", "-c", line], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            (child,) = psutil.Process(process.pid).children()
            yield ["nsenter", "--target", str(child.pid), "--pid", "--mount", *network, "--wd=."]
        finally:
            process.kill()


def _fill(checkout: Path) -> None:
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name == ".venv" or not path.name.startswith("."):
            (checkout / path.name).symlink_to(path.resolve())


def _environment(folder: Path) -> dict[str, str]:
    """Return this process's variables without the project's settings, with a new home that has the same caches."""
    foreign = ("ROLLOUT_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    home = folder / "home"
    home.mkdir()
    for name in (".cache", ".config"):
        (home / name).symlink_to(Path.home() / name)
    ours = {"HOME": str(home), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
    return kept | ours | {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
