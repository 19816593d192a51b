"""Makes a new environment from one of the templates next to this module."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from api_schemas.base import Name
from rollout_service.base.errors import did_you_mean
from rollout_service.cli.common import CommandError

TEMPLATES = Path(__file__).parent / "templates"
DEFAULT = "files"
FILE_NAME = "environment.toml"
PLACEHOLDER = "ENVIRONMENT_NAME"


def make_environment(name: str, folder: Path, template: str = DEFAULT) -> Path:
    """Copy a template to `folder/name`, and fill in the name."""
    known = sorted(path.name for path in TEMPLATES.iterdir() if (path / FILE_NAME).is_file())
    if template not in known:
        raise CommandError(
            f"there is no template {template!r}{did_you_mean(template, known)}",
            hint=f"The templates are {', '.join(known)}.",
        )
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        hint = "Use 1-64 letters, digits, '.', '_', or '-', starting with a letter or digit."
        raise CommandError(f"{name!r} is not a valid name for an environment", hint=hint) from error
    target = folder / name
    try:
        shutil.copytree(TEMPLATES / template, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (file for file in target.rglob("*") if file.is_file()):
            path.write_text(path.read_text().replace(PLACEHOLDER, name))
    except FileExistsError as error:
        raise CommandError(
            f"{target} already exists", hint="Choose another name, or another folder with --folder."
        ) from error
    except OSError as error:  # one of `copytree` has a text for each file
        shutil.rmtree(target, ignore_errors=True)
        why = error.strerror or f"{len(error.args[0])} files cannot be copied"
        raise CommandError(f"cannot create {target}: {why}", hint="Choose another folder with --folder.") from error
    return target
