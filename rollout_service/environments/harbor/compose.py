"""A task's Compose file, as far as its services can be processes of the task's one sandbox, and its variables.

Guarantees: the file is small and takes little memory, whatever it says; it names no path of the host; a key that cannot
be had here is refused with its path and what to do instead.
"""

from __future__ import annotations

import graphlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.base.validation import known_fields
from rollout_service.environments.harbor.task_toml import HealthcheckTable, TaskSection

FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
MAIN = "main"
"""The service that the agent works in: the sandbox itself."""
MAX_BYTES, MAX_DEPTH, MAX_SERVICES, MAX_ENTRIES = 64 * 1024, 12, 16, 64
MAX_SECONDS = 600.0
"""Bounds times in a health check, since a rollout waits for it."""
LOOK_SECONDS, MIN_LOOK_SECONDS = 1.0, 0.1
"""The most, and the least, between two health checks."""
HARBORS = {
    "CONTEXT_DIR": ".",
    "MAIN_IMAGE_NAME": MAIN,
    "TEST_DIR": "/tests",
}
"""Harbor's variables for Compose files that have a meaning here."""
INSTEAD = {
    **dict.fromkeys(("networks", "network_mode", "links"), "remove it: services share the sandbox's network"),
    **dict.fromkeys(("deploy", "mem_limit", "cpus"), "set the limits in [environment] of task.toml"),
    **dict.fromkeys(("privileged", "cap_add", "devices"), "remove it: sandboxes have no such rights"),
    **dict.fromkeys(("secrets", "configs"), "write the files in environment/Dockerfile"),
    "env_file": "write the variables into `environment`",
    "restart": "remove it: a service that has ended is not started again",
    "user": "remove it: a sandbox has one user",
    "extends": "write the keys out",
}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_PORT = re.compile(r"(?:[\d.]+:)?(?:\d+:)?(\d{1,5})(?:/(?:tcp|udp))?")
REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}")
_DOLLAR = re.compile(rf"\$\$|{REFERENCE.pattern}|\$")
_IDLE = (("sleep", "infinity"), ("sh", "-c", "sleep infinity"), ("tail", "-f", "/dev/null"))
"""They only keep a container alive."""


def _words(given: Any) -> Any:
    return shlex.split(given) if isinstance(given, str) else given


def _seconds(given: Any) -> Any:
    parts = _SPAN.findall(given) if isinstance(given, str) else []
    if "".join(map("".join, parts)) != given:
        raise ValueError('must be a time such as "1m30s"')
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _pairs(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    if bare := [one for one in given if not isinstance(one, str) or "=" not in one]:
        raise ValueError(f"{bare[0]!r} has no value: write NAME=VALUE")
    return dict(one.split("=", 1) for one in given)


def _conditions(given: Any) -> Any:
    if isinstance(given, list):
        return dict.fromkeys(map(str, given), "service_started")
    return (
        {name: one.get("condition") if isinstance(one, dict) else one for name, one in given.items()}
        if isinstance(given, dict)
        else given
    )


def _port(given: Any) -> Any:
    named = str(given.get("target")) if isinstance(given, dict) else str(given)
    if (found := _PORT.fullmatch(named)) is None:
        raise ValueError(f'{named!r} must be one port of the service, such as "80" or "8080:80"')
    return found[1]


Words = Annotated[tuple[str, ...], BeforeValidator(_words), Field(max_length=MAX_ENTRIES)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(le=MAX_SECONDS)]
Port = Annotated[int, BeforeValidator(_port), Field(ge=1, le=65535)]
Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]
ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class HealthcheckKeys(TaskSection):
    test: tuple[str, ...] = Field(min_length=1, max_length=MAX_ENTRIES)
    interval: Seconds = 30.0
    timeout: Seconds = Field(30.0, gt=0)
    start_period: Seconds = 0.0
    start_interval: Seconds = 5.0
    retries: int = Field(3, ge=1, le=MAX_ENTRIES)

    @field_validator("test", mode="before")
    @classmethod
    def _text_is_for_a_shell(cls, test: Any) -> Any:
        return ["CMD-SHELL", test] if isinstance(test, str) else test

    def table(self) -> HealthcheckTable | None:
        """Allow the same time in all, but look at least every second; None if there is no check."""
        kind, *words = self.test
        if kind == "NONE":
            return None
        return HealthcheckTable(
            command=shlex.join(words) if kind == "CMD" else " ".join(words),
            timeout_sec=self.timeout,
            interval_sec=LOOK_SECONDS,
            start_period_sec=self.start_period + self.retries * self.interval,
            start_interval_sec=min(max(self.interval, MIN_LOOK_SECONDS), LOOK_SECONDS),
            retries=1,
        )


class BuildKeys(TaskSection):
    """`build` of a service: the task's own image, or it is refused."""

    context: Literal[".", "./"]
    dockerfile: Literal["Dockerfile", "./Dockerfile"] = "Dockerfile"


class ComposeService(TaskSection):
    image: str | None = None
    build: Annotated[BuildKeys | None, BeforeValidator(lambda of: {"context": of} if isinstance(of, str) else of)] = (
        None
    )
    entrypoint: Words = ()
    command: Words = ()
    environment: Annotated[dict[str, str], BeforeValidator(_pairs), Field(max_length=MAX_ENTRIES)] = {}
    depends_on: Annotated[dict[str, Condition], BeforeValidator(_conditions), Field(max_length=MAX_ENTRIES)] = {}
    ports: tuple[Port, ...] = Field((), max_length=MAX_ENTRIES)
    expose: tuple[Port, ...] = Field((), max_length=MAX_ENTRIES)
    healthcheck: HealthcheckKeys | None = None
    working_dir: str | None = Field(None, pattern="^/")
    volumes: tuple[str, ...] = Field((), max_length=MAX_ENTRIES)

    @field_validator("volumes")
    @classmethod
    def _volumes_have_names(cls, volumes: tuple[str, ...]) -> tuple[str, ...]:
        for volume in volumes:
            if not re.fullmatch(r"[A-Za-z0-9][\w-]*:/[^:]*(:rw)?", volume):
                raise ValueError(
                    f"{volume!r} is not NAME:/PATH: copy files in environment/Dockerfile, since no path of the host "
                    "can be mounted"
                )
        return volumes

    @property
    def argv(self) -> tuple[str, ...]:
        """Empty for a program that only keeps a container alive."""
        argv = self.entrypoint + self.command
        return () if argv in _IDLE else argv

    @property
    def health(self) -> HealthcheckTable | None:
        return None if self.healthcheck is None else self.healthcheck.table()


class Compose(TaskSection):
    version: Any = None
    name: Any = None
    services: dict[ServiceName, ComposeService] = Field(min_length=1, max_length=MAX_SERVICES)
    volumes: dict[str, Any] = Field({}, max_length=MAX_ENTRIES)

    @model_validator(mode="after")
    def _services_fit_into_one_sandbox(self) -> Compose:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield problems of running all services in one sandbox; each begins with its path."""
        ports: dict[int, str] = {}
        mounts: dict[str, str] = {}
        for name, service in self.services.items():
            if name != MAIN and not (service.entrypoint or service.command):
                yield f"services.{name}.command: is missing, and images have no command of their own here: write it"
            for port in {*service.ports, *service.expose}:
                if (other := ports.setdefault(port, name)) != name:
                    yield f"services.{name}.ports: {other!r} has the port {port} too: let one listen on another"
            for volume, path in (one.split(":")[:2] for one in service.volumes):
                if mounts.setdefault(volume, path) != path:
                    yield f"services.{name}.volumes: {volume!r} is at {mounts[volume]} elsewhere: use one path"
            yield from self._dependencies(name, service)
        try:
            self.order()
        except graphlib.CycleError as error:
            yield f"services: {' -> '.join(error.args[1])} depend on each other: remove one of depends_on"

    def _dependencies(self, name: str, service: ComposeService) -> Iterator[str]:
        for other, condition in service.depends_on.items():
            where = f"services.{name}.depends_on.{other}"
            if other not in self.services and other != MAIN:
                yield f"{where}: there is no such service{did_you_mean(other, self.services)}"
            elif condition == "service_healthy" and self.services.get(other, ComposeService()).health is None:
                yield f"{where}: it has no health check: add one, or wait for service_started"
            elif other == MAIN and condition != "service_started":
                yield f"{where}: the agent's own service is ready last: wait for service_started"

    def order(self) -> list[str]:
        """Return services in the order in which they start; `main`, which services may name, is last."""
        graph = {name: {*one.depends_on} - {MAIN} for name, one in self.services.items() if name != MAIN}
        return [*graphlib.TopologicalSorter(graph).static_order(), *({MAIN} & self.services.keys())]

    def is_awaited(self, name: str) -> bool:
        """Return whether another service waits for this one's end."""
        return any(one.depends_on.get(name) == "service_completed_successfully" for one in self.services.values())

    @property
    def environment(self) -> Mapping[str, str]:
        return self.services[MAIN].environment if MAIN in self.services else {}

    @property
    def seconds(self) -> float:
        """For all services to become healthy, one after another."""
        checks = [check for one in self.services.values() if (check := one.health)]
        return sum(check.start_period_sec + check.timeout_sec for check in checks)


def read_compose(path: Path, *, images: Callable[[], Collection[str]], allowed: Container[str]) -> Compose:
    """Read a Compose file; `images` returns names that mean the task's image, or one that it was built from."""
    try:
        compose = Compose.model_validate(_replaced(_tree(path) or {}, "", allowed))
    except ValidationError as error:
        problems = [_explain(item) for item in error.errors(include_url=False)]
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems = [str(error)]
    else:
        problems = [
            f"services.{name}.image: {one.image!r} is another image than the task's, and a task has one sandbox: "
            "install its program in environment/Dockerfile, and leave `image` out"
            for name, one in compose.services.items()
            if one.image not in (None, MAIN) and one.build is None and one.image not in images()
        ]
        if not problems:
            return compose
    lines = "\n".join(f"{path}: {problem}" for problem in problems)
    raise ConfigurationError(lines, hint="Services are processes of the task's one sandbox: change the file so.")


def _tree(path: Path) -> Any:
    """Read numbers as texts: `22:22` is not a number."""
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes: shorten it")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            what = f"more than {MAX_DEPTH} levels" if depth > MAX_DEPTH else f"`*{event.anchor}` is not read"
            raise ValueError(f"line {event.start_mark.line + 1}: {what}: write the values out, in fewer levels")
    return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - it makes nothing but texts, lists and tables


def _replaced(tree: Any, path: str, allowed: Container[str]) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(value, f"{path}.{key}", allowed) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replaced(value, f"{path}.{number}", allowed) for number, value in enumerate(tree)]

    def value_of(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if (name := match["name"]) is None:
            raise ValueError(f"{path[1:]}: write $$ for a dollar sign, and ${{NAME}} or ${{NAME:-x}} for a variable")
        if name in HARBORS:
            return HARBORS[name]
        if (value := _value(match, allowed, os.environ)) is None:
            raise ValueError(f"{path[1:]}: {_why_missing(name, allowed)}")
        return value

    return _DOLLAR.sub(value_of, tree)


def _explain(item: Any) -> str:
    *parents, last = map(str, item["loc"] or ("",))
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = did_you_mean(last, known_fields(Compose, parents))
        message = f"cannot be had here: {INSTEAD.get(last, f'remove it{near}')}"
    if parents[-1:] == ["build"]:
        message = "is another image than the task's: install its program in environment/Dockerfile, and leave it out"
    path = ".".join([*parents, last])
    return f"{path}: {message}" if path else message


# `${NAME}` and `${NAME:-DEFAULT}` stand for variables of the host. A task gets only those that the operator has named,
# since its sandbox is hostile.


def resolve(table: Mapping[str, str], allowed: Container[str], host: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Replace references in the values; one without a value becomes empty."""
    return {key: REFERENCE.sub(lambda match: _value(match, allowed, host) or "", value) for key, value in table.items()}


def missing(
    table: Mapping[str, str], path: str, allowed: Container[str], host: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Report references that have neither a value nor a default; `path` is that of the table."""
    for key, value in table.items():
        for match in REFERENCE.finditer(value):
            if _value(match, allowed, host) is None:
                yield f"{path}.{key}: {_why_missing(match['name'], allowed)}"


def _value(match: re.Match[str], allowed: Container[str], host: Mapping[str, str]) -> str | None:
    name = match["name"]
    return (host.get(name) if name in allowed else None) or match["default"]


def _why_missing(name: str, allowed: Container[str]) -> str:
    why = "is not set" if name in allowed else "may not be read by tasks: see [harbor] variables"
    return f"the variable {name} {why}"
