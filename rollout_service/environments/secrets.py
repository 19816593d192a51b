"""Secrets of environments: read on the host for one stage alone, and masked in everything that is shown.

Guarantees: an environment gets no variable or file of the host that the operator has not allowed; an error names the
environment, the key and the source, never the value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from rollout_service.base.errors import SecretMissingError, SecretTooShortError
from rollout_service.base.masking import MIN_CHARS, mask, mask_texts, spellings
from rollout_service.environments.contract import Environment, EnvironmentSpec, SecretSource
from rollout_service.episodes import ESCAPING, Episode, Score, contain
from rollout_service.settings.pipeline import SecretsSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Secret:
    environment: str
    table: str
    key: str
    source: SecretSource

    def __str__(self) -> str:
        return f"environment {self.environment!r}: {self.table} secrets.{self.key}"


def secrets_of(spec: EnvironmentSpec) -> Iterator[Secret]:
    grader = spec.for_grader().sandbox.secrets
    tables = {
        "[sandbox]": spec.sandbox.secrets,
        "[init]": spec.init_secrets,
        "[evaluate]": spec.evaluate_secrets,
        "[sandbox] of the grader": {} if grader == spec.sandbox.secrets else grader,
    }
    for table, sources in tables.items():
        for key, source in sources.items():
            yield Secret(spec.name, table, key, source)


class HostSecrets:
    """The variables and files of this host that the settings let environments have.

    Its methods raise SecretMissingError if a secret is missing, not allowed, or cannot be masked.
    """

    def __init__(self, settings: SecretsSettings | None = None, host: Mapping[str, str] = os.environ) -> None:
        self._settings = settings or SecretsSettings()
        self._host = host
        self.given: set[str] = set()
        """The spellings of all values read so far."""
        self.lacking: list[str] = []
        """Why environments could not have a secret when the service started."""

    def examine(self, spec: EnvironmentSpec) -> Iterator[tuple[Secret, SecretMissingError | None]]:
        """Yield each secret, and why the environment cannot have it, if so."""
        for secret in secrets_of(spec):
            try:
                self.read(secret)
            except SecretMissingError as error:
                yield secret, error
            else:
                yield secret, None

    def note_lacking(self, specs: Iterable[EnvironmentSpec]) -> None:
        """Log secrets that environments cannot have, and keep them in `lacking`."""
        for error in (error for spec in specs for _, error in self.examine(spec) if error is not None):
            log.warning("an environment lacks a secret", why=str(error), hint=error.hint)
            self.lacking.append(f"{error}, as this node started")

    def check(self, spec: EnvironmentSpec) -> set[str]:
        """Return the spellings to mask."""
        return {text for secret in secrets_of(spec) for text in spellings(self.read(secret))}

    def for_sandbox(self, spec: EnvironmentSpec) -> dict[str, str]:
        """Return secrets by their variables."""
        return self._resolve(spec, "[sandbox]")

    def give(self, episode: Episode, spec: EnvironmentSpec, table: str) -> None:
        """Put the secrets of a stage's table into `Episode.secrets`, until `hide`."""
        episode.secrets = self._resolve(spec, table)
        episode.hidden.update(*map(spellings, episode.secrets.values()))

    def _resolve(self, spec: EnvironmentSpec, table: str) -> dict[str, str]:
        return {secret.key: self.read(secret) for secret in secrets_of(spec) if secret.table == table}

    def read(self, secret: Secret) -> str:
        value = self._read(str(secret), secret.source)
        self.given |= spellings(value)
        return value

    def _read(self, where: str, source: SecretSource) -> str:
        value = self._variable(where, source.variable) if source.variable else self._file(where, source.file)
        if not value or "\0" in value:
            raise SecretMissingError(
                f"{where}: the {source} is empty or has a zero byte", hint="Give it a text as its value."
            )
        if len(value) < MIN_CHARS:
            raise SecretTooShortError(
                f"{where}: the {source} has a value of under {MIN_CHARS} characters, which also occurs by chance in "
                "texts that are shown, so it cannot be masked there",
                hint="Give it a longer value; what is not secret belongs in `env`.",
            )
        return value

    def _variable(self, where: str, name: str) -> str:
        if name not in self._settings.variables:
            unset = "" if name in self._host else " It is not set, either: set it where the service is started."
            raise SecretMissingError(
                f"{where}: environments may not have the variable {name}",
                hint=f"If you trust them with it, add its name to [secrets] variables in the settings.{unset}",
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


@contextmanager
def _given(episode: Episode, environment: Environment, secrets: HostSecrets) -> Iterator[None]:
    secrets.give(episode, environment.spec, "[init]")
    try:
        yield
    except ESCAPING as error:
        contain(error, f"init of {environment.spec.name!r}")
    finally:
        episode.secrets = {}


async def prepare(environment: Environment, episode: Episode, secrets: HostSecrets) -> None:
    with _given(episode, environment, secrets):
        await environment.prepare(episode)


async def initialize(
    environment: Environment, episode: Episode, secrets: HostSecrets, *, is_prepared: bool = False
) -> None:
    """Set the sandbox up with the secrets of `[init]`, and leave no process that has them to the agent."""
    with _given(episode, environment, secrets):
        await environment.set_up(episode, is_prepared=is_prepared)
    if environment.spec.init_secrets and episode.sandbox is not None:
        await episode.sandbox.end_processes()


def hide(episode: Episode) -> None:
    """Revoke the secrets of a stage that has ended, and mask them in the episode's texts."""
    episode.secrets = {}
    if not (hidden := episode.hidden):
        return
    episode.notes[:] = mask_texts(episode.notes, hidden)
    episode.grader_output = mask(episode.grader_output, hidden)
    if episode.answer is not None:
        episode.answer = mask(episode.answer, hidden)
    if (program := episode.program) is not None:
        episode.program = program.model_copy(update={"output": mask(program.output, hidden)})


def mask_score(score: Score, hidden: Collection[str]) -> Score:
    """Return a score without the secrets of a grader that names its parts after them."""
    return replace(score, parts=mask_texts(score.parts, hidden))
