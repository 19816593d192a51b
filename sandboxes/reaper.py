"""Records of live sandboxes, and the removal of what a dead service left behind.

A record is written before anything of the sandbox exists and removed after the last of it has gone. So whatever
is left on the host has a record, and `sweep` finds it. A record is stale only if the very process that wrote it
is dead (number, start time and boot all compared); the sandboxes of live services are never touched.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sandboxes.contract import SweepReport
from sandboxes.limits import Group
from sandboxes.process import boot_id, kill_if, marked_processes, marked_with, start_time


@dataclass(frozen=True, slots=True)
class Record:
    """One sandbox, as far as its removal needs to know it."""

    id: str
    provider: str
    owner_pid: int
    owner_start: int
    boot: str
    folder: str
    groups: dict[str, str]
    """Control groups by controller."""

    def owner_lives(self) -> bool:
        """Whether the service that started the sandbox runs."""
        return self.boot == boot_id() and start_time(self.owner_pid) == self.owner_start


class Records:
    """The records of this host, one file for each, in a folder that all services of this state share."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "sandboxes"
        self._owner = (os.getpid(), start_time(os.getpid()) or 0, boot_id())

    def write(self, sandbox_id: str, provider: str, folder: Path, groups: dict[str, Path]) -> None:
        """Write the record, whole or not at all."""
        pid, start, boot = self._owner
        record = Record(
            sandbox_id, provider, pid, start, boot, str(folder), {k: str(v) for k, v in groups.items()}
        )
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._path(sandbox_id).with_suffix(".new")
        draft.write_text(json.dumps(asdict(record)))
        draft.replace(self._path(sandbox_id))

    def remove(self, sandbox_id: str) -> None:
        """Remove the record; nothing where it is gone."""
        self._path(sandbox_id).unlink(missing_ok=True)

    def stale(self, provider: str) -> Iterator[Record]:
        """Records of the provider whose service is dead."""
        for path in self._folder.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                record = Record(**json.loads(path.read_text()))
                if record.provider == provider and not record.owner_lives():
                    yield record

    def _path(self, sandbox_id: str) -> Path:
        return self._folder / f"{sandbox_id}.json"


def sweep(records: Records, provider: str) -> SweepReport:
    """End and remove every stale sandbox. It blocks for as long as the kernel needs: call it in a thread."""
    stale = {record.id: record for record in records.stale(provider)}
    if not stale:
        return SweepReport()
    killed = sum(kill_marked(set(stale)) for _ in range(2))  # twice: one may have forked meanwhile
    failures = []
    for record in stale.values():
        group = Group({name: Path(path) for name, path in record.groups.items()})
        killed += kill_group(group)
        problem = remove(Path(record.folder), group)
        if problem is None:
            records.remove(record.id)
        else:
            failures.append(f"{record.id}: {problem}")
    return SweepReport(len(stale) - len(failures), killed, tuple(failures))


def kill_marked(ids: set[str]) -> int:
    """SIGKILL the processes that were started for these sandboxes; how many. It blocks."""
    return sum(kill_if(pid, lambda pid: marked_with(pid) in ids) for pid in marked_processes(ids))


def kill_group(group: Group) -> int:
    """SIGKILL what is in a sandbox's control groups; how many."""
    return sum(kill_if(pid, lambda pid: pid in group.processes()) for pid in group.processes())


def remove(folder: Path, group: Group | None) -> str | None:
    """Remove the folder and the groups of a sandbox that has ended; what is left, or None. It blocks."""
    if folder.exists():
        shutil.rmtree(folder, onerror=_make_writable)
    if folder.exists():
        return f"the folder {folder} cannot be removed"
    if group is not None and not group.remove():
        return f"control groups are still in use: {', '.join(map(str, group.paths))}"
    return None


def _make_writable(_function: object, path: str, _error: object) -> None:
    """For `rmtree`: folders without rights, such as an overlay's work folder, are opened and tried again."""
    target = Path(path)
    with suppress(OSError):
        target.parent.chmod(0o700)
        if target.is_symlink() or not target.is_dir():
            target.unlink()
        else:
            target.chmod(0o700)
            shutil.rmtree(target, ignore_errors=True)
