"""Ctrl-C ends a waiting call of the blocking client at once, and the client can still be used."""

import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from api_schemas.rollouts import RolloutPage

SECONDS = 60.0
CALLS = {
    "wait": "client.wait('held')",
    "loop": "next(client.events(after=0))",
    "arrays": "client.open_run('held').lease(arrays=True)",
}
CAUGHT = """
import sys
from rollout_client.sync import SyncRolloutClient
with SyncRolloutClient(sys.argv[1]) as client:
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted")
    print(client.page().rollouts)
"""
UNCAUGHT = """
import sys
from rollout_client.sync import SyncRolloutClient
with SyncRolloutClient(sys.argv[1]) as client:
    {call}
"""


class Holding(ThreadingHTTPServer):
    """A server that answers only for a page of rollouts, and holds all other requests until their callers hang up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.held = threading.Event()
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Holding

    def do_GET(self) -> None:
        if self.path.startswith("/v1/rollouts?"):
            body = RolloutPage(rollouts=[], counts={}).model_dump_json().encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.server.held.set()
        select.select([self.connection], [], [], SECONDS)  # readable once the caller has closed it
        self.server.hung_up.set()

    do_POST = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Holding]:
    with Holding() as holding:
        thread = threading.Thread(target=holding.serve_forever)
        thread.start()
        yield holding
        holding.shutdown()
        thread.join()


def interrupted(server: Holding, program: str) -> tuple[int, str, str]:
    """Send SIGINT to a program once its call is held; return its exit code, stdout and stderr."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, server.url]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert server.held.wait(SECONDS), "the call did not come"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=SECONDS / 2)  # the server holds the call for longer
        finally:
            process.kill()
    assert server.hung_up.wait(SECONDS / 2)
    return process.returncode, out, err


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_interrupt_ends_the_call_that_waits_and_no_other(server, call):
    assert interrupted(server, CAUGHT.format(call=call)) == (0, "interrupted\n[]\n", "")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_interrupt_ends_a_program_cleanly(server, call):
    code, out, err = interrupted(server, UNCAUGHT.format(call=call))
    assert (code, out) == (-signal.SIGINT, "")
    assert err.count("Traceback") == 1
    assert err.strip().endswith("KeyboardInterrupt")


def test_an_interrupt_that_does_not_wake_the_thread_that_waits_ends_its_call_too(server):
    """Let another thread receive the signal, as if it came just before the waiting thread blocked."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"
    program = CAUGHT.format(call=f"{block}; {CALLS['wait']}")
    assert interrupted(server, program) == (0, "interrupted\n[]\n", "")
