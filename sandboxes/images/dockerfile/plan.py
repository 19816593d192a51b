"""Plan a Dockerfile's build: its stages, their order, and its unsupported parts.

Whatever is refused is named with its line here, so no build fails after an hour for a reason that could be seen at its
start. Only FROM is expanded here, since a base brings its own variables.
"""

import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sandboxes.errors import DockerfileError
from sandboxes.images.dockerfile.parser import HEREDOC, Instruction, ParsedDockerfile
from sandboxes.images.dockerfile.words import Expander, split_words, unquote

SCRATCH = "scratch"
ADDRESS = re.compile(r"(https?|ftp|git|ssh)://|git@|(^|\s)github\.com/")
FROM = re.compile(r"(\S+)(?:\s+as\s+(\S+))?", re.IGNORECASE)
STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
MODE = re.compile(r"[0-7]{3,4}")
NETWORKS = ("default", "host", "none")
MOUNT_KEYS = {
    "bind": {"type", "target", "dst", "destination", "source", "src", "from", "readonly", "ro"},
    "cache": {"type", "target", "dst", "destination", "id", "sharing", "mode", "uid", "gid"},
    "tmpfs": {"type", "target", "dst", "destination"},
}

FLAGS = {
    "FROM": {"platform"},
    "RUN": {"mount", "network"},
    "COPY": {"from", "chown", "chmod", "link"},
    "ADD": {"chown", "chmod", "link"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str
    target: str
    source: str = ""
    """The path within `stage`, or within the context; the id of a cache."""

    stage: str | None = None
    """A stage or base; None is the context."""


@dataclass(frozen=True, slots=True)
class BuildStage:
    index: int
    name: str
    """In small letters; by default its number."""

    base: str
    origin: Instruction
    instructions: tuple[Instruction, ...]
    needs: frozenset[str] = frozenset()
    bases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The stages that the target needs, each after those that it needs; the target is the last."""

    parsed: ParsedDockerfile
    stages: tuple[BuildStage, ...]
    arguments: Mapping[str, str]
    """The arguments before the first FROM; a stage sees those that it declares."""

    given: Mapping[str, str]
    unused: tuple[str, ...] = ()
    """Given arguments that no ARG declares."""

    bases: Mapping[str, int] = field(default_factory=dict)
    """Bases that are not stages, with the lines that first ask for them."""

    @property
    def target(self) -> BuildStage:
        return self.stages[-1]


def make_plan(parsed: ParsedDockerfile, given: Mapping[str, str], target: str | None = None) -> BuildPlan:
    """Check every instruction, and choose the stages of the target, by default the last.

    Raises:
        DockerfileError: An instruction is refused or wrong, or there is no such stage.
    """
    return _Planner(parsed, given).plan(target)


def platform_arguments() -> dict[str, str]:
    """Return arguments for all stages that declare them."""
    machine = MACHINES.get(platform.machine(), platform.machine())
    found = {"PLATFORM": f"linux/{machine}", "OS": "linux", "ARCH": machine, "VARIANT": ""}
    return {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in found.items()}


def parse_mount(text: str) -> Mount:
    """
    Raises:
        ValueError: The mount is of a kind, or has an option, that cannot be had.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    options = {key.strip(): value.strip() for key, _, value in pairs}
    kind = options.get("type", "bind")
    known = MOUNT_KEYS.get(kind)
    if known is None:
        raise ValueError(f"--mount=type={kind} cannot be had; only {', '.join(MOUNT_KEYS)} can")
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"--mount=type={kind} cannot have {', '.join(unknown)}")
    targets = [options[key] for key in ("target", "dst", "destination") if options.get(key)]
    if not targets:
        raise ValueError("--mount needs a target")
    source = options.get("source") or options.get("src") or "/"
    return Mount(
        kind,
        targets[0],
        options.get("id", targets[0]) if kind == "cache" else source,
        options.get("from") or None,
    )


def copied_words(instruction: Instruction, escape: str) -> list[str]:
    """Return the sources and the destination of a COPY or ADD, unexpanded.

    Raises:
        ValueError: A quote has no end.
    """
    words = instruction.array
    return list(words) if words is not None else split_words(instruction.text, escape)


def copied_sources(plan: BuildPlan) -> list[str]:
    """Return the paths and patterns that stages copy from the context; all of it if one has a variable."""
    found: list[str] = []
    for one in (one for stage in plan.stages for one in stage.instructions):
        if one.keyword in {"COPY", "ADD"} and one.flag("from") is None:
            words = copied_words(one, plan.parsed.escape)[:-1]
            found += [unquote(word, plan.parsed.escape) for word in words if not HEREDOC.fullmatch(word)]
        elif one.keyword == "RUN":
            mounts = [parse_mount(value) for name, value in one.flags if name == "mount"]
            found += [mount.source for mount in mounts if mount.kind == "bind" and mount.stage is None]
    return ["."] if any("$" in source for source in found) else sorted(set(found))


class _Planner:
    def __init__(self, parsed: ParsedDockerfile, given: Mapping[str, str]) -> None:
        self._parsed = parsed
        self._given = given
        self._expander = Expander(parsed.escape)
        self._arguments: dict[str, str] = {}
        self._declared: set[str] = set()
        self._bases: dict[str, int] = {}
        self._stages: list[BuildStage] = []

    def plan(self, target: str | None) -> BuildPlan:
        globals_, groups = self._split()
        self._read_arguments(globals_)
        for origin, instructions in groups:
            self._stages.append(self._stage(origin, instructions))
        stages = self._needed(self._target(target))
        return BuildPlan(
            self._parsed,
            stages,
            self._arguments,
            self._given,
            tuple(sorted(self._given.keys() - self._declared - PREDEFINED)),
            {name: line for name, line in self._bases.items() if any(name in one.bases for one in stages)},
        )

    def _split(self) -> tuple[list[Instruction], list[tuple[Instruction, list[Instruction]]]]:
        globals_: list[Instruction] = []
        groups: list[tuple[Instruction, list[Instruction]]] = []
        for one in self._parsed.instructions:
            if one.keyword == "FROM":
                groups.append((one, []))
            elif groups:
                groups[-1][1].append(one)
            elif one.keyword == "ARG":
                globals_.append(one)
            else:
                raise self._error(one, f"{one.keyword} comes before the first FROM", "begin with FROM")
        if not groups:
            raise self._parsed.error(1, "there is no FROM", "begin with FROM and the name of a base image")
        return globals_, groups

    def _read_arguments(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            for name, default in self._pairs(one):
                known = platform_arguments() | self._arguments
                value = self._given.get(name, None if default is None else self._expand(one, default, known))
                self._declared.add(name)
                if value is not None:
                    self._arguments[name] = value

    def _stage(self, origin: Instruction, instructions: list[Instruction]) -> BuildStage:
        self._check_flags(origin)
        found = FROM.fullmatch(origin.text.strip())
        if found is None:
            raise self._error(origin, f"FROM {origin.text!r} is not FROM BASE [AS NAME]")
        known = platform_arguments() | self._arguments
        base, name = self._expand(origin, found[1], known), (found[2] or "").lower()
        self._check_platform(origin, known)
        if not base:
            raise self._error(origin, f"{found[1]} is empty", "give the argument a default, or --build-arg")
        if name and not STAGE_NAME.fullmatch(name):
            raise self._error(origin, f"{found[2]!r} is not a name for a stage", "use a-z, 0-9, _ . and -")
        if name and any(name == stage.name for stage in self._stages):
            raise self._error(origin, f"two stages have the name {name!r}")
        uses = [base.lower() if self._known(base.lower()) else base]
        for one in instructions:
            uses += self._check(one)
        for used in uses:
            if used != SCRATCH and not self._known(used):
                self._bases.setdefault(used, origin.line)
        return BuildStage(
            len(self._stages),
            name or str(len(self._stages)),
            uses[0],
            origin,
            tuple(instructions),
            frozenset(used for used in uses if self._known(used)),
            frozenset(used for used in uses if used != SCRATCH and not self._known(used)),
        )

    def _known(self, name: str) -> bool:
        return any(name == stage.name for stage in self._stages)

    def _check_platform(self, origin: Instruction, known: Mapping[str, str]) -> None:
        wanted, here = self._expand(origin, origin.flag("platform") or "", known), known["TARGETPLATFORM"]
        if wanted and wanted not in {here, f"{here}/v8"}:
            raise self._error(origin, f"a base for {wanted} cannot run here", f"this machine is {here}")

    def _check(self, one: Instruction) -> list[str]:
        """Return the stages and bases that it copies from."""
        self._check_flags(one)
        if one.keyword == "ONBUILD":
            raise self._error(one, "ONBUILD has no place in an image file", "write its instruction out")
        if one.keyword == "SHELL" and not one.array:
            raise self._error(one, "SHELL needs an array", 'write SHELL ["/bin/bash", "-c"]')
        if one.keyword == "ARG":
            self._declared |= {name for name, _ in self._pairs(one)}
        if one.keyword in {"ENV", "LABEL"}:
            self.require_pairs(one)
        if one.keyword in {"COPY", "ADD"}:
            return self._check_copy(one)
        return self._check_run(one) if one.keyword == "RUN" else []

    def _check_flags(self, one: Instruction) -> None:
        known = FLAGS.get(one.keyword, set())
        for name, _ in one.flags:
            if name not in known:
                hint = f"{one.keyword} knows {', '.join(f'--{flag}' for flag in sorted(known))} here"
                raise self._error(one, f"{one.keyword} --{name} cannot be had", hint)

    def _check_copy(self, one: Instruction) -> list[str]:
        with self._explaining(one):
            words = copied_words(one, self._parsed.escape)
        if len(words) < 2:
            raise self._error(one, f"{one.keyword} needs a source and a destination")
        if one.keyword == "ADD" and (address := next(filter(ADDRESS.search, words[:-1]), None)) is not None:
            hint = "put the file into the context, or fetch it with RUN"
            raise self._error(one, f"ADD of the address {address} cannot be had", hint)
        mode = one.flag("chmod")
        if mode is not None and "$" not in mode and not MODE.fullmatch(mode):
            raise self._error(one, f"--chmod={mode} is not an octal mode", "write it as 0755")
        source = one.flag("from")
        return [] if source is None else [self._source(one, source)]

    def _check_run(self, one: Instruction) -> list[str]:
        if one.flag("network") not in {None, *NETWORKS}:
            raise self._error(one, f"--network={one.flag('network')} cannot be had", "use host or none")
        found = []
        for name, value in one.flags:
            if name == "mount":
                with self._explaining(
                    one, "files may come from the context, from another stage, or be fetched by a step"
                ):
                    mount = parse_mount(value)
                if mount.stage is not None:
                    found.append(self._source(one, mount.stage))
        return found

    def _source(self, one: Instruction, name: str) -> str:
        """`name` may be a stage's number."""
        if "$" in name:
            raise self._error(one, f"--from={name}: variables mean nothing there", "write the stage's name")
        if name.isdecimal():
            with suppress(IndexError, ValueError):  # Python refuses thousands of digits
                return self._stages[int(name)].name
            raise self._error(one, f"there is no stage {name} before this one")
        return name.lower() if self._known(name.lower()) else name

    def require_pairs(self, one: Instruction) -> None:
        words = self._words(one)
        if "=" not in words[0] and len(words) < 2:
            raise self._error(one, f"{one.keyword} {words[0]} has no value", f"write {words[0]}=VALUE")
        if wrong := next((word for word in words if "=" not in word and "=" in words[0]), None):
            raise self._error(one, f"{wrong!r} is not NAME=VALUE", "put values with spaces into quotes")

    def _pairs(self, one: Instruction) -> Iterator[tuple[str, str | None]]:
        for word in self._words(one):
            name, equals, default = word.partition("=")
            yield name, default if equals else None

    def _words(self, one: Instruction) -> list[str]:
        with self._explaining(one):
            return split_words(one.text, self._parsed.escape)

    def _expand(self, one: Instruction, text: str, variables: Mapping[str, str]) -> str:
        with self._explaining(one):
            return self._expander.expand(text, variables)

    @contextmanager
    def _explaining(self, one: Instruction, hint: str | None = None) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self._error(one, str(error), hint) from error

    def _target(self, target: str | None) -> BuildStage:
        if target is None:
            return self._stages[-1]
        for stage in self._stages:
            if target.lower() in {stage.name, str(stage.index)}:
                return stage
        names = ", ".join(stage.name for stage in self._stages)
        raise self._parsed.error(1, f"there is no stage {target!r}", f"its stages are {names}")

    def _needed(self, target: BuildStage) -> tuple[BuildStage, ...]:
        names = {target.name}
        for stage in reversed(self._stages[: target.index + 1]):
            if stage.name in names:
                names |= stage.needs
        return tuple(stage for stage in self._stages[: target.index + 1] if stage.name in names)

    def _error(self, one: Instruction, message: str, hint: str | None = None) -> DockerfileError:
        return self._parsed.error(one.line, message, hint)


PREDEFINED = frozenset(
    name
    for stem in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (stem, stem.lower())
)
"""Arguments that every step sees if they are given, and no layer depends on."""
