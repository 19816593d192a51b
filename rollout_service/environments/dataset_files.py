"""Data sets in an environment's folder (JSON Lines), and instances as models.

Guarantee: every instance is a JSON object that can be stored; any other line is reported by its file and number, from
1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from api_schemas.errors import FieldError
from rollout_service.base import strict_json
from rollout_service.base.errors import ConfigurationError, InvalidFieldError, did_you_mean

MAX_INSTANCE_BYTES = 8 * 1024 * 1024
"""The default limit of a request, too. Each rollout of a task, and each sample that is delivered, has a copy of it."""

Instance = dict[str, JsonValue]
ROW_HINT = 'Each line is one instance, a JSON object in UTF-8, such as {"question": "1 + 1"}.'


def parse_instance(line: bytes) -> dict[str, JsonValue]:
    """
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
    """`split`, if given, becomes that of the instances.

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
    return [_instance(line, f"{path}:{number}", split) for number, line in enumerate(lines, 1) if line.strip()]


@dataclass(frozen=True, slots=True)
class ShippedTasks:
    """The instances that ship with an environment, and what is wrong with their files."""

    instances: Sequence[Instance] = ()
    findings: Sequence[str] = ()

    @classmethod
    def read(cls, files: Sequence[tuple[Path, str | None]]) -> Self:
        """Read files, each with the split of its instances."""
        instances = [instance for path, split in files for instance in read_instances(path, split)]
        empty = [path for path, _ in files if not path.read_bytes().strip()]
        return cls(instances, [f"[dataset]: {path} has no instances" for path in empty])


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


# An instance belongs to the split in its field `split`. No instance is in two splits, and a data set with splits is
# only ever read one split at a time, so nobody trains on held-out tasks by accident.

SPLIT = "split"


def get_split(instance: Instance) -> str | None:
    name = instance.get(SPLIT)
    return name if isinstance(name, str) else None


def count_splits(dataset: Sequence[Instance]) -> dict[str, int]:
    """Count in order of appearance; empty for a data set without splits."""
    return dict(Counter(name for name in map(get_split, dataset) if name is not None))


def select_split(dataset: Sequence[Instance], split: str | None, *, field: str) -> list[Instance]:
    """Return all instances of a data set without splits.

    Raises:
        InvalidFieldError: There is no such split, or one must be named; the path is `field`.
    """
    known = count_splits(dataset)
    if split is None and not known:
        return list(dataset)
    if split in known:
        return [instance for instance in dataset if get_split(instance) == split]
    there = ", ".join(f"{name} ({count})" for name, count in known.items())
    message = (
        "the data set has splits, and none is named"
        if split is None
        else f"the data set has no split {split!r}{did_you_mean(split, known)}"
    )
    hint = f"Its splits: {there}." if known else "It has no splits: leave the field out."
    raise InvalidFieldError.at(field, message, hint=hint)


class InstanceFields(BaseModel):
    """The fields that an environment reads; its prompts may use others."""

    model_config = ConfigDict(extra="ignore", frozen=True)


M = TypeVar("M", bound=BaseModel)


def read_instance(model: type[M], instance: dict[str, JsonValue], *, hint: str = "") -> M:
    """
    Raises:
        InvalidFieldError: A field is missing or wrong; the paths start at `instance`.
    """
    try:
        return model.model_validate(instance)
    except ValidationError as error:
        raise InvalidFieldError(field_errors(error), hint=hint) from error


def field_errors(error: ValidationError, *, skip: int = 0) -> list[FieldError]:
    """Leave out the first `skip` parts of the model's paths."""
    return [
        FieldError(path=".".join(["instance", *map(str, item["loc"][skip:])]), message=item["msg"])
        for item in error.errors(include_url=False, include_input=False)
    ]
