"""Run ipykernel without the parts that no cell here uses, and with bounds on the messages it sends.

It is written into each sandbox as text. It leaves out Jupyter's client side, garbage collection while modules load, the
heartbeat thread, and waits for output that does not exist. It changes nothing that code computes:

- Long prints go out in several messages. Long results and exceptions are cut in the middle. The host refuses no message
  for its size.
- Code that prints faster than the host reads has to wait, as at the end of a pipe. Nothing is dropped, and at a timeout
  little is left to read.
- Values are shown as plain text only, unless a cell is sent with `rich`: then with all their formats, and those that
  are too large are left out. IPython's second copy of everything printed is not kept.
- A cell that is sent with `env` has these variables, which afterwards are as they were.
- `exit()` ends its cell, as it ends a script, and not the session.

To do so it replaces private parts of ipykernel, which the image brings. `require_parts` refuses a version that lacks
one of them.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any

LIMIT = 256 * 1024
"""Characters in one message, and those printed before a message goes out."""
RICH_LIMIT = 3_500_000
"""Bytes of a value in all its formats, as they are sent; the host takes 4 MiB for a message."""
BACKLOG = 8
"""Messages that may wait in this process, and again in ZeroMQ, before the sender has to wait."""
BACKLOG_PAUSE = 0.005
SETTINGS = {
    "HistoryManager": {"enabled": False},
    "InteractiveShell": {"colors": "nocolor", "cache_size": 100},
    "IPKernelApp": {"log_level": "ERROR"},
}
"""These override a configuration in the image."""
TAKING = threading.Lock()
"""Held from reading a descriptor until the data is in its stream."""


class UnsupportedKernelError(Exception):
    pass


def main() -> None:
    """Run the kernel for the connection file in the only argument."""
    gc.disable()
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
        del sys.path[0]  # this file's folder holds no modules
    load_at_first_use("jupyter_client", "jupyter_client.connect")
    try:
        require_parts()
    except UnsupportedKernelError as error:
        sys.exit(f"unsupported ipykernel: {error}")
    bound_streams()
    bound_sending()
    app = make_app(sys.argv[1])
    bound_shell(app.shell)
    leave_cells_only()
    wake_at_signals()
    gc.freeze()
    gc.enable()
    app.start()


def require_parts() -> None:
    """
    Raises:
        UnsupportedKernelError: A part is missing; the message names it.
    """
    from ipykernel import _version, iostream, kernelapp, kernelbase, zmqshell
    from IPython.core import autocall

    of_class: dict[Any, str] = {
        iostream.OutStream: "_flush_buffers flush write _watch_pipe_fd _is_master_process",
        iostream.IOPubThread: "schedule",
        kernelapp.IPKernelApp: "blocking_class init_iopub iopub_thread init_heartbeat log_connection_info",
        kernelbase.Kernel: "_execute_sleep",
        autocall.ZMQExitAutocall: "__call__",
        zmqshell.ZMQInteractiveShell: "ask_exit",
    }
    of_instances: dict[Any, str] = {
        iostream.OutStream: "_buffers _fid _should_watch",
        iostream.IOPubThread: "thread _events",
    }
    found = [(owner, name, hasattr(owner, name)) for owner in of_class for name in of_class[owner].split()]
    for owner, names in of_instances.items():
        found += [(owner, name, name in names_in_methods(owner)) for name in names.split()]
    for owner, name, exists in found:
        if not exists:
            raise UnsupportedKernelError(f"ipykernel {_version.__version__} has no {owner.__name__}.{name}")


def names_in_methods(owner: Any) -> set[str]:
    codes = (getattr(method, "__code__", None) for method in vars(owner).values())
    return {name for code in codes if code is not None for name in code.co_names}


def load_at_first_use(name: str, part: str) -> None:
    """Defer a package's own code until something is requested that its submodule `part` does not have."""
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
    import traitlets
    import zmq
    from ipykernel import kernelapp
    from traitlets.config import Config

    base: Any = kernelapp.IPKernelApp

    class KernelApp(base):  # type: ignore[misc]
        blocking_class = traitlets.Any()  # the inherited one would load the client side

        def parse_command_line(self, argv: object = None) -> None:  # noqa: ARG002
            self.update_config(Config(SETTINGS))
            self.connection_file = connection_file

        def init_iopub(self, context: Any) -> None:
            """Make the output channel wait for its reader instead of dropping messages."""
            defaults, context.sockopts = context.sockopts, {**context.sockopts, zmq.SNDHWM: BACKLOG}
            super().init_iopub(context)
            context.sockopts = defaults
            self.iopub_thread.socket.setsockopt(zmq.XPUB_NODROP, 1)

        def init_heartbeat(self) -> None:
            """Start no heartbeat: the host watches the process."""

        def log_connection_info(self) -> None:
            """Tell the host that all sockets are bound."""
            os.write(1, b"ready\n")

    app = KernelApp.instance()
    app.initialize()
    return app


def cut(text: Any) -> Any:
    if not isinstance(text, str) or len(text) <= LIMIT:
        return text
    half, left_out = LIMIT // 2, len(text) - LIMIT
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def bound_streams() -> None:
    """Send long prints in several messages, and wait for the sending thread only if something was printed."""
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
        # Text that has left the buffers is already in the thread's queue, ahead of anything sent from now on.
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
    """Make senders wait while many messages are queued, except for the thread that sends them."""
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
    """Read what others, such as child processes, write to a stream's descriptor. Runs in a thread."""
    if stream._fid is None:
        return
    os.set_blocking(stream._fid, False)
    changes = select.poll()
    changes.register(stream._fid, select.POLLIN)
    while changes.poll() and stream._should_watch and take_written(stream):
        pass


def take_written(stream: Any) -> bool:
    """Read what is available; return False at the end of the stream.

    Also called at the end of a cell, so that its output is complete by then.
    """
    if not stream._is_master_process():
        return True
    with TAKING:
        for _ in range(16):  # a writer that never pauses must not hold up the cell
            try:
                data = os.read(stream._fid, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            stream.write(data.decode(errors="replace"))
    return True


def bound_shell(shell: Any) -> None:
    """Keep values and exceptions short, give a cell what it was sent with, and reply at once."""
    kernel, formatter = shell.kernel, shell.display_formatter
    execute, send = kernel.do_execute, kernel.session.send

    async def execute_as_asked(*arguments: Any, **named: Any) -> Any:
        asked = kernel.get_parent("shell")["content"]
        formatter.active_types = formatter.format_types if asked.get("rich") else ["text/plain"]
        env = asked.get("env", {})
        before = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        try:
            return await execute(*arguments, **named)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def bounded_send(stream: Any, message: Any, content: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(message, dict) and "data" in message["content"]:
            message["content"]["data"] = bounded_formats(
                message["content"]["data"], rich=len(formatter.active_types) > 1
            )
        if isinstance(content, dict) and "evalue" in content:
            lines = [cut(line) for line in content.get("traceback", [])]
            content = {**content, "evalue": cut(content["evalue"]), "traceback": lines}
        return send(stream, message, content, *arguments, **named)

    kernel.do_execute, kernel.session.send = execute_as_asked, bounded_send
    kernel._execute_sleep = 0  # it serves clients that take a reply for the end of the output
    shell._tee = lambda channel: nullcontext()  # noqa: ARG005  passed by name


def bounded_formats(data: dict[str, Any], *, rich: bool) -> dict[str, Any]:
    text = cut(data.get("text/plain", ""))
    kept, left_out, room = {"text/plain": text} if text else {}, "", RICH_LIMIT - len(json.dumps(text, default=str))
    for kind, value in data.items():
        if rich and kind != "text/plain":
            size = len(value) * 4 // 3 if isinstance(value, bytes) else len(json.dumps(value, default=str))
            if size <= room:
                kept[kind], room = value, room - size
            else:
                left_out += f"\n[... {kind} of {size} bytes left out ...]"
    return {**kept, "text/plain": f"{text}{left_out}"} if left_out else kept


def leave_cells_only() -> None:
    """Make `exit()` and `quit()` end their cell like `sys.exit()`, with the session's state kept.

    In a notebook they let the rest of the cell run, and end the kernel under one of the next cells.
    """
    from ipykernel.zmqshell import ZMQInteractiveShell
    from IPython.core.autocall import ZMQExitAutocall

    def leave(_: Any, code: Any = None) -> None:
        raise SystemExit(code)

    ZMQExitAutocall.__call__ = leave
    ZMQInteractiveShell.ask_exit = leave  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", "To exit: use 'exit'", UserWarning)


def wake_at_signals() -> None:
    """Make signals wake the event loop: its next iteration cancels an interrupted cell that is awaiting."""
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
