"""The service with its bytecode instructions counted.

Run: python benchmarks/programs/counted_service.py FOLDER, with the settings in the environment

It writes its URL to FOLDER/address. A line on stdin begins a count and is answered with one; the next ends it and is
answered with the instructions by file. A library's instructions count for the file of ours that called it, and those of
callbacks of the event loop for the library's own.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rollout_service.server.api.serve import serve
from rollout_service.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("api_schemas", "rollout_service", "sandboxes"))
OTHER = "other"

Trace = Callable[[FrameType, str, Any], Any]


class Counts:
    """A trace function: counts instructions while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.by_file: Counter[str] = Counter()
        self._files: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, _event: str, _: Any) -> Trace:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        file = self._owner(frame)

        def count(_frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode" and self.on:
                self.by_file[file] += 1
            return count

        return count

    def _owner(self, frame: FrameType | None) -> str:
        """Return the file of ours that this frame works for."""
        while frame is not None:
            if (file := self._file(frame.f_code)) != OTHER:
                return file
            frame = frame.f_back
        return OTHER

    def _file(self, code: CodeType) -> str:
        if (file := self._files.get(code)) is None:
            name = code.co_filename
            file = self._files[code] = name.removeprefix(f"{ROOT}/") if name.startswith(PACKAGES) else OTHER
        return file

    def obey(self) -> None:
        """Begin with a line of stdin and answer it, print what was counted with the next, and so on."""
        while sys.stdin.readline():
            self.by_file = Counter()
            self.on = True
            print(flush=True)
            sys.stdin.readline()
            self.on = False
            print(json.dumps(self.by_file.copy()), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    counts = Counts()
    threading.Thread(target=counts.obey, daemon=True).start()
    threading.settrace(counts)
    sys.settrace(counts)
    settings = load_settings(port=0, sandbox={"provider": "local"}, engine="none", state_dir=folder, log_level="error")
    serve(settings, explain=print, port_file=folder / "address")


if __name__ == "__main__":
    main()
