"""Makes images, shows how far that is, and prunes what then exceeds the budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout_service.cli import common
from rollout_service.cli.image.dockerfiles import (
    DockerfileFlags,
    build_dockerfiles,
    dockerfile_sources,
    failure_as_dict,
)
from rollout_service.cli.image.showing import image_as_dict, show_images
from rollout_service.cli.image.stores import image_builder, image_store, read_settings, used_images

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.sources import Source
    from sandboxes.images.store import ImageStore, StoredImage

CLOCK_SECONDS = 2.0
"""The most that the clocks of this machine and of a shared disk may differ."""


def build_files(
    paths: list[str], name: str | None, flags: DockerfileFlags, *, force: bool, as_json: bool
) -> int:
    """Build Dockerfiles; return 1 if one of many failed."""
    from sandboxes.images.dockerfiles import find_bases

    settings = read_settings()
    sources = dockerfile_sources(paths, name, flags)
    if len(sources) == 1 and not flags.every:
        ((image, source),) = sources.items()
        with _progress(f"looking for the bases of {source}") as say:
            source = find_bases(image_store(settings), source, flags.bases, say)
        provide(source, image, force=force or not flags.cached, as_json=as_json)
        return 0
    store = image_store(settings)
    outcomes = build_dockerfiles(store, image_builder(settings), sources, flags, force=force)
    made = [outcome.image for outcome in outcomes if outcome.image is not None]
    failed = [outcome for outcome in outcomes if outcome.image is None]
    if as_json:
        common.print_json([*map(image_as_dict, made), *map(failure_as_dict, failed)])
    else:
        show_images(made, as_json=False)
    _prune_to_budgets(store, settings, {image.name for image in made})
    return 1 if failed else 0


def provide(source: Source, name: str | None, *, force: bool, as_json: bool) -> None:
    """Make an image, show it, and prune the store to its budget."""
    settings = read_settings()
    store = image_store(settings)
    begun = time.time()
    image = _made(store, source, name, force=force)
    if image.built_at < begun - CLOCK_SECONDS:
        common.err().print(
            f"{image.name} is unchanged{_unseen(source)}; pass --force to make it again", soft_wrap=True
        )
    show_images([image], as_json=as_json)
    _prune_to_budgets(store, settings, {image.name})


def _prune_to_budgets(store: ImageStore, settings: Settings, made: set[str]) -> None:
    """Remove what exceeds the budgets, except the images that were just made."""
    if settings.layers_budget_bytes is not None:
        image_builder(settings).layers.prune(settings.layers_budget_bytes)
    if settings.images_budget_bytes is None:
        return
    for gone in store.prune(settings.images_budget_bytes, keep={*made, *used_images(settings)}):
        if gone.evicted:
            common.err().print(f"removed {gone.name}: images_budget_bytes is exceeded")


def _made(store: ImageStore, source: Source, name: str | None, *, force: bool) -> StoredImage:
    from sandboxes.errors import ImageBuildError

    try:
        with _progress(f"making an image from {source}") as say:
            return store.provide(source, name, force=force, progress=say)
    except ImageBuildError as error:
        if common.err().is_terminal:
            raise
        # Every line of the builder's output has been printed already.
        raise common.CommandError(error.summary, hint=error.hint) from error


def _unseen(source: Source) -> str:
    from sandboxes.images.sources import Definition

    return " (files that it copies in were not compared)" if isinstance(source, Definition) else ""


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show the builder's last line next to a spinner, or, off a terminal, every line."""
    from rich.text import Text

    console = common.err()
    if not console.is_terminal:
        yield lambda line: console.print(line, soft_wrap=True)
        return
    with console.status(Text(what)) as status:
        yield lambda line: status.update(Text(f"{what}: {line[: console.width // 2]}"))
