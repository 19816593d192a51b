"""The program of each kernel: ipykernel, without what no cell here uses, and with bounds on what it sends.

Written into each sandbox as text, never imported. It leaves out the client side of Jupyter, collections of garbage
while modules load, the thread for heartbeats, and waits for output that is not there. Nothing that code computes is
changed: long prints go out in several messages, long results and exceptions are cut in the middle, so that
no message gets so large that the host would refuse it. Who prints faster than the host reads waits, as at a pipe's
end: nothing is dropped, and at a time-out what is still to be read is little. Only plain text is made of a value, and
IPython's second copy of everything printed is not kept.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any

LIMIT = 256 * 1024
"""Characters of one message, and of what is printed before it goes out."""
BACKLOG = 8
"""Messages that wait in this process, and again in ZeroMQ, before who sends more has to wait."""
BACKLOG_PAUSE = 0.005
SETTINGS = {
    "HistoryManager": {"enabled": False},
    "InteractiveShell": {"colors": "nocolor", "cache_size": 100},
    "IPKernelApp": {"log_level": "ERROR"},
}
"""They win over a configuration in the image."""
TAKING = threading.Lock()
"""Held from the reading of a descriptor until what was read is in its stream."""


def main() -> None:
    """Run the kernel of the connection file that is the one argument."""
    gc.disable()
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
        del sys.path[0]  # this file's folder is no place for modules
    load_at_first_use("jupyter_client", "jupyter_client.connect")
    bound_streams()
    bound_sending()
    app = make_app(sys.argv[1])
    bound_shell(app.shell)
    wake_at_signals()
    gc.freeze()
    gc.enable()
    app.start()


def load_at_first_use(name: str, part: str) -> None:
    """Have a package run its own code when something is asked of it that this part of it has not."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader = importlib.util.module_from_spec(spec), spec.loader

    def find(attribute: str) -> Any:
        found = getattr(import_module(part), attribute, None)
        if found is None:
            del package.__getattr__
            loader.exec_module(package)
            found = getattr(package, attribute)
        return found

    package.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = package


def make_app(connection_file: str) -> Any:
    """A kernel with its sockets, ready to be started."""
    import traitlets
    import zmq
    from ipykernel import kernelapp
    from traitlets.config import Config

    base: Any = kernelapp.IPKernelApp

    class KernelApp(base):  # type: ignore[misc]
        blocking_class = traitlets.Any()  # the inherited one would load the client side

        def parse_command_line(self, argv: object = None) -> None:  # noqa: ARG002
            """Take the settings from here."""
            self.update_config(Config(SETTINGS))
            self.connection_file = connection_file

        def init_iopub(self, context: Any) -> None:
            """Have the output channel wait for its reader, where it would drop what is too much."""
            defaults, context.sockopts = context.sockopts, {**context.sockopts, zmq.SNDHWM: BACKLOG}
            super().init_iopub(context)
            context.sockopts = defaults
            self.iopub_thread.socket.setsockopt(zmq.XPUB_NODROP, 1)

        def init_heartbeat(self) -> None:
            """Nobody listens: the host watches the process."""

        def log_connection_info(self) -> None:
            """Tell the host that all sockets are bound."""
            os.write(1, b"ready\n")

    app = KernelApp.instance()
    app.initialize()
    return app


def cut(text: Any) -> Any:
    """The text, cut in the middle if it is too long."""
    if not isinstance(text, str) or len(text) <= LIMIT:
        return text
    half, left_out = LIMIT // 2, len(text) - LIMIT
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def bound_streams() -> None:
    """Send long prints in several messages, and wait for the sending thread only where something was printed."""
    from ipykernel.iostream import OutStream

    stream: Any = OutStream
    buffers, flush, write = stream._flush_buffers, stream.flush, stream.write

    def bounded_buffers(self: Any) -> Iterator[tuple[Any, str]]:
        for parent, text in buffers(self):
            for start in range(0, len(text), LIMIT):
                yield parent, text[start : start + LIMIT]

    def flush_if_any(self: Any) -> None:
        if getattr(self, "_fid", None) is not None and not os.get_blocking(self._fid):
            take_written(self)
        # What has left the buffers is in the thread's queue already, before whatever is sent from now on.
        if any(buffer.tell() for buffer in list(self._buffers.values())):
            flush(self)

    def bounded_write(self: Any, text: str) -> Any:
        written = write(self, text)
        self._since_flush = getattr(self, "_since_flush", 0) + len(text)
        if self._since_flush > LIMIT:
            self._since_flush = 0
            flush(self)
        return written

    stream._flush_buffers, stream.flush, stream.write = bounded_buffers, flush_if_any, bounded_write
    stream._watch_pipe_fd = watch_pipe


def bound_sending() -> None:
    """Have who sends wait while many messages are to be sent; the thread that sends them excepted."""
    from ipykernel.iostream import IOPubThread

    thread: Any = IOPubThread
    schedule = thread.schedule

    def bounded_schedule(self: Any, send: Any) -> None:
        schedule(self, send)
        if threading.current_thread() is not self.thread:
            while len(self._events) > BACKLOG and self.thread.is_alive():
                time.sleep(BACKLOG_PAUSE)

    thread.schedule = bounded_schedule


def watch_pipe(stream: Any) -> None:
    """Take what is written to a stream's descriptor, by processes for example, as it comes; in a thread of its own."""
    if stream._fid is None:
        return
    os.set_blocking(stream._fid, False)
    changes = select.poll()
    changes.register(stream._fid, select.POLLIN)
    while changes.poll() and stream._should_watch and take_written(stream):
        pass


def take_written(stream: Any) -> bool:
    """Take what is there now; False at the end. Called at a cell's end too, so that its output is there by then."""
    if not stream._is_master_process():
        return True
    with TAKING:
        for _ in range(16):  # a writer that never rests holds up no cell
            try:
                data = os.read(stream._fid, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            stream.write(data.decode(errors="replace"))
    return True


def bound_shell(shell: Any) -> None:
    """Make values and exceptions short and plain, and answer at once."""
    represent, send = shell.display_formatter.format, shell.kernel.session.send

    def bounded_format(value: object, **wanted: Any) -> tuple[dict[str, Any], Any]:
        data, metadata = represent(value, **wanted)
        return {kind: cut(text) for kind, text in data.items()}, metadata

    def bounded_send(stream: Any, message: Any, content: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(content, dict) and "evalue" in content:
            lines = [cut(line) for line in content.get("traceback", [])]
            content = {**content, "evalue": cut(content["evalue"]), "traceback": lines}
        return send(stream, message, content, *arguments, **named)

    shell.display_formatter.active_types = ["text/plain"]
    shell.display_formatter.format = bounded_format
    shell.kernel.session.send = bounded_send
    shell.kernel._execute_sleep = 0  # for clients that take a reply for the end of the output
    shell._tee = lambda channel: nullcontext()  # noqa: ARG005  its name is given


def wake_at_signals() -> None:
    """Have a signal wake the event loop: an interrupted cell that awaits is cancelled by the loop's next round."""
    from tornado.ioloop import IOLoop

    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)

    def drain(*event: object) -> None:  # noqa: ARG001
        woken.recv(4096)

    IOLoop.current().add_handler(woken, drain, IOLoop.READ)


if __name__ == "__main__":
    main()
