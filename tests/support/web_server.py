"""An HTTP server that answers by a function, on the loopback of this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: Message
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def web_server(answer: Callable[[Asked], Answer]) -> Iterator[str]:
    """Serve within the block; yield `127.0.0.1:PORT`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, content = answer(Asked(self.command, self.path, self.headers, body))
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815  the names that the library looks for

        def log_message(self, *args: Any) -> None:
            """Log nothing, to keep the tests quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client may leave at any time
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
