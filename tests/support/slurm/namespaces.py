"""Machines of a small network, each with its own address, host name, process ids and mounts, on this one machine.

They are namespaces below one process. When that process ends, for whatever reason, the kernel ends every process in
them and removes the namespaces, mounts and interfaces: nothing can be left. Root needs nothing else; an ordinary user
gets a user namespace around it, in which it keeps its own user id.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sandboxes.images.store import ImageStore
from tests.support.users.as_user import SHOW, covered_paths

SUBNET = "10.77.0"
LOGIN_ADDRESS = f"{SUBNET}.254"
COMMAND_SECONDS = 300.0
END_SECONDS = 10.0
PLAIN = ("setpriv", "--inh-caps=-all", "--ambient-caps=-all")
"""Takes from an ordinary user the rights that it has over its own namespaces."""

# Arguments: a scratch folder with `etc`, which is shown as /etc, and the lists of `SHOW`. The shell runs every line of
# its input, answers with the exit code, collects orphans, and ends with its input.
LOGIN = f"""
set -eu
scratch=$1
mount --make-rprivate /
{SHOW}
mount --bind "$scratch/etc" /etc
hostname login
ip link set lo up
ip link add br0 type bridge
ip address add {LOGIN_ADDRESS}/24 dev br0
ip link set br0 up
echo ready
set +e
while read -r line; do
  (eval "$line") >"$scratch/said" 2>&1 </dev/null
  echo $?
done
"""
# Arguments: the machine's name, its number, a file for the pid of what keeps it, its log, its own disk and where that
# is mounted, then its command.
START = f"""
set -eu
name=$1 number=$2 file=$3 log=$4 disk=$5 local=$6
shift 6
own=$(readlink /proc/self/ns/net)
unshare --net --uts --mount --pid --fork --kill-child --mount-proc -- sh -c '
  hostname "$0"
  shift
  mount --bind "$2" "$3"
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
  ip link set lo up
  ip address add "$1/24" dev eth0
  ip link set eth0 up
  shift 3
  "$@" &
  wait
' "$name" - "{SUBNET}.$number" "$disk" "$local" "$@" >"$log" 2>&1 </dev/null &
keeper=$!
until [ "$(readlink "/proc/$keeper/ns/net")" != "$own" ]; do sleep 0.01; done
ip link delete "v$number" 2>/dev/null || true  # of a machine that lost power: the kernel removes it in its own time
ip link add "v$number" type veth peer name eth0 netns "$keeper"
ip link set "v$number" master br0 up
echo "$keeper" >"$file"
"""


@dataclass
class Network:
    """A login machine, and the machines that were started beside it."""

    process: psutil.Popen
    """Keeps the login machine; it runs commands with all rights over the namespaces."""
    root: Path
    """A short folder of its own, below /tmp."""
    holder: int
    """The pid of the first process on the login machine, as this process sees it."""
    is_root: bool
    machines: dict[str, Path] = field(default_factory=dict)

    def command(self, command: Sequence[str], user: int | None = None) -> list[str]:
        """Return the command that runs a command on the login machine, for root as any user."""
        enter = ["nsenter", "--target", str(self.holder), "--net", "--uts", "--mount", "--pid"]
        if not self.is_root:
            return [*enter, "--user", "--preserve-credentials", "--", *command]
        if user is not None:
            plain = [*PLAIN, "--reuid", str(user), "--regid", str(user), "--clear-groups"]
            return [*enter, "--", *plain, *command]
        return [*enter, "--", *command]

    def run(
        self,
        command: Sequence[str],
        *,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login machine to its end."""
        done = subprocess.run(
            self.command(command, user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            cwd="/",
            check=False,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{list(command)}: {done.stdout}{done.stderr}"
        return done

    def start(self, name: str, number: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a machine whose address ends in a number; it lives as long as its command."""
        file = self.root / f"{name}.keeper"
        disk = self.disk(name)
        for folder in (disk, self.local):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
        arguments = [name, str(number), str(file), str(self.root / f"{name}.out"), str(disk), str(self.local)]
        plain = [] if self.is_root else list(PLAIN)
        script = self.root / "start"
        script.write_text(START)
        variables = [f"{key}={value}" for key, value in env.items()]
        self._keep(["env", "-i", *variables, "sh", str(script), *arguments, *plain, *command])
        self.machines[name] = file

    @property
    def local(self) -> Path:
        """Where every machine has a disk of its own, which outlives a power cut."""
        return self.root / "local"

    def disk(self, name: str) -> Path:
        """Return where a machine's own disk is seen from outside."""
        return self.root / "disks" / name

    def kill(self, name: str) -> None:
        """End a machine with everything on it, as a power cut does."""
        self._keep(["kill", "-KILL", self.machines.pop(name).read_text().strip()])

    def _keep(self, command: Sequence[str]) -> None:
        """Run a command in the shell that keeps the namespaces."""
        self.process.stdin.write(f"exec {shlex.join(command)}\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline()
        assert code == "0\n", code + (self.root / "said").read_text()


@contextmanager
def network(root: Path, users: Mapping[str, int], names: Sequence[str], env: Mapping[str, str]) -> Iterator[Network]:
    """Make a network in which some names have addresses, from 1 up, and some users exist.

    The shell that keeps it runs with these variables, by which it finds `ip`.
    """
    is_root = os.geteuid() == 0
    _write_etc(root / "etc", users, names)
    shown, hidden = covered_paths() if is_root else ([], [])
    images = ImageStore().root
    if hidden and images.is_dir():
        shown.append(images)
    (root / "shown").write_text("".join(f"{path}\n{path}\n" for path in shown))
    (root / "hidden").write_text("".join(f"{path}\n" for path in hidden))
    around = [] if is_root else ["--user", "--map-current-user", "--keep-caps"]
    own = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = ["unshare", *around, *own, "--", "bash", "-c", LOGIN, "login", str(root)]
    process = psutil.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
    )
    try:
        said = process.stdout.readline()
        assert said == "ready\n", said + process.stdout.read()
        yield Network(process, root, process.children()[0].pid, is_root)
    finally:
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(END_SECONDS)
            raise
        finally:
            process.stdout.close()


def _write_etc(etc: Path, users: Mapping[str, int], names: Sequence[str]) -> None:
    subprocess.run(["cp", "--archive", "/etc/.", str(etc)], check=False, capture_output=True)  # but secrets
    with (etc / "passwd").open("a") as file:
        file.writelines(f"{name}:x:{uid}:{uid}::/tmp:/bin/bash\n" for name, uid in users.items())
    with (etc / "group").open("a") as file:
        file.writelines(f"{name}:x:{uid}:\n" for name, uid in users.items())
    hosts = [f"{SUBNET}.{number} {name}\n" for number, name in enumerate(names, 1)]
    (etc / "hosts").unlink(missing_ok=True)
    (etc / "hosts").write_text("127.0.0.1 localhost\n" + f"{LOGIN_ADDRESS} login\n" + "".join(hosts))


def has_leftovers(root: Path) -> list[str]:
    """Return the processes and mounts that still mention a network's folder."""
    found = [
        str(process)
        for process in psutil.process_iter(["cmdline"])
        if any(str(root) in part for part in process.info["cmdline"] or [])
    ]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
    return found


def remove(root: Path) -> None:
    """Remove a network's folder."""
    shutil.rmtree(root, ignore_errors=True)
