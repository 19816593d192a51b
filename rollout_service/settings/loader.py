"""Reads the settings from flags, variables and the file, and builds them.

An error names every key that is wrong, and where it was set; it shows no value.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.settings.keys import known_keys
from rollout_service.settings.service import Settings
from rollout_service.settings.sources import ENV_PREFIX, HINT, Sources, is_shared, without_shared


def load_settings(config: Path | None = None, /, **flags: Any) -> Settings:
    """
    Raises:
        ConfigurationError: A source cannot be read, or a value is invalid; the message names every such key.
    """
    return build_settings(read_sources(config, **flags))


def load_own_settings(config: Path | None = None, /, **flags: Any) -> Settings:
    """Read the settings for a server that a command starts for itself, in a process of its own.

    Nobody else is to use it, or to work with it, so it has none of `SHARED`, except as flags.

    Raises:
        ConfigurationError: As from `load_settings`.
    """
    for name in [name for name in os.environ if is_shared(name)]:
        del os.environ[name]
    sources = read_sources(config, **flags)
    return build_settings(replace(sources, table=without_shared(sources.table)))


def read_sources(config: Path | None = None, /, **flags: Any) -> Sources:
    """
    Raises:
        ConfigurationError: A source cannot be read, or a variable is unknown.
    """
    path = config or Path(os.environ.get(f"{ENV_PREFIX}CONFIG", "rollout.toml"))
    must_exist = config is not None or f"{ENV_PREFIX}CONFIG" in os.environ
    given = {name: value for name, value in flags.items() if value is not None}
    sources = Sources.read(given, os.environ, path, must_exist=must_exist)
    sources.check_variables(Settings)
    return sources


def build_settings(sources: Sources) -> Settings:
    """
    Raises:
        ConfigurationError: A value is invalid; the message says where each one was set.
    """

    class _Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            table = InitSettingsSource(settings_cls, init_kwargs=dict(sources.table))
            return init_settings, env_settings, table

    try:
        settings = _Layered(**sources.flags)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, sources), hint=HINT) from None  # it would show the values
    settings._file = sources.file
    return settings


def _explain(error: ValidationError, sources: Sources) -> str:
    known = known_keys(Settings)
    lines = []
    for item in error.errors():
        path = _without_tags([str(part) for part in item["loc"]])
        dotted, where = ".".join(path), sources.source(path).where
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown setting{did_you_mean(dotted, known)}"
        lines.append(": ".join(filter(None, [where, dotted, text])))
    return "\n".join(lines)


def _without_tags(path: list[str]) -> list[str]:
    """Drop the tags that pydantic adds for union members, such as `sandbox.apptainer`."""
    if path[:1] == ["sandbox"] and len(path) > 2:
        return [path[0], *path[2:]]
    return path
