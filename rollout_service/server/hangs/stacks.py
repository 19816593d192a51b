"""Where a task is suspended, or where a thread is.

Guarantees: a stack has no values of variables, and at most `MAX_FRAMES` frames, of which the innermost are kept.
Walking one takes microseconds, and a task that goes on meanwhile does no harm on its own event loop.
"""

from __future__ import annotations

import asyncio
import gc
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from api_schemas.views.hangs import StackFrame

MAX_FRAMES = 60
_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("rollout_service", "sandboxes", "rollout_client", "api_schemas")
_INSTALLED = "/site-packages/"
_STANDARD = sysconfig.get_path("stdlib")
_PREFIXES = ("cr", "gi", "ag")
_AWAITS = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}


def stack_of_task(task: asyncio.Task[Any]) -> list[StackFrame]:
    """Return where a suspended task waits, the outermost frame first."""
    return _described(_await_chain(task.get_coro()))


def stack_of_thread(frame: FrameType | None) -> list[StackFrame]:
    """Return the stack of a thread, from its innermost frame, the outermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _described(reversed(frames))


def culprit(frame: FrameType | None) -> StackFrame | None:
    """Return the innermost frame of a thread that is not Python's own library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_STANDARD, "<frozen ")) or _INSTALLED in file:
            return _describe(frame)
        frame = frame.f_back
    return None


def _await_chain(awaited: Any) -> Iterable[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits, down to the future."""
    for _ in range(10 * MAX_FRAMES):
        prefix = _prefix(awaited)
        if prefix is None:
            # An async generator's step and a wrapped coroutine name what they wait for in no attribute.
            awaited = next((each for each in gc.get_referents(awaited) if _prefix(each)), None)
            if awaited is None:
                return
            continue
        frame = getattr(awaited, f"{prefix}_frame")
        if frame is not None:
            yield frame
        awaited = getattr(awaited, _AWAITS[prefix])
        if awaited is None or isinstance(awaited, asyncio.Future):
            return


def _prefix(awaited: Any) -> str | None:
    return next((one for one in _PREFIXES if hasattr(awaited, f"{one}_frame")), None)


def _described(frames: Iterable[FrameType]) -> list[StackFrame]:
    return [_describe(frame) for frame in list(frames)[-MAX_FRAMES:]]


def _describe(frame: FrameType) -> StackFrame:
    path = Path(frame.f_code.co_filename)
    ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _PACKAGES
    name = str(path.relative_to(_ROOT)) if ours else str(path).rpartition(_INSTALLED)[2]
    return StackFrame(file=name, line=frame.f_lineno or 0, function=frame.f_code.co_qualname, ours=ours)
