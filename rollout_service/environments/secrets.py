"""Secrets of environments: read on the host when a stage begins, for that stage alone, and masked in what is shown.

Guarantees: an environment gets no variable or file of the host that the operator has not allowed; an error names the
environment, the key and the source, never the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from rollout_service.environments.contract import Environment, EnvironmentSpec, SecretSource
from rollout_service.episodes import Episode
from rollout_service.errors import SecretMissingError
from rollout_service.settings.pipeline import SecretsSettings

MASK = "***"


class HostSecrets:
    """The variables and files of this host that environments may have."""

    def __init__(self, settings: SecretsSettings | None = None, host: Mapping[str, str] = os.environ) -> None:
        """Allow what the settings name; without settings, nothing."""
        self._settings = settings or SecretsSettings()
        self._host = host

    def resolve(
        self, spec: EnvironmentSpec, table: str, sources: Mapping[str, SecretSource]
    ) -> dict[str, str]:
        """Return the values of a table such as `[evaluate]`, by their names inside the sandbox.

        Raises:
            SecretMissingError: A source is missing, empty, or not allowed.
        """
        return {
            key: self._read(f"environment {spec.name!r}: {table} secrets.{key}", source)
            for key, source in sources.items()
        }

    def problems(self, spec: EnvironmentSpec) -> Iterator[SecretMissingError]:
        """Yield an error for each secret of an environment that cannot be read."""
        grader = spec.for_grader().sandbox.secrets
        tables = [
            ("[sandbox]", spec.sandbox.secrets),
            ("[init]", spec.init_secrets),
            ("[evaluate]", spec.evaluate_secrets),
            ("[sandbox] of the grader", {} if grader == spec.sandbox.secrets else grader),
        ]
        for table, sources in tables:
            for key, source in sources.items():
                try:
                    self.resolve(spec, table, {key: source})
                except SecretMissingError as error:
                    yield error

    def check(self, spec: EnvironmentSpec) -> set[str]:
        """Return the values of all secrets of an environment, which are to be masked.

        Raises:
            SecretMissingError: One cannot.
        """
        for error in self.problems(spec):
            raise error
        sources = (
            spec.sandbox.secrets,
            spec.init_secrets,
            spec.evaluate_secrets,
            spec.for_grader().sandbox.secrets,
        )
        return {value for one in sources for value in self.resolve(spec, "", one).values()}

    def _read(self, where: str, source: SecretSource) -> str:
        value = self._variable(where, source.variable) if source.variable else self._file(where, source.file)
        if not value or "\0" in value:
            raise SecretMissingError(
                f"{where}: the {source} is empty or has a zero byte", hint="Give it a text as its value."
            )
        return value

    def _variable(self, where: str, name: str) -> str:
        if name not in self._settings.variables:
            raise SecretMissingError(
                f"{where}: environments may not have the variable {name}",
                hint="If you trust them with it, add its name to [secrets] variables in the settings.",
            )
        if name not in self._host:
            raise SecretMissingError(
                f"{where}: the variable {name} is not set", hint="Set it where the service is started."
            )
        return self._host[name]

    def _file(self, where: str, name: str | None) -> str:
        folder = self._settings.folder
        if folder is None:
            raise SecretMissingError(
                f"{where}: there is no folder for the file {name}",
                hint="Name a folder with nothing but such files in [secrets] folder of the settings.",
            )
        path = folder.expanduser() / str(name)
        try:
            if not path.is_file():
                raise FileNotFoundError
            return path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError):  # the error of decoding quotes the value
            raise SecretMissingError(
                f"{where}: the file {path} is missing, or cannot be read as text",
                hint="Write it there, readable for the user of the service.",
            ) from None


async def initialize(environment: Environment, episode: Episode, secrets: HostSecrets) -> None:
    """Prepare the sandbox with the secrets of `[init]`, and leave no process that has them to the agent.

    Raises:
        SecretMissingError: A secret cannot be read.
        EnvironmentFailedError: The preparation failed.
    """
    spec = environment.spec
    episode.give_secrets(secrets.resolve(spec, "[init]", spec.init_secrets))
    try:
        await environment.init(episode)
    finally:
        episode.secrets = {}
    if spec.init_secrets and episode.sandbox is not None:
        await episode.sandbox.end_processes()


def mask(text: str, values: Iterable[str]) -> str:
    """Return a text with the values replaced; longer ones first, since one may contain another."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def mask_bytes(data: bytes, values: Iterable[str]) -> bytes:
    """Return bytes with the values replaced."""
    for value in sorted(values, key=len, reverse=True):
        data = data.replace(value.encode(), MASK.encode())
    return data


def mask_error(error: BaseException | None, values: Iterable[str]) -> None:
    """Replace the values in an error's texts and in those of its causes, which the log prints too."""
    values, seen = list(values), set[int]()
    while values and error is not None and id(error) not in seen:
        seen.add(id(error))
        error.args = tuple(mask(one, values) if isinstance(one, str) else one for one in error.args)
        if isinstance(hint := getattr(error, "hint", None), str) and hint:
            error.hint = mask(hint, values)  # type: ignore[attr-defined]
        error = error.__cause__ or error.__context__
