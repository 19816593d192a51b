"""A collector that takes spans over OTLP/HTTP and throws them away.

Run: python benchmarks/programs/discarding_collector.py ADDRESS_FILE
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Discard(BaseHTTPRequestHandler):
    """Reads a request and answers that all is well."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


def main(address: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Discard)
    partial = address.with_suffix(".partial")
    partial.write_text(f"http://127.0.0.1:{server.server_port}")
    partial.replace(address)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
