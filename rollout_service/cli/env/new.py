"""A new environment from the template that ships beside this module."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from api_schemas.base import Name
from rollout_service.cli.common import CommandError

TEMPLATE = Path(__file__).parent / "template"
PLACEHOLDER = "ENVIRONMENT_NAME"


def make_environment(name: str, folder: Path) -> Path:
    """Copy the template to `folder/name` and put the name in; raises CommandError when that cannot be done."""
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        hint = "1-64 letters, digits, '.', '_' or '-', of which the first is a letter or digit."
        raise CommandError(f"{name!r} is not a valid name for an environment", hint=hint) from error
    target = folder / name
    try:
        shutil.copytree(TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise CommandError(f"{target} is there already", hint="choose another name or --folder.") from error
    except OSError as error:
        raise CommandError(f"cannot make {target}: {error.strerror}") from error
    for path in (file for file in target.rglob("*") if file.is_file()):
        path.write_text(path.read_text().replace(PLACEHOLDER, name))
    return target
