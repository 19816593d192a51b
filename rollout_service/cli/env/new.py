"""Makes a new environment from the template next to this module."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from api_schemas.base import Name
from rollout_service.cli.common import CommandError

TEMPLATE = Path(__file__).parent / "template"
PLACEHOLDER = "ENVIRONMENT_NAME"


def make_environment(name: str, folder: Path) -> Path:
    """Copy the template to `folder/name`, and fill in the name.

    Raises:
        CommandError: The name is invalid, the folder exists, or it cannot be written.
    """
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        hint = "Use 1-64 letters, digits, '.', '_', or '-', starting with a letter or digit."
        raise CommandError(f"{name!r} is not a valid name for an environment", hint=hint) from error
    target = folder / name
    try:
        shutil.copytree(TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise CommandError(
            f"{target} already exists", hint="Choose another name, or another folder with --folder."
        ) from error
    except OSError as error:
        raise CommandError(
            f"cannot create {target}: {error.strerror}", hint="Choose another folder with --folder."
        ) from error
    for path in (file for file in target.rglob("*") if file.is_file()):
        path.write_text(path.read_text().replace(PLACEHOLDER, name))
    return target
