"""Builds the images of an environment's tasks from their Dockerfiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.cli import common
from rollout_service.cli.env.check import load_environment
from rollout_service.cli.image.dockerfiles import DockerfileFlags, build_dockerfiles, failure_as_dict
from rollout_service.settings import load_settings
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import dockerfile_at
from sandboxes.images.store import ImageStore


@dataclass(frozen=True, slots=True)
class ImageBuild:
    """The options of `env build`."""

    bases: Mapping[str, str]
    jobs: int | None
    force: bool


def build_images(name_or_path: str, options: ImageBuild, *, as_json: bool) -> int:
    """Build the images, and return the exit code: 1 if one failed."""
    settings = load_settings()
    found = load_environment(name_or_path).dockerfiles()
    builder = ApptainerBuilder(settings.layers_dir)
    sources = {name: dockerfile_at(path) for name, path in found.items()}
    flags = DockerfileFlags(bases=options.bases, jobs=options.jobs, every=True)
    outcomes = (
        build_dockerfiles(
            ImageStore(settings.images_dir, builder), builder, sources, flags, force=options.force
        )
        if sources
        else []
    )
    failed = [outcome for outcome in outcomes if outcome.image is None]
    if as_json:
        made = [
            {"name": outcome.name, "path": str(outcome.image.path)} for outcome in outcomes if outcome.image
        ]
        common.print_json([*made, *map(failure_as_dict, failed)])
    else:
        common.err().print(
            f"{common.count(len(outcomes) - len(failed), 'image')} ready, {len(failed)} failed",
            soft_wrap=True,
        )
    return 1 if failed else 0
