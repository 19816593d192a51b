"""The features of an image, read from its files; nothing of it is started.

Sessions need bash; file operations need the core utilities and tar. The Python tool uses the image's own python3 with
ipykernel if its files show that it can run here, otherwise the toolkit's.
"""

import json
import platform
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from sandboxes.images.tree import ImageTree

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED_TOOLS = ("cat", "chmod", "cp", "head", "mkdir", "mv", "realpath", "rm", "stat", "tar")

BASH_VERSION = re.compile(rb"Bash version (\d[\w.()-]*)")
PYTHON_NAME = re.compile(r"python(3\.\d+)")
GLIBC_VERSION = re.compile(rb"GNU C Library [^\n]{0,200} version (\d+\.\d+)")
MUSL_VERSION = re.compile(rb"\b(1\.\d+\.\d+)\0")
DEFAULTED = re.compile(r'\s*export (\w+)="\$\{\w+:-"(.*)"\}"\s*')

SECRET = re.compile(r"(?i)token|secret|passw|credential|(^|_)key($|_)")
UNKNOWN = "of an unknown version"


@dataclass(frozen=True, slots=True)
class ImageFacts:
    system: str | None = None
    """From /etc/os-release."""

    architecture: str | None = None
    """The architecture of its bash, as `uname -m` prints it."""

    libc: str | None = None
    bash: str | None = None
    python: str | None = None
    python_version: str | None = None
    ipykernel: str | None = None
    python_problem: str = ""
    """Empty if its files show that its python3 can run."""

    missing_tools: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Declared variables, except those whose names suggest secrets."""

    workdir: str | None = None
    """Its WORKDIR, if that is not the root."""

    user: str | None = None
    """Its USER, if that is not root."""

    home: str | None = None
    """The user's home in its /etc/passwd."""

    size_bytes: int = 0
    """Unpacked."""

    @property
    def user_env(self) -> dict[str, str]:
        """The variables by which programs know the image's user; none for root."""
        if self.user is None:
            return {}
        return {"HOME": self.home or "/", "USER": self.user, "LOGNAME": self.user}

    @property
    def needs_toolkit(self) -> bool:
        return self.ipykernel is None or bool(self.python_problem)

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing programs that no toolkit replaces."""
        return (("bash",) if self.bash is None else ()) + self.missing_tools

    @property
    def advice(self) -> tuple[str, ...]:
        return tuple(_advice(self))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """
        Raises:
            TypeError: The values are not those of `as_json`.
        """
        return cls(**{**values, "missing_tools": tuple(values.get("missing_tools", ()))})


def read_facts(root: Path, descriptor: Mapping[str, Any] | None = None) -> ImageFacts:
    """Read an unpacked image, and what `squashfs.read_descriptor` said of it. This reads every file's size: call it in
    a thread.
    """
    tree = ImageTree(root)
    environment = read_environment(tree)
    folders = environment.get("PATH", PATH).split(":")
    bash = tree.executable("/bin/bash")
    program = tree.program("/bin/bash") if bash else None
    python = _which(tree, "python3", folders)
    labels = read_labels(tree)
    named = {key: str(value) for key, value in (descriptor or {}).items() if isinstance(value, str)}
    user = _user(tree, named.get("User") or labels.get("docker.user", ""))
    return ImageFacts(
        system=_system(tree),
        architecture=program.machine if program else None,
        libc=_libc(tree),
        bash=_bash_version(tree) if bash else None,
        python=python,
        python_version=_python_version(tree, python) if python else None,
        ipykernel=_ipykernel(tree, python) if python else None,
        python_problem=_problem(tree, python) if python else "",
        missing_tools=tuple(name for name in NEEDED_TOOLS if _which(tree, name, folders) is None),
        labels=labels,
        environment={name: value for name, value in environment.items() if not SECRET.search(name)},
        workdir=_workdir(named.get("WorkingDir") or labels.get("docker.workdir", "")),
        user=user[0] if user else None,
        home=user[1] if user else None,
        size_bytes=tree.size_bytes(),
    )


def _workdir(text: str) -> str | None:
    """Return a working folder that a sandbox can start in; an image may be hostile."""
    path = posixpath.normpath(text) if text.startswith("/") else "/"
    return path if path.strip("/") and path.isprintable() else None


def _user(tree: ImageTree, text: str) -> tuple[str, str | None] | None:
    """Return the name and home of a user, given by name or number, unless that is root."""
    wanted = text.partition(":")[0]
    if wanted in {"", "0", "root"} or not wanted.isprintable():
        return None
    for line in (tree.read("/etc/passwd") or b"").decode(errors="replace").splitlines():
        fields = line.split(":")
        if len(fields) > 5 and wanted in {fields[0], fields[2]}:
            home = fields[5] if fields[5].startswith("/") and fields[5].isprintable() else None
            return (fields[0], home) if fields[0].isprintable() else None
    return wanted, None


def _advice(facts: ImageFacts) -> Iterator[str]:
    if facts.bash is None:
        yield "Install bash as /bin/bash: no session can start without it."
    elif facts.architecture not in {None, platform.machine()}:
        yield f"Build it for {platform.machine()}: its programs are for {facts.architecture}."
    if facts.missing_tools:
        yield f"Install {', '.join(facts.missing_tools)} (coreutils, tar): files are read and written with them."
    if facts.needs_toolkit and facts.python and not facts.python_problem:
        yield "Install ipykernel in it if the Python tool should see the image's own packages."
    elif facts.python_problem:
        yield f"Its python3 is not used: {facts.python_problem}."


def _which(tree: ImageTree, name: str, folders: list[str]) -> str | None:
    paths = (posixpath.join(folder, name) for folder in folders if folder.startswith("/"))
    return next((path for path in paths if tree.executable(path)), None)


def _system(tree: ImageTree) -> str | None:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        for line in (tree.read(path, 64 * 1024) or b"").decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name == "PRETTY_NAME":
                return value.strip().strip("\"'")
    return None


def _libc(tree: ImageTree) -> str | None:
    folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders += [f"{base}/{platform.machine()}-linux-gnu" for base in ("/lib", "/usr/lib")]
    for folder in folders:
        for name in tree.names(folder):
            path = f"{folder}/{name}"
            if name == "libc.so.6":
                found = GLIBC_VERSION.search(tree.read(path) or b"")
                return f"glibc {found[1].decode()}" if found else f"glibc {UNKNOWN}"
            if name.startswith("ld-musl-"):
                found = MUSL_VERSION.search(tree.read(path) or b"")
                return f"musl {found[1].decode()}" if found else f"musl {UNKNOWN}"
    return None


def _bash_version(tree: ImageTree) -> str:
    found = BASH_VERSION.search(tree.read("/bin/bash") or b"")
    return found[1].decode() if found else UNKNOWN


def _python_version(tree: ImageTree, python: str) -> str | None:
    found = PYTHON_NAME.search(tree.find(python) or "")
    return found[1] if found else None


def _problem(tree: ImageTree, python: str) -> str:
    program = tree.program(python)
    if program is None:
        return f"{python} is not a program for this kind of machine; it may be a script"
    if program.machine != platform.machine():
        return f"{python} is for {program.machine}"
    if program.loader is not None and tree.executable(program.loader) is None:
        return f"{python} needs {program.loader}, which is missing"
    version = _python_version(tree, python)
    if version is not None and not any(tree.names(path) for path in _libraries(tree, python, version)):
        return f"{python} has no standard library"
    return ""


def _ipykernel(tree: ImageTree, python: str) -> str | None:
    version = _python_version(tree, python)
    if version is None:
        return None
    for library in _libraries(tree, python, version):
        for folder in (f"{library}/site-packages", f"{library}/dist-packages"):
            for name in tree.names(folder):
                found = re.fullmatch(r"ipykernel-(\w[\w.]*)\.(dist|egg)-info", name)
                if found and tree.read(f"{folder}/ipykernel/kernelapp.py", 1):
                    return found[1]
    return None


def _libraries(tree: ImageTree, python: str, version: str) -> list[str]:
    """Return where an interpreter looks for modules: below its prefix, as called and linked, and Debian's places."""
    called, linked = (posixpath.dirname(posixpath.dirname(path)) for path in (python, tree.find(python) or ""))
    prefixes = dict.fromkeys((called, linked, f"{linked}/local"))
    return [f"{prefix}/lib/python{found}" for prefix in prefixes for found in (version, "3")]


def read_labels(tree: ImageTree) -> dict[str, str]:
    try:
        data = json.loads(tree.read("/.singularity.d/labels.json") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in data.items()} if isinstance(data, dict) else {}


def read_environment(tree: ImageTree) -> dict[str, str]:
    """Read plain assignments in the scripts that Apptainer sources."""
    found: dict[str, str] = {}
    for name in ("10-docker2singularity.sh", "90-environment.sh"):
        text = (tree.read(f"/.singularity.d/env/{name}", 256 * 1024) or b"").decode(errors="replace")
        for line in text.splitlines():
            found |= _exports(line)
    return found


def _exports(line: str) -> Iterator[tuple[str, str]]:
    if found := DEFAULTED.fullmatch(line):
        yield found[1], found[2]
        return
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    for word in words[1:] if words[:1] == ["export"] else []:
        name, equals, value = word.partition("=")
        if equals:
            yield name, value.replace("$PATH", PATH)
