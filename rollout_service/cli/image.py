"""`rollout-service image`: build, pull, inspect, and remove the images that sandboxes start from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.eviction import EvictionCandidate
    from sandboxes.images.facts import ImageFacts
    from sandboxes.images.sources import Source
    from sandboxes.images.store import ImageStore, StoredImage
    from sandboxes.images.unpacked import UnpackedImages

app = typer.Typer(
    name="image", help="Build, pull, list, inspect, remove, and prune sandbox images.", no_args_is_help=True
)

Image = Annotated[
    str, typer.Argument(help="An image's name, its path, or the reference that it was pulled from.")
]
Force = Annotated[bool, typer.Option("--force", help="Make the image again even if it exists.")]
NoHttps = Annotated[bool, typer.Option("--no-https", help="Connect to the registry without TLS.")]
MEBIBYTE = 2**20
CLOCK_SECONDS = 2.0
"""The most that the clocks of this machine and of a shared disk may differ."""


@app.command(
    "build",
    epilog="Example: rollout-service image build base   "
    "or: rollout-service image build mine --tree /srv/debootstrap",
)
def build(
    name: Annotated[str, typer.Argument(help="The image's name.")],
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
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Build an image from a definition or a folder; an unchanged image is not built again."""

    def main() -> None:
        from sandboxes.images.sources import Definition, Tree
        from sandboxes.images.store import packaged

        if tree is not None and (definition is not None or arg):
            raise common.CommandError(
                "--tree cannot be combined with --definition or --arg", hint="Leave one of them out."
            )
        source: Source
        if tree is not None:
            source = Tree(tree.expanduser().absolute())
        elif definition is not None:
            source = Definition(definition.expanduser().absolute(), _pairs(arg or []))
        else:
            source = packaged(name, _pairs(arg or []))
        _provide(source, name, force=force, as_json=as_json)

    common.run_blocking(main)


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
def remove(name: Annotated[str, typer.Argument(help="The image's name, from `image list`.")]) -> None:
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
            min=0, help="Budget in GB for images, and for unpacked images, instead of the settings'."
        ),
    ] = None,
    idle_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Keep what was used within this many hours; by default, 24, and 10 minutes for unpacked images.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used images and unpacked images, until both fit their budgets.

    Images that an environment or a sandbox uses are kept. Leftovers of killed builds are removed.
    """

    def main() -> None:
        settings = _settings()
        store, unpacked = _store(settings), unpacked_images(settings)
        budgets = settings.images_budget_bytes, _unpacked_budget(settings)
        if budget_gb is not None:
            budgets = int(budget_gb * 1e9), int(budget_gb * 1e9)
        how: dict[str, Any] = {"dry_run": dry_run}
        if idle_hours is not None:
            how["grace_seconds"] = idle_hours * 3600
        decided = [
            *unpacked.prune(budgets[1], **how),
            *store.prune(budgets[0], keep=_used(settings), **how),
        ]
        _show_pruned(decided, dry_run=dry_run, as_json=as_json)

    common.run_blocking(main)


def _settings() -> Settings:
    from rollout_service.settings import load_settings

    return load_settings()


def _store(settings: Settings) -> ImageStore:
    """Return the image store of the settings, which a server on this machine uses too."""
    from sandboxes.images.store import ImageStore

    return ImageStore(settings.images_dir)


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

    names = {environment.spec.image for environment in EnvironmentRegistry.load(settings.environments).list()}
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
    if settings.images_budget_bytes is None:
        return
    for gone in store.prune(settings.images_budget_bytes, keep={image.name, *_used(settings)}):
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


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise common.CommandError(
                f"--arg {name!r} is not of the form NAME=VALUE", hint="Write it as --arg NAME=VALUE."
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
