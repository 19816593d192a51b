"""The checks of `doctor`: each examines one thing, changes nothing, and knows the command that fixes it.

Without a thing that is `missing`, rollouts cannot run in Apptainer; one that is `limited` reduces functionality.
"""

from __future__ import annotations

import getpass
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout_service.base.errors import ConfigurationError
from rollout_service.engines.kinds.registry import check_kinds
from rollout_service.engines.shipped import model_folder
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.environments.secrets import HostSecrets
from rollout_service.settings import DefaultEngine, Settings
from sandboxes import ApptainerConfig, SandboxConfigError
from sandboxes.host.facts import HostFacts, read_host_facts
from sandboxes.host.subordinate_ids import subordinate_ids_command
from sandboxes.images.store import ImageStore
from sandboxes.providers.apptainer.launch.files import PTYS
from sandboxes.providers.apptainer.launch.rights import LIMITS
from sandboxes.providers.apptainer.sharing import read_sharing
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import measure_pressure

SCRIPTS = Path(__file__).parents[3] / "scripts"
"""The install scripts in a checkout; an installed package has none."""
FREE_GIBIBYTES = 2.0
GIBIBYTE = 2**30
BASE_IMAGE = "base"
PTYS_RESERVE = 1024
"""Terminals that the kernel reserves for the host by default."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: Literal["ok", "missing", "limited"]
    found: str
    fix: str = ""
    """The command that fixes it; empty if there is nothing to fix."""


def check_machine(settings: Settings) -> list[Check]:
    """Run all checks, in the order in which problems are best fixed."""
    facts = read_host_facts()
    return [
        Check("Python", "ok", ".".join(map(str, sys.version_info[:3]))),
        check_apptainer(facts),
        *check_mounts(facts),
        *check_limits(facts),
        *check_sharing(settings),
        *check_open_files(facts, settings),
        check_image(settings),
        check_engine(settings),
        check_state_dir(settings.state_dir.expanduser()),
        check_pressure(settings),
        *check_secrets(settings),
        check_sglang(),
    ]


def check_apptainer(facts: HostFacts) -> Check:
    fix = script("install-apptainer", as_root=not facts.is_root)
    if facts.apptainer is None:
        return Check("Apptainer", "missing", "not on PATH, not in /opt/apptainer", fix)
    if facts.apptainer_version is None:
        return Check("Apptainer", "missing", f"{facts.apptainer} does not run", fix)
    return Check("Apptainer", "ok", f"{facts.apptainer_version} at {facts.apptainer}")


def check_mounts(facts: HostFacts) -> Iterator[Check]:
    """Check that Apptainer can mount images and isolate processes: as root a capability, else FUSE and ids."""
    if facts.is_root:
        if facts.mounts_images:
            yield Check("mounting images", "ok", "as root")
        else:
            found = "root lacks CAP_SYS_ADMIN here, as in a plain container"
            yield Check("mounting images", "missing", found, "start the container with --cap-add SYS_ADMIN")
        return
    if facts.mounts_images:
        yield Check("mounting images", "ok", "/dev/fuse opens")
    else:
        yield Check("mounting images", "missing", "/dev/fuse does not open", "sudo chmod 0666 /dev/fuse")
    if facts.user_namespaces:
        yield Check("user namespaces", "ok", "allowed")
    else:
        yield Check("user namespaces", "missing", "not allowed by the kernel's settings", _allow_namespaces())
    if facts.fakeroot:
        yield Check("root inside of sandboxes", "ok", ", ".join(facts.subuid_ranges))
    else:
        found = "no line in /etc/subuid and /etc/subgid"
        yield Check("root inside of sandboxes", "limited", found, subordinate_ids_command())


def check_limits(facts: HostFacts) -> Iterator[Check]:
    if {"memory", "processes"} <= facts.cgroup_limits:
        found = f"control groups, version {facts.cgroup_version}: {', '.join(sorted(facts.cgroup_limits))}"
        yield Check("limits of sandboxes", "ok", found)
        return
    found = "the service has no control group of its own, so limits apply per process"
    fix = "systemd-run --user --scope -p Delegate=yes rollout-service serve"
    yield Check("limits of sandboxes", "limited", found, fix)


def check_sharing(settings: Settings) -> Iterator[Check]:
    """Check that one sandbox cannot use up, or reach, the resources of others."""
    if not isinstance(settings.sandbox, ApptainerConfig):
        return
    try:
        found = read_sharing(settings.sandbox)
    except SandboxConfigError as error:
        yield Check("users of sandboxes", "missing", str(error), error.hint or "")
        return
    if found.own_users:
        yield Check("users of sandboxes", "ok", "each sandbox runs as a user of its own")
    else:
        counts = ", ".join(f"{name} ({most})" for name, most in found.counts.items())
        shared = f"one user for all sandboxes, so one of them can use up {counts}"
        yield Check("users of sandboxes", "limited", shared, _separate_users(settings.sandbox))
    if found.filtered:
        yield Check("system calls of sandboxes", "ok", "filtered")
    else:
        why = "not filtered: the service has no filter for this kernel or processor"
        yield Check("system calls of sandboxes", "limited", why)
    yield _check_terminals(found.own_terminals, settings.sandbox_ceiling)
    yield _check_images(settings.sandbox, changes=found.changes_images)


def check_open_files(facts: HostFacts, settings: Settings) -> Iterator[Check]:
    """Check that two sandboxes together cannot fill the host's table of open files."""
    if not isinstance(settings.sandbox, ApptainerConfig) or facts.max_open_files is None:
        return
    processes = settings.sandbox.limits.max_processes
    each = min(LIMITS[resource.RLIMIT_NOFILE], _hard_limit(resource.RLIMIT_NOFILE))
    name = "open files of sandboxes"
    if facts.max_open_files > 2 * processes * each:
        yield Check(name, "ok", f"fs.file-max is {facts.max_open_files}")
        return
    found = (
        f"fs.file-max is {facts.max_open_files}, and two sandboxes can open {2 * processes * each} files "
        f"({processes} processes with {each} files each): they could leave none for the host"
    )
    enough = 2 ** math.ceil(math.log2((settings.sandbox_ceiling + 1) * processes * each))
    yield Check(name, "limited", found, f"sudo sysctl -w fs.file-max={enough}")


def _hard_limit(kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _separate_users(config: ApptainerConfig) -> str:
    if os.geteuid() != 0:
        return "run the service as root: sandboxes never do"
    if config.fakeroot or config.user_range == "none":
        return "set sandbox.fakeroot to false and leave sandbox.user_range out"
    return "use Linux 5.19 or newer, and set sandbox.unpacked_dir to a folder on ext4, XFS or Btrfs"


def _check_images(config: ApptainerConfig, *, changes: bool) -> Check:
    name = "folders of images"
    if changes:
        return Check(name, "ok", "code may remove and rename them")
    found = "code cannot remove or rename a folder of the image that has subfolders (Input/output error)"
    if not config.unpack:
        found = "code cannot change files of the image"
        return Check(name, "limited", found, "set sandbox.unpack to true")
    return Check(name, "limited", found, f"{_allow_namespaces()}, or use Linux 6.6 or newer")


def _check_terminals(sandboxes: int | None, ceiling: int) -> Check:
    name = "terminals of sandboxes"
    if sandboxes is None:
        found = "no limit, so one sandbox can open all of the host's terminals"
        return Check(name, "limited", found, _allow_namespaces())
    if sandboxes < ceiling:
        wanted = 2 ** math.ceil(math.log2((ceiling + 1) * PTYS + PTYS_RESERVE))
        found = f"enough for {sandboxes} of {ceiling} sandboxes if each opens all of its {PTYS}"
        return Check(name, "limited", found, f"sudo sysctl -w kernel.pty.max={wanted}")
    return Check(name, "ok", f"{PTYS} each")


def check_image(settings: Settings) -> Check:
    names = [image.name for image in ImageStore(settings.images_dir).list()]
    if BASE_IMAGE in names:
        return Check("image base", "ok", "built")
    return Check("image base", "missing", "not built", "rollout-service image build base")


def check_engine(settings: Settings) -> Check:
    """Check that some engine serves the policy, and that the embedded engines have their models."""
    for pool, model in settings.embedded_models.items():
        if not (model_folder(model) / "config.json").is_file():
            flag = "--model calc-tuned" if pool == "policy" else f"--pool-model {pool}=calc-tuned"
            return Check("engine", "missing", f"there is no policy {model}", f"rollout-service serve {flag}")
    if settings.backends:
        try:
            check_kinds(settings.backends)
        except ConfigurationError as error:
            return Check("engine", "missing", str(error), error.hint)
        return Check("engine", "ok", ", ".join(str(backend.url) for backend in settings.backends))
    if settings.engine is DefaultEngine.NONE:
        found = "none is configured; register one once the server runs"
        return Check("engine", "limited", found, "rollout-service backends add URL")
    return Check("engine", "ok", f"embedded, with {settings.embedded.model}")


def check_state_dir(folder: Path) -> Check:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        fix = f"sudo install -d -o {getpass.getuser()} {folder}"
        return Check("state folder", "missing", f"{folder} is not writable", fix)
    free = shutil.disk_usage(there).free / GIBIBYTE
    if free < FREE_GIBIBYTES:
        fix = "rollout-service serve --state-dir DIR"
        return Check("state folder", "limited", f"{free:.1f} GiB free in {there}", fix)
    return Check("state folder", "ok", f"{folder}, {free:.0f} GiB free")


def check_pressure(settings: Settings) -> Check:
    metrics = HostReader([settings.state_dir.expanduser().absolute()]).read()
    pressures = measure_pressure(metrics, settings.sandboxes.pressure)
    scarce = [it.hold_reason.text for it in pressures if it.ratio >= 1.0]
    if scarce:
        return Check("room for sandboxes", "limited", "; ".join(scarce))
    psi = "" if metrics.cpu_stall is not None else ", by load average, since the kernel has no PSI"
    return Check("room for sandboxes", "ok", f"up to {settings.sandbox_ceiling}{psi}")


def check_secrets(settings: Settings) -> Iterator[Check]:
    """Check the secrets that environments ask for; no value is shown."""
    secrets = HostSecrets(settings.secrets)
    for environment in EnvironmentRegistry.load(settings.environments, harbor=settings.harbor).list():
        asked = list(secrets.examine(environment.spec))
        name, problems = f"secrets of {environment.spec.name}", [error for _, error in asked if error]
        if problems:
            yield Check(name, "limited", "; ".join(map(str, problems)), problems[0].hint)
        elif asked:
            found = ", ".join(f"{secret.key} from the {secret.source}" for secret, _ in asked)
            yield Check(name, "ok", f"allowed and present: {found}")


def check_sglang() -> Check:
    installed = SCRIPTS.parent / ".venv-sglang" / ".installed"
    if installed.exists():
        return Check("SGLang on the CPU", "ok", str(installed.parent))
    fix = script("install-sglang", as_root=False)
    return Check("SGLang on the CPU", "limited", "not installed; the embedded engine does not need it", fix)


def script(name: str, *, as_root: bool) -> str:
    path = SCRIPTS / name
    shown = f"scripts/{name} of a checkout" if not path.exists() else str(path)
    return f"sudo {shown}" if as_root else shown


def _allow_namespaces() -> str:
    """Return the command, without keys that this kernel lacks, since distributions differ."""
    keys = {
        "user.max_user_namespaces": "15000",
        "kernel.unprivileged_userns_clone": "1",
        "kernel.apparmor_restrict_unprivileged_userns": "0",
    }
    known = [key for key in keys if Path("/proc/sys", *key.split(".")).exists()]
    return "sudo sysctl -w " + " ".join(f"{key}={keys[key]}" for key in known)
