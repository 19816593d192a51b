"""Facts about this machine: where Apptainer is, and what the kernel allows.

A fact that cannot be read is reported as the poorer one (`None`, `False`); only `find_apptainer` raises.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import ProviderUnavailableError
from sandboxes.host.subordinate_ids import SUBGID, SUBUID, subordinate_ids_of
from sandboxes.limits.cgroups import CGROUPS, find_control_groups

INSTALL_PREFIX = Path("/opt/apptainer")
"""Where `scripts/install-apptainer` puts Apptainer if the distribution has no package of it."""

INSTALL_HINT = "run scripts/install-apptainer (as root), or name the binary in ROLLOUT_APPTAINER"
NAMESPACES_HINT = (
    "allow user namespaces: sysctl user.max_user_namespaces and kernel.unprivileged_userns_clone, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)

CAP_SYS_ADMIN = 21
"""From linux/capability.h. Apptainer as root needs it to mount."""

VERSION_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that `rollout-service doctor` prints and from which the provider picks its flags."""

    apptainer: Path | None
    apptainer_version: str | None
    """A version such as "1.4.5"; None if there is no binary or it does not run."""

    is_root: bool
    fuse: bool
    """Whether /dev/fuse opens for reading and writing; an ordinary user mounts images through it."""

    user_namespaces: bool
    """Whether an ordinary user may create user namespaces."""

    cgroup_version: int | None
    """2 (unified), 1 (including the hybrid layout, whose controllers are version 1's), or None (not mounted)."""

    cgroup_limits: frozenset[str]
    """Those of "memory", "processes" and "cpus" that this process's control groups enforce."""

    subuid_ranges: tuple[str, ...]
    """This user's lines of /etc/subuid; an ordinary user needs one for `--fakeroot`."""

    subgid_ranges: tuple[str, ...]
    sys_admin: bool
    """Whether CAP_SYS_ADMIN is permitted. Root cannot mount images without it, as in a plain container."""

    max_open_files: int | None
    """The size of the host's table of open files (fs.file-max), if readable."""

    @property
    def mounts_images(self) -> bool:
        """Whether Apptainer can mount images: root by a capability, an ordinary user through FUSE."""
        return self.sys_admin if self.is_root else self.fuse

    def require_apptainer(self) -> Path:
        if self.apptainer is None:
            raise ProviderUnavailableError("Apptainer is not installed", hint=INSTALL_HINT)
        return self.apptainer

    @property
    def fakeroot(self) -> bool:
        return self.is_root or bool(self.user_namespaces and self.subuid_ranges and self.subgid_ranges)


def find_apptainer(environ: Mapping[str, str] | None = None) -> Path:
    """Return the Apptainer binary: $ROLLOUT_APPTAINER, else the first on PATH, else the one in the installer's prefix.

    Raises:
        ProviderUnavailableError: The binary is in none of them, or $ROLLOUT_APPTAINER is not an executable file.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("ROLLOUT_APPTAINER")
    if named:
        if (path := shutil.which(named)) is not None:
            return Path(path)
        message = f"ROLLOUT_APPTAINER names {named!r}, which is not an executable file"
        raise ProviderUnavailableError(message, hint=INSTALL_HINT)
    search = environ.get("PATH", os.defpath) + os.pathsep + str(INSTALL_PREFIX / "bin")
    if (path := shutil.which("apptainer", path=search)) is not None:
        return Path(path)
    raise ProviderUnavailableError("Apptainer is not installed", hint=INSTALL_HINT)


def read_host_facts(environ: Mapping[str, str] | None = None) -> HostFacts:
    """Read the facts once. It runs `apptainer --version` (tens of milliseconds), so call it in a thread."""
    try:
        apptainer = find_apptainer(environ)
    except ProviderUnavailableError:
        apptainer = None
    return HostFacts(
        apptainer=apptainer,
        apptainer_version=apptainer_version(apptainer) if apptainer else None,
        is_root=os.geteuid() == 0,
        fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
        user_namespaces=_user_namespaces(),
        cgroup_version=_cgroup_version(),
        cgroup_limits=find_control_groups().enforced,
        subuid_ranges=tuple(map(str, subordinate_ids_of(os.getuid(), SUBUID))),
        subgid_ranges=tuple(map(str, subordinate_ids_of(os.getuid(), SUBGID))),
        sys_admin=_permits(CAP_SYS_ADMIN),
        max_open_files=read_number(Path("/proc/sys/fs/file-max")),
    )


def apptainer_version(apptainer: Path) -> str | None:
    """Return the version that the binary reports, such as "1.4.5"; None if it does not run."""
    try:
        answer = subprocess.run(
            [str(apptainer), "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+\.\d+(?:\.\d+)?", answer.stdout)
    return found.group() if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the number that a file of the kernel has, if it can be read."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _user_namespaces() -> bool:
    """Return whether no switch of a kernel or distribution forbids user namespaces; a missing switch allows them."""
    allowed = _read(Path("/proc/sys/user/max_user_namespaces")).strip()
    debian = _read(Path("/proc/sys/kernel/unprivileged_userns_clone")).strip()
    ubuntu = _read(Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")).strip()
    return allowed not in {"", "0"} and debian != "0" and ubuntu in {"", "0"}


def _cgroup_version() -> int | None:
    if (CGROUPS / "cgroup.controllers").exists():
        return 2
    return 1 if (CGROUPS / "memory").is_dir() else None


def _permits(capability: int) -> bool:
    found = re.search(r"^CapPrm:\s*([0-9a-f]+)$", _read(Path("/proc/self/status")), re.MULTILINE)
    return bool(found and int(found.group(1), 16) >> capability & 1)
