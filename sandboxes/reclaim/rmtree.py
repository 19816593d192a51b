"""Remove a folder that hostile code has filled, such as the files that a sandbox wrote.

It never leaves the folder through a link or a mount. Whatever the depth, it needs no recursion and three descriptors,
and moves subfolders up to the top, so paths do not grow. It opens folders whose modes forbid it. It raises nothing:
failures to remove are reported.

Only the standard library is used here, because the guard starts without anything else.
"""

import os
import re
import secrets
import subprocess
import time
from contextlib import suppress
from errno import ENOTEMPTY
from pathlib import Path

ESCAPED = re.compile(r"\\(\d{3})")
PASSES = 3
"""A file system may skip entries of a folder that is emptied while it is listed."""


def remove_tree(path: Path, deadline: float = float("inf")) -> str | None:
    """Return None, or why something is left.

    It blocks until `deadline` (monotonic) at most.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return None
        if mounted := _still_mounted(path):
            return f"{mounted} is a mount that cannot be unmounted"
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _Removal(deadline).run(parent, path.name)
        finally:
            os.close(parent)
    except FileNotFoundError:
        return None  # another has removed it
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


class _Removal:
    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._prefix = secrets.token_hex(8)
        self._moved = 0
        self._top = -1
        self._pending: list[str] = []
        self._problem: str | None = None

    def run(self, parent: int, name: str) -> str | None:
        self._top = _open_folder(parent, name)
        try:
            for _ in range(PASSES):
                self._empty(self._top)
                while self._pending:
                    self._remove_folder(self._pending.pop())
        except TimeoutError as error:
            return str(error)
        finally:
            os.close(self._top)
        try:
            os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._problem or str(error)
        return None

    def _empty(self, folder: int) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the removal took too long")
                try:
                    self._remove_entry(folder, entry.name, entry.is_dir(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._problem = self._problem or str(error)

    def _remove_entry(self, folder: int, name: str, is_folder: bool) -> None:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            return
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError:
            self._pending.append(name if folder == self._top else self._move_up(folder, name))

    def _move_up(self, folder: int, name: str) -> str:
        os.close(_open_folder(folder, name))  # a folder without rights cannot be moved either
        self._moved += 1
        above = f"{self._prefix}-{self._moved}"
        os.rename(name, above, src_dir_fd=folder, dst_dir_fd=self._top)
        return above

    def _remove_folder(self, name: str) -> None:
        try:
            folder = _open_folder(self._top, name)
            try:
                self._empty(folder)
                with suppress(FileNotFoundError):
                    os.rmdir(name, dir_fd=self._top)
            finally:
                os.close(folder)
        except FileNotFoundError:
            return
        except TimeoutError:
            raise
        except OSError as error:
            if error.errno != ENOTEMPTY:  # the cause has been recorded
                self._problem = self._problem or str(error)


def _open_folder(parent: int, name: str) -> int:
    """Get the right to change the folder. A link is not a folder."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=parent)
    try:
        itself = f"/proc/self/fd/{handle}"  # chmod has no form that follows no links
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            Path(itself).chmod(0o700)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)


def _still_mounted(path: Path) -> str | None:
    """Unmount at and below a folder, inner mounts first; return a mount that is left, if any."""
    found = mounts_below(path)
    for point in reversed(found):
        command = ["umount", "--lazy", "--no-canonicalize", "--", point]
        subprocess.run(command, check=False, capture_output=True, timeout=10)
    return next(iter(mounts_below(path)), None) if found else None


def mounts_below(path: Path) -> list[str]:
    real = str(path.parent.resolve() / path.name)
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    points = [ESCAPED.sub(lambda code: chr(int(code[1], 8)), line.split(" ", 5)[4]) for line in lines if line]
    return [point for point in points if point == real or point.startswith(f"{real}/")]
