"""The sources of settings: flags over variables over the file over defaults.

Every value, and every mistake, is traced to its flag, its variable, or its line in the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.settings.keys import fields_at, is_json, known_keys

ENV_PREFIX = "ROLLOUT_"
OTHER_VARIABLES = {
    "ROLLOUT_APPTAINER": "the `apptainer` executable to use",
    "ROLLOUT_CA_FILE": "the CA certificates that commands trust, instead of the system's",
    "ROLLOUT_CONFIG": "the settings file, instead of `rollout.toml` in the working folder",
    "ROLLOUT_KEY": "the bearer key that commands send",
    "ROLLOUT_URL": "the URL of the server that commands talk to",
    "ROLLOUT_PYTHON": "the Python that `scripts/` installs with",
    "ROLLOUT_SGLANG_ENV": "where `scripts/install-sglang` put SGLang",
    "ROLLOUT_TEST_WORKERS": "the number of processes of `scripts/test`",
    "ROLLOUT_TORCH_INDEX": "where the scripts get torch from",
    "ROLLOUT_UV": "the uv that installs Python packages in images, by its own settings, instead of pip",
    "ROLLOUT_VLLM_ENV": "where `scripts/install-vllm` put vLLM",
}
"""Variables with the prefix of settings that are not settings."""
FLAGS = {
    "host": "--host",
    "port": "--port",
    "sandbox.provider": "--sandbox",
    "engine": "--engine",
    "embedded.model": "--model",
    "embedded.pools": "--pool-model",
    "backends": "--backend",
    "environments": "--environment",
    "state_dir": "--state-dir",
    "keys_file": "--keys-file",
    "tls_certificate": "--tls-certificate",
    "tls_key": "--tls-key",
    "pipeline.init_workers": "--init-workers",
    "pipeline.rollout_workers": "--rollout-workers",
    "pipeline.evaluate_workers": "--evaluate-workers",
    "sandboxes.ceiling": "--max-sandboxes",
    "sandboxes.warm.size": "--warm-sandboxes",
    "cluster.name": "--node-name",
    "cluster.labels": "--node-label",
    "log_level": "--log-level",
}
"""The flags of `serve`, by the key that they set."""
SHARED = frozenset(
    {
        "host",
        "port",
        "keys",
        "keys_file",
        "allowed_hosts",
        "path_prefix",
        "tls_certificate",
        "tls_key",
        "tls_key_password",
        "store",
        "cluster",
        "live",
        "gateway.host",
        "gateway.port",
        "gateway.public_url",
    }
)
"""The keys and tables that make a service one for others: who may use it, where it is, and with whom it works."""
HINT = "`rollout-service config docs` lists all settings."
_HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""^\s*([\w.\-"' ]+?)\s*=""")


class Origin(StrEnum):
    FLAG = "flag"
    VARIABLE = "variable"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a value; `where` is the flag, the variable, or `FILE:LINE`."""

    origin: Origin
    where: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that was set, before validation."""

    flags: Mapping[str, Any]
    variables: Mapping[str, str]
    file: Path | None
    """The settings file, if there is one."""
    table: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """The line in the file of each key and table."""

    @classmethod
    def read(cls, flags: Mapping[str, Any], environ: Mapping[str, str], path: Path, *, must_exist: bool) -> Sources:
        """Read the file, and pick the variables that are settings.

        Raises:
            ConfigurationError: The file is missing though it must exist, cannot be read, or is not valid TOML.
        """
        given = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
        variables = {name.upper(): value for name, value in given.items() if name.upper() not in OTHER_VARIABLES}
        try:
            text = path.read_text(encoding="utf-8")
            return cls(flags, variables, path.absolute(), tomllib.loads(text), _lines(text))
        except FileNotFoundError:
            if must_exist:
                raise ConfigurationError(f"the settings file {path} does not exist") from None
            return cls(flags, variables, None)
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            what = "cannot be read" if isinstance(error, OSError) else "is not valid TOML"
            raise ConfigurationError(f"{path} {what}: {error}") from error

    def check_variables(self, model: type[BaseModel]) -> None:
        """
        Raises:
            ConfigurationError: A variable is not a setting, or is not valid JSON although its setting requires it.
        """
        for name, text in self.variables.items():
            fields = fields_at(model, _path(name))
            if not fields:
                known = {variable_name(key) for key in known_keys(model)}
                raise ConfigurationError(f"{name} is not a setting{did_you_mean(name, known)}", hint=HINT)
            if any(map(is_json, fields)):
                _refuse_what_is_not_json(name, text)

    def source(self, path: Sequence[str]) -> Source:
        if _holds(self.flags, path):
            return Source(Origin.FLAG, _flag(path))
        for name in sorted(self.variables, key=len, reverse=True):
            if _holds(_tree(name, self.variables[name]), path):
                return Source(Origin.VARIABLE, name)
        if _holds(self.table, path):
            return Source(Origin.FILE, self._place(tuple(path)))
        return Source(Origin.DEFAULT)

    def _place(self, path: tuple[str, ...]) -> str:
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path]}" if path else str(self.file)


def is_shared(variable: str) -> bool:
    path = _path(variable.upper()) if variable.upper().startswith(ENV_PREFIX) else []
    return any(".".join(path[:end]) in SHARED for end in range(1, len(path) + 1))


def without_shared(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    kept = {name: value for name, value in table.items() if above + name not in SHARED}
    return {
        name: without_shared(value, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in kept.items()
    }


def variable_name(dotted: str) -> str:
    return ENV_PREFIX + dotted.replace(".", "__").upper()


def _flag(path: Sequence[str]) -> str:
    """Return the flag that sets the value at a path, or the list that contains it."""
    ways = (FLAGS.get(".".join(path[:end])) for end in range(len(path), 0, -1))
    return next(filter(None, ways), "")


def _path(variable: str) -> list[str]:
    return variable.removeprefix(ENV_PREFIX).lower().split("__")


def _refuse_what_is_not_json(name: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        example = """a list is '["a", "b"]', a table '{"key": 1}'"""
        raise ConfigurationError(
            f"{name} is not valid JSON: {error}", hint=f"Quote it for the shell: {example}."
        ) from error


def _tree(variable: str, text: str) -> Any:
    """Return a variable as a tree of tables, with its value as the only leaf."""
    tree: Any = text
    with suppress(ValueError):
        tree = json.loads(text)
    for part in reversed(_path(variable)):
        tree = {part: tree}
    return tree


def _holds(tree: Any, path: Sequence[str]) -> bool:
    """Return whether a tree has a value at a path; a list, or a text that stands for one, has all paths below it."""
    for part in path:
        if isinstance(tree, list | str):
            return True
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each table and key; a key in an inline table has that table's line."""
    table: tuple[str, ...] = ()
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_parts(assignment[1])), number)
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
