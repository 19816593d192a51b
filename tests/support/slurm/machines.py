"""What runs and is mounted on the machines of a test's cluster, to compare before and after.

It runs itself on the login machine, which sees the processes of all machines.
"""

import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.slurm.cluster import SlurmCluster


def what_is_there(cluster: "SlurmCluster") -> dict[str, Any]:
    """Return the processes, namespaces and mounts of all machines, the login machine included."""
    return json.loads(cluster.run(sys.executable, "-I", __file__).stdout)


def main() -> None:
    """Print what this machine sees, as JSON."""
    processes: Counter[str] = Counter()
    spaces: dict[str, set[str]] = {kind: set() for kind in ("mnt", "net", "pid", "user", "ipc", "uts")}
    mounts: dict[str, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            args = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            processes[args or (folder / "stat").read_text().split()[1]] += 1
            # An ordinary user may not see the namespaces of the process that keeps the machines.
            own = {kind: str((folder / "ns" / kind).readlink()) for kind in spaces}
            for kind, space in own.items():
                spaces[kind].add(space)
            lines = (folder / "mountinfo").read_text().splitlines()
            mounts[own["mnt"]] = sorted(" ".join(line.split()[3:5]) for line in lines)
    found = {
        "processes": dict(sorted(processes.items())),
        "namespaces": {kind: len(of) for kind, of in spaces.items()},
        "mounts": sorted(mounts.values()),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
