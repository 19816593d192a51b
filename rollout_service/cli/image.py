"""`rollout-service image`: the images that sandboxes are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson

if TYPE_CHECKING:
    from sandboxes.image_build import ImageInfo
    from sandboxes.images import ImageStore, StoredImage

app = typer.Typer(
    name="image", help="Build, pull, list, inspect and remove sandbox images.", no_args_is_help=True
)

Image = Annotated[str, typer.Argument(help="A name, a path, or a reference that was pulled.")]
Force = Annotated[bool, typer.Option("--force", help="Make it anew even if it is here.")]
MEBIBYTE = 2**20


@app.command("build", epilog="Example: rollout-service image build base")
def build(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    definition: Annotated[
        Path | None, typer.Option(help="Apptainer definition file; default: the built-in one of this name.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the definition's %arguments; may be repeated.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Build an image from a definition; at once when the same was built before."""

    def main() -> None:
        with _progress(f"building {name}") as say:
            image = _store().build(name, definition, arguments=_pairs(arg or []), force=force, progress=say)
        _show([image], as_json=as_json)

    common.run_blocking(main)


@app.command("pull", epilog="Example: rollout-service image pull docker://python:3.12-slim --name python")
def pull(
    reference: Annotated[str, typer.Argument(help="Such as docker://python:3.12-slim.")],
    name: Annotated[str | None, typer.Option(help="What to call it; default: from the reference.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fetch an image from a registry."""

    def main() -> None:
        with _progress(f"pulling {reference}") as say:
            image = _store().pull(reference, name, force=force, progress=say)
        _show([image], as_json=as_json)

    common.run_blocking(main)


@app.command("list", epilog="Example: rollout-service image list --json")
def list_images(as_json: AsJson = False) -> None:
    """Show the images of this machine."""
    common.run_blocking(lambda: _show(_store().list(), as_json=as_json))


@app.command("inspect", epilog="Example: rollout-service image inspect base")
def inspect(image: Image, as_json: AsJson = False) -> None:
    """Start an image once and show what it offers; exit code 1 when it lacks what the sessions need."""

    def main() -> int:
        info = _store().inspect(image)
        _show_info(info, as_json=as_json)
        return 1 if info.missing else 0

    common.run_blocking(main)


@app.command("remove", epilog="Example: rollout-service image remove python")
def remove(name: Annotated[str, typer.Argument(help="As `image list` shows it.")]) -> None:
    """Forget an image; sandboxes that run keep theirs."""

    def main() -> None:
        _store().remove(name)
        common.err().print(f"removed {name}")

    common.run_blocking(main)


def _store() -> ImageStore:
    """The store of the settings, so that a server on this machine sees the same images."""
    from rollout_service.settings import load_settings
    from sandboxes.images import ImageStore

    return ImageStore(load_settings().images_dir)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise common.CommandError(f"--arg {name!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in pairs}


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """The builder's last line beside a spinner; off a terminal, every line."""
    console = common.err()
    if not console.is_terminal:
        yield lambda line: console.print(line, markup=False, soft_wrap=True)
        return
    with console.status(what) as status:
        yield lambda line: status.update(f"{what}: {line[: console.width // 2]}")


def _show(images: list[StoredImage], *, as_json: bool) -> None:
    if as_json:
        common.print_json([_as_dict(image) for image in images])
        return
    from rich.table import Column, Table

    table = Table("name", "size", "built", Column("file", overflow="fold"), box=None)
    for image in images:
        values = _as_dict(image)
        table.add_row(
            image.name, f"{image.size_bytes / MEBIBYTE:.0f} MiB", values["built_at"], values["path"]
        )
    common.out().print(
        table if images else "no image is here; make one with `rollout-service image build base`"
    )


def _as_dict(image: StoredImage) -> dict[str, Any]:
    from dataclasses import asdict
    from datetime import UTC, datetime

    built_at = datetime.fromtimestamp(image.built_at, UTC).isoformat(timespec="seconds")
    return asdict(image) | {"path": str(image.path), "built_at": built_at}


def _show_info(info: ImageInfo, *, as_json: bool) -> None:
    programs = {"bash": info.bash, "python3": info.python, "ipykernel": info.ipykernel}
    if as_json:
        values = {"path": str(info.path), "size_bytes": info.size_bytes, **programs}
        common.print_json(values | {"labels": dict(info.labels), "missing": list(info.missing)})
        return
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("file", str(info.path))
    table.add_row("size", f"{info.size_bytes / MEBIBYTE:.0f} MiB")
    for name, version in (programs | dict(info.labels)).items():
        table.add_row(name, version or "missing")
    common.out().print(table)
