"""`rollout-service image`: build, pull, inspect, and remove the images that sandboxes start from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import AsJson
from rollout_service.cli.dockerfiles import (
    DockerfileFlags,
    build_dockerfiles,
    dockerfile_sources,
    failure_as_dict,
    is_dockerfile,
)

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.build import ApptainerBuilder
    from sandboxes.images.eviction import EvictionCandidate
    from sandboxes.images.facts import ImageFacts
    from sandboxes.images.sources import Source
    from sandboxes.images.store import ImageStore, StoredImage
    from sandboxes.images.unpacked import UnpackedImages

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
MEBIBYTE = 2**20


class BuildNetwork(Enum):
    """The networks of a Dockerfile's steps."""

    HOST = "host"
    NONE = "none"


CLOCK_SECONDS = 2.0
"""The most that the clocks of this machine and of a shared disk may differ."""


@app.command(
    "build",
    epilog="Example: rollout-service image build base   or: rollout-service image build codex   "
    "or: rollout-service image build task/Dockerfile --base debian:12=debian.sif",
)
def build(
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|DOCKERFILE...", help="The image's name, or Dockerfiles or their folders."
        ),
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
        typer.Option(
            help="A harness whose program the image has; may be repeated, for one image with several."
        ),
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
            help="NAME=PATH for a base of a Dockerfile: an image file, a folder, or oci-archive:FILE; "
            "may be repeated."
        ),
    ] = None,
    network: Annotated[
        BuildNetwork, typer.Option(help="The network of a Dockerfile's steps.")
    ] = BuildNetwork.HOST,
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
) -> None:
    """Build an image from a definition, a Dockerfile, harnesses or a folder; an unchanged one is not built again."""

    def main() -> int:
        if every or any(is_dockerfile(one) for one in images):
            arguments, bases = (
                name_value_pairs(build_arg or [], "--build-arg"),
                name_value_pairs(base or [], "--base"),
            )
            where: Literal["host", "none"] = "none" if network is BuildNetwork.NONE else "host"
            flags = DockerfileFlags(
                context, arguments, target, bases, where, max_gb, not no_cache, jobs, every
            )
            return _build_files(images, name, flags, force=force, as_json=as_json)
        if len(images) > 1 or any((name, context, build_arg, target, base, max_gb, no_cache)):
            raise common.CommandError(
                f"{images[0]!r} is a name, not the path of a Dockerfile",
                hint=f"Write ./{images[0]}/Dockerfile.",
            )
        source = _named_source(images[0], definition, tree, harness or [], name_value_pairs(arg or []))
        _provide(source, images[0], force=force, as_json=as_json)
        return 0

    common.run_blocking(main)


def _named_source(
    name: str, definition: Path | None, tree: Path | None, harness: list[str], arguments: dict[str, str]
) -> Source:
    """Return what an image with this name is made from."""
    from rollout_service.agents.harnesses.images import harness_image, joint_image
    from sandboxes.images.sources import Definition, Tree
    from sandboxes.images.store import packaged

    if tree is not None and (definition is not None or arguments):
        raise common.CommandError(
            "--tree cannot be combined with --definition or --arg", hint="Leave one of them out."
        )
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
def pull(
    reference: Annotated[
        str,
        typer.Argument(
            help="A reference such as docker://python:3.12-slim, or oci-archive:python.tar for a file."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The image's name; by default, taken from the reference.")
    ] = None,
    no_https: NoHttps = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Pull an image from a registry, or make one from an archive."""

    def main() -> None:
        from sandboxes.images.sources import source_of_reference

        _provide(source_of_reference(reference, https=not no_https), name, force=force, as_json=as_json)

    common.run_blocking(main)


@app.command(
    "import", epilog="Example: rollout-service image import saved.tar --tag python:3.12 --name python"
)
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

    def main() -> None:
        from sandboxes.images.sources import ArchiveSource

        _provide(ArchiveSource(file.expanduser().absolute(), tag), name, force=force, as_json=as_json)

    common.run_blocking(main)


@app.command("list", epilog="Example: rollout-service image list --json")
def list_images(as_json: AsJson = False) -> None:
    """Show the images on this machine."""
    common.run_blocking(lambda: _show(_store(_settings()).list(), as_json=as_json))


@app.command("inspect", epilog="Example: rollout-service image inspect base")
def inspect(image: Image, as_json: AsJson = False) -> None:
    """Show what an image offers, and what it lacks for sandboxes, without running anything in it.

    The exit code is 1 if it lacks something that sessions or files need.
    """

    def main() -> int:
        settings = _settings()
        path = _store(settings).resolve(image)
        facts = unpacked_images(settings).facts(path)
        _show_facts(path, facts, as_json=as_json)
        return 1 if facts.missing else 0

    common.run_blocking(main)


@app.command("remove", epilog="Example: rollout-service image remove python")
def remove(
    name: Annotated[
        str, typer.Argument(help="The image's name, from `image list`.", autocompletion=completion.images)
    ],
) -> None:
    """Remove an image; running sandboxes keep theirs."""

    def main() -> None:
        _store(_settings()).remove(name)
        common.err().print(f"removed {name}")

    common.run_blocking(main)


@app.command("prune", epilog="Example: rollout-service image prune --budget-gb 20 --dry-run")
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used images, unpacked images and layers, until each kind fits its budget.

    Images that an environment or a sandbox uses are kept. Leftovers of killed builds are removed.
    """

    def main() -> None:
        settings = _settings()
        store, unpacked = _store(settings), unpacked_images(settings)
        budgets = settings.images_budget_bytes, _unpacked_budget(settings), settings.layers_budget_bytes
        if budget_gb is not None:
            budgets = (int(budget_gb * 1e9),) * 3
        how: dict[str, Any] = {"dry_run": dry_run}
        if idle_hours is not None:
            how["grace_seconds"] = idle_hours * 3600
        decided = [
            *unpacked.prune(budgets[1], **how),
            *_builder(settings).layers.prune(budgets[2], **how),
            *store.prune(budgets[0], keep=_used(settings), **how),
        ]
        _show_pruned(decided, dry_run=dry_run, as_json=as_json)

    common.run_blocking(main)


def _build_files(
    paths: list[str], name: str | None, flags: DockerfileFlags, *, force: bool, as_json: bool
) -> int:
    """Build Dockerfiles; return 1 if one of many failed."""
    from sandboxes.images.dockerfiles import find_bases

    settings = _settings()
    sources = dockerfile_sources(paths, name, flags)
    if len(sources) == 1 and not flags.every:
        ((image, source),) = sources.items()
        with _progress(f"looking for the bases of {source}") as say:
            source = find_bases(_store(settings), source, flags.bases, say)
        _provide(source, image, force=force or not flags.cached, as_json=as_json)
        return 0
    store = _store(settings)
    outcomes = build_dockerfiles(store, _builder(settings), sources, flags, force=force)
    made = [outcome.image for outcome in outcomes if outcome.image is not None]
    failed = [outcome for outcome in outcomes if outcome.image is None]
    if as_json:
        common.print_json([*map(_as_dict, made), *map(failure_as_dict, failed)])
    else:
        _show(made, as_json=False)
    _prune_to_budgets(store, settings, {image.name for image in made})
    return 1 if failed else 0


def _settings() -> Settings:
    from rollout_service.settings import load_settings

    return load_settings()


def _store(settings: Settings) -> ImageStore:
    """Return the image store of the settings, which a server on this machine uses too."""
    from sandboxes.images.store import ImageStore

    return ImageStore(settings.images_dir, _builder(settings))


def _builder(settings: Settings) -> ApptainerBuilder:
    """Return the builder of the store, with the layers of Dockerfiles that the settings name."""
    from sandboxes.images.build import ApptainerBuilder

    return ApptainerBuilder(settings.layers_dir)


def unpacked_images(settings: Settings) -> UnpackedImages:
    """Return the folder in which the configured provider unpacks images."""
    from sandboxes.config import ApptainerConfig
    from sandboxes.providers.apptainer.provider import ApptainerProvider

    config = settings.sandbox if isinstance(settings.sandbox, ApptainerConfig) else ApptainerConfig()
    return ApptainerProvider(config, settings.state_dir, _store(settings)).prepared_images.unpacked


def _unpacked_budget(settings: Settings) -> int | None:
    return getattr(settings.sandbox, "unpacked_budget_bytes", None)


def _used(settings: Settings) -> set[str]:
    """Return the default images of sandboxes, and the images of all environments."""
    from rollout_service.environments.registry import EnvironmentRegistry

    known = EnvironmentRegistry.load(settings.environments, harbor=settings.harbor).list()
    names = {environment.spec.image for environment in known}
    names |= {name for environment in known for name in environment.dockerfiles()}
    names |= {getattr(settings.sandbox, key, None) for key in ("image", "toolkit_image")}
    return {name for name in names if name is not None}


def _provide(source: Source, name: str | None, *, force: bool, as_json: bool) -> None:
    """Make an image, show it, and prune the store to its budget."""
    settings = _settings()
    store = _store(settings)
    begun = time.time()
    image = _made(store, source, name, force=force)
    if image.built_at < begun - CLOCK_SECONDS:
        common.err().print(
            f"{image.name} is unchanged{_unseen(source)}; pass --force to make it again", soft_wrap=True
        )
    _show([image], as_json=as_json)
    _prune_to_budgets(store, settings, {image.name})


def _prune_to_budgets(store: ImageStore, settings: Settings, made: set[str]) -> None:
    """Remove what exceeds the budgets, except the images that were just made."""
    if settings.layers_budget_bytes is not None:
        _builder(settings).layers.prune(settings.layers_budget_bytes)
    if settings.images_budget_bytes is None:
        return
    for gone in store.prune(settings.images_budget_bytes, keep={*made, *_used(settings)}):
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


def name_value_pairs(texts: list[str], flag: str = "--arg") -> dict[str, str]:
    """Return the values of a flag that may be repeated, each NAME=VALUE.

    Raises:
        CommandError: One is not of this form.
    """
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise common.CommandError(
                f"{flag} {name!r} is not of the form NAME=VALUE", hint=f"Write it as {flag} NAME=VALUE."
            )
    return {name: value for name, _, value in pairs}


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


def _show(images: list[StoredImage], *, as_json: bool) -> None:
    if as_json:
        common.print_json([_as_dict(image) for image in images])
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("name"), "size", "built", "file")
    for image in images:
        values = _as_dict(image)
        rows.add_row(image.name, f"{image.size_bytes / MEBIBYTE:.0f} MiB", values["built_at"], values["path"])
    common.out().print(
        rows if images else "There are no images. Build one with `rollout-service image build base`."
    )


def _as_dict(image: StoredImage) -> dict[str, Any]:
    from dataclasses import asdict
    from datetime import UTC, datetime

    built_at = datetime.fromtimestamp(image.built_at, UTC).isoformat(timespec="seconds")
    return asdict(image) | {"path": str(image.path), "built_at": built_at}


def _show_facts(path: Path, facts: ImageFacts, *, as_json: bool) -> None:
    if as_json:
        more = {"path": str(path), "missing": list(facts.missing), "needs_toolkit": facts.needs_toolkit}
        common.print_json({**facts.as_json(), **more, "advice": list(facts.advice)})
        return
    from rollout_service.cli.console import table

    rows = table("", "", header=False)
    rows.add_row("file", str(path))
    rows.add_row("size", f"{facts.size_bytes / MEBIBYTE:.0f} MiB unpacked")
    found = {
        "system": facts.system,
        "machine": facts.architecture,
        "C library": facts.libc,
        "bash": facts.bash,
    }
    found |= {"working folder": facts.workdir, "user": facts.user}
    found |= {"python3": facts.python, "its version": facts.python_version, "its ipykernel": facts.ipykernel}
    for name, value in found.items():
        rows.add_row(name, value or "none")
    rows.add_row(
        "Python tool", "from the toolkit image" if facts.needs_toolkit else "the image's own python3"
    )
    rows.add_row("missing", ", ".join(facts.missing) or "nothing")
    for title, pairs in (("label", facts.labels), ("variable", facts.environment)):
        for name, value in pairs.items():
            rows.add_row(title, f"{name}={value}")
    for sentence in facts.advice:
        rows.add_row("advice", sentence)
    common.out().print(rows)


def _show_pruned(decided: Sequence[EvictionCandidate], *, dry_run: bool, as_json: bool) -> None:
    from dataclasses import asdict
    from datetime import UTC, datetime

    if as_json:
        common.print_json({"dry_run": dry_run, "decided": [asdict(one) for one in decided]})
        return
    from rollout_service.cli.console import table

    rows = table("what", "name", "of", "size", "last used", "")
    gone = "would be removed" if dry_run else "removed"
    for one in decided:
        used = datetime.fromtimestamp(one.last_used, UTC).isoformat(timespec="seconds")
        state = gone if one.evicted else f"kept: {one.kept or 'within the budget'}"
        rows.add_row(one.kind, one.name[:20], one.of, f"{one.size_bytes / MEBIBYTE:.0f} MiB", used, state)
    common.out().print(rows if decided else "There are no images.")
