"""`rollout-service image`: build, pull, inspect, and remove the images that sandboxes start from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import AsJson
from rollout_service.cli.image.dockerfiles import (
    DockerfileFlags,
    build_dockerfiles,
    dockerfile_sources,
    is_dockerfile,
    show_built,
)
from rollout_service.cli.image.tables import (
    image_builder,
    image_store,
    read_settings,
    show_facts,
    show_images,
    show_pruned,
    unpacked_images,
    used_images,
)

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.sources import Source
    from sandboxes.images.store import ImageStore, StoredImage

app = typer.Typer(
    name="image", help="Build, pull, list, inspect, remove, and prune sandbox images.", no_args_is_help=True
)

Image = Annotated[
    str,
    typer.Argument(
        help="An image's name, its path, or the reference that it was pulled from.",
        autocompletion=completion.images,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Make the image again even if it exists.")]
NoHttps = Annotated[bool, typer.Option("--no-https", help="Connect to the registry without TLS.")]


@app.command(
    "build",
    epilog="Example: rollout-service image build base   or: rollout-service image build codex   "
    "or: rollout-service image build task/Dockerfile --base debian:12=debian.sif",
)
@common.command
def build(
    images: Annotated[
        list[str],
        typer.Argument(metavar="NAME|DOCKERFILE...", help="The image's name, or Dockerfiles or their folders."),
    ],
    definition: Annotated[
        Path | None,
        typer.Option(help="Apptainer definition file; by default, the built-in one with this name."),
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Folder with a root file system, such as debootstrap makes.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the definition's %arguments; may be repeated.")
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option(help="A harness whose program the image has; may be repeated, for one image with several."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="With a Dockerfile: the image's name; by default, its folder's.")
    ] = None,
    context: Annotated[
        Path | None, typer.Option(help="The folder that a Dockerfile copies from; by default, its own.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for a Dockerfile's ARG; may be repeated.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The stage of a Dockerfile to build.")] = None,
    base: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH for a base of a Dockerfile: an image file, a folder, or oci-archive:FILE; may be repeated."
        ),
    ] = None,
    network: Annotated[Literal["host", "none"], typer.Option(help="The network of a Dockerfile's steps.")] = "host",
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="The most that the files of a Dockerfile's image may take.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every step of a Dockerfile, and use no earlier layer.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Build every Dockerfile below the folders; names follow from paths.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Dockerfiles built at once; by default, half as many as CPUs.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Build an image from a definition, a Dockerfile, harnesses or a folder; an unchanged one is not built again."""
    if every or any(is_dockerfile(one) for one in images):
        arguments = common.name_value_pairs(build_arg, "--build-arg")
        bases = common.name_value_pairs(base, "--base")
        flags = DockerfileFlags(context, arguments, target, bases, network, max_gb, not no_cache, jobs, every)
        return build_files(images, name, flags, force=force, as_json=as_json)
    if len(images) > 1 or any((name, context, build_arg, target, base, max_gb, no_cache)):
        raise common.CommandError(
            f"{images[0]!r} is a name, not the path of a Dockerfile",
            hint=f"Write ./{images[0]}/Dockerfile.",
        )
    arguments = common.name_value_pairs(arg, "--arg")
    source = _named_source(images[0], definition, tree, harness or [], arguments)
    provide(source, images[0], force=force, as_json=as_json)
    return 0


def _named_source(
    name: str, definition: Path | None, tree: Path | None, harness: list[str], arguments: dict[str, str]
) -> Source:
    from rollout_service.agents.harnesses.registry import harness_image, joint_image
    from sandboxes.images.sources import Definition, Tree, packaged

    if tree is not None and (definition is not None or arguments):
        raise common.CommandError("--tree cannot be combined with --definition or --arg", hint="Leave one of them out.")
    if harness and (tree is not None or definition is not None):
        raise common.CommandError(
            "--harness cannot be combined with --definition or --tree", hint="Leave one of them out."
        )
    if tree is not None:
        return Tree(tree.expanduser().absolute())
    if definition is not None:
        return Definition(definition.expanduser().absolute(), arguments)
    if harness:
        return joint_image(harness, arguments)
    return harness_image(name, arguments) or packaged(name, arguments)


@app.command("pull", epilog="Example: rollout-service image pull docker://python:3.12-slim --name python")
@common.command
def pull(
    reference: Annotated[
        str,
        typer.Argument(help="A reference such as docker://python:3.12-slim, or oci-archive:python.tar for a file."),
    ],
    name: Annotated[str | None, typer.Option(help="The image's name; by default, taken from the reference.")] = None,
    no_https: NoHttps = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Pull an image from a registry, or make one from an archive."""
    from sandboxes.images.sources import source_of_reference

    provide(source_of_reference(reference, https=not no_https), name, force=force, as_json=as_json)


@app.command("import", epilog="Example: rollout-service image import saved.tar --tag python:3.12 --name python")
@common.command
def import_archive(
    file: Annotated[Path, typer.Argument(help="An OCI archive, or what `docker save` wrote.")],
    tag: Annotated[str | None, typer.Option(help="Which image, if the archive has many.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The image's name; by default, taken from the tag or the file.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make an image from an archive of images, of whichever kind."""
    from sandboxes.images.sources import ArchiveSource

    provide(ArchiveSource(file.expanduser().absolute(), tag), name, force=force, as_json=as_json)


@app.command("list", epilog="Example: rollout-service image list --json")
@common.command
def list_images(as_json: AsJson = False) -> None:
    """Show the images on this machine."""
    show_images(image_store(read_settings()).list(), as_json=as_json)


@app.command("inspect", epilog="Example: rollout-service image inspect base")
@common.command
def inspect(image: Image, as_json: AsJson = False) -> int:
    """Show the features of an image, and those that sandboxes miss, without running anything in it.

    The exit code is 1 if it lacks something that sessions or files need.
    """
    settings = read_settings()
    path = image_store(settings).resolve(image)
    facts = unpacked_images(settings).facts(path)
    show_facts(path, facts, as_json=as_json)
    return 1 if facts.missing else 0


@app.command("remove", epilog="Example: rollout-service image remove python")
@common.command
def remove(
    name: Annotated[str, typer.Argument(help="The image's name, from `image list`.", autocompletion=completion.images)],
) -> None:
    """Remove an image; running sandboxes keep theirs."""
    image_store(read_settings()).remove(name)
    common.err().print(f"removed {name}")


@app.command("prune", epilog="Example: rollout-service image prune --budget-gb 20 --dry-run")
@common.command
def prune(
    budget_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Budget in GB for images, for unpacked images and for layers, instead of the settings'.",
        ),
    ] = None,
    idle_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Keep what was used within this many hours; by default, 24, and 10 minutes for unpacked images "
            "and layers.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used images, unpacked images and layers, until each kind fits its budget.

    Images that an environment or a sandbox uses are kept. Leftovers of killed builds are removed.
    """
    settings = read_settings()
    store, unpacked = image_store(settings), unpacked_images(settings)
    of_unpacked = getattr(settings.sandbox, "unpacked_budget_bytes", None)
    budgets = settings.images_budget_bytes, of_unpacked, settings.layers_budget_bytes
    if budget_gb is not None:
        budgets = (int(budget_gb * 1e9),) * 3
    how: dict[str, Any] = {"dry_run": dry_run}
    if idle_hours is not None:
        how["grace_seconds"] = idle_hours * 3600
    decided = [
        *unpacked.prune(budgets[1], **how),
        *image_builder(settings).layers.prune(budgets[2], **how),
        *store.prune(budgets[0], keep=used_images(settings), **how),
    ]
    show_pruned(decided, dry_run=dry_run, as_json=as_json)


CLOCK_SECONDS = 2.0
"""The clocks of this machine and of a shared disk may differ this much."""


def build_files(paths: list[str], name: str | None, flags: DockerfileFlags, *, force: bool, as_json: bool) -> int:
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
    built = build_dockerfiles(settings, sources, flags, force=force)
    show_built(built, as_json=as_json)
    _prune_to_budgets(image_store(settings), settings, {image.name for image in built.made})
    return 1 if built.failed else 0


def provide(source: Source, name: str | None, *, force: bool, as_json: bool) -> None:
    """Make an image, show it, and prune the store to its budget."""
    from sandboxes.images.sources import Definition

    settings = read_settings()
    store = image_store(settings)
    begun = time.time()
    image = _made(store, source, name, force=force)
    if image.built_at < begun - CLOCK_SECONDS:
        unseen = " (files that it copies in were not compared)" if isinstance(source, Definition) else ""
        common.err().print(f"{image.name} is unchanged{unseen}; pass --force to make it again", soft_wrap=True)
    show_images([image], as_json=as_json)
    _prune_to_budgets(store, settings, {image.name})


def _prune_to_budgets(store: ImageStore, settings: Settings, made: set[str]) -> None:
    """Remove images beyond the budgets, except those that were just made."""
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
        # Every line of the builder's output is already printed.
        raise common.CommandError(error.summary, hint=error.hint) from error


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
