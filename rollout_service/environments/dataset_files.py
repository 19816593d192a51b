"""The data set in an environment's folder: JSON Lines, one instance per line.

Guarantee: every instance is a JSON object that can be stored; a line that is not is reported by its file and number,
counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import JsonValue

from rollout_service.base import strict_json
from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.splits import SPLIT

MAX_INSTANCE_BYTES = 8 * 1024 * 1024
"""The default limit of a request, too. Each rollout of a task, and each sample that is delivered, has a copy of it."""

ROW_HINT = 'Each line is one instance, a JSON object in UTF-8, such as {"question": "1 + 1"}.'


def parse_instance(line: bytes) -> dict[str, JsonValue]:
    """Return the instance in a line of a data file.

    Raises:
        ValueError: The line is not an object that can be stored, or is too large.
    """
    if len(line) > MAX_INSTANCE_BYTES:
        raise ValueError(
            f"an instance of over {MAX_INSTANCE_BYTES / 1e6:.1f} MB, of which every sample would have a copy; put "
            "large data into the image, or into a file that the instance names"
        )
    return strict_json.parse_row(line)


def read_instances(path: Path, split: str | None = None) -> list[dict[str, JsonValue]]:
    """Read the instances of a file; `split`, if given, becomes theirs.

    Raises:
        ConfigurationError: The file cannot be read, or a line is not valid.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # a text's splitlines() would also cut at U+2028
    except OSError as error:
        raise ConfigurationError(
            f"the data set {path} cannot be read: {error}",
            hint="Correct `path` or `splits` of [dataset]; a path begins at the folder of environment.toml.",
        ) from error
    return [
        _instance(line, f"{path}:{number}", split) for number, line in enumerate(lines, 1) if line.strip()
    ]


def read_files(files: Iterable[tuple[Path, str | None]]) -> list[dict[str, JsonValue]]:
    """Read the instances of several files, each with its split, if any.

    Raises:
        ConfigurationError: A file cannot be read, or a line is not valid.
    """
    return [instance for path, split in files for instance in read_instances(path, split)]


def find_empty(files: Iterable[tuple[Path, str | None]]) -> list[str]:
    """Return a finding for each file without an instance."""
    return [f"[dataset]: {path} has no instances" for path, _ in files if not path.read_bytes().strip()]


def _instance(line: bytes, where: str, split: str | None) -> dict[str, JsonValue]:
    try:
        instance = parse_instance(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}", hint=ROW_HINT) from error
    if split is None:
        return instance
    if instance.get(SPLIT, split) != split:
        raise ConfigurationError(
            f"{where} says that its split is {instance[SPLIT]!r}; its file is {split!r}",
            hint="Leave the key `split` out of the line, or move the line to the file of its split.",
        )
    return instance | {SPLIT: split}
