"""`rollout-service image build` of Dockerfiles: one with its output, or many with a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollout_service.cli import common
from rollout_service.cli.image.tables import image_as_dict, image_store, show_images

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.dockerfiles import BuildOutcome
    from sandboxes.images.sources import DockerfileSource, Source
    from sandboxes.images.store import StoredImage

FILE = "Dockerfile"
LAYOUT = "environment"
"""The folder of a task's Dockerfile in Harbor's layout; the task's folder names the image."""


@dataclass(frozen=True, slots=True)
class DockerfileFlags:
    context: Path | None = None
    arguments: Mapping[str, str] | None = None
    target: str | None = None
    bases: Mapping[str, str] | None = None
    network: Literal["host", "none"] = "host"
    max_gb: float | None = None
    cached: bool = True
    jobs: int | None = None
    every: bool = False
    """Whether to build every Dockerfile below the folders."""


def is_dockerfile(text: str) -> bool:
    name = Path(text).name
    return "/" in text or text in {".", ".."} or name == FILE or name.endswith(f".{FILE}")


def dockerfile_sources(paths: Sequence[str], name: str | None, flags: DockerfileFlags) -> dict[str, DockerfileSource]:
    from sandboxes.images.dockerfiles import dockerfile_at

    files = list(_files(paths, every=flags.every))
    if name is not None and len(files) != 1:
        raise common.CommandError("--name is for one Dockerfile", hint="Leave it out: folders give the names.")
    found: dict[str, DockerfileSource] = {}
    for root, path in files:
        source = dockerfile_at(path, flags.context)
        image = name or _name(source.path, root)
        if image in found:
            raise common.CommandError(
                f"{found[image].path} and {source.path} would both be {image!r}",
                hint="Build them one at a time, with --name.",
            )
        found[image] = replace(
            source,
            arguments=flags.arguments or {},
            target=flags.target,
            network=flags.network,
            max_bytes=None if flags.max_gb is None else int(flags.max_gb * 1e9),
            cached=flags.cached,
        )
    if not found:
        raise common.CommandError(f"there is no {FILE} below {', '.join(paths)}", hint="Name another folder.")
    return found


@dataclass(frozen=True, slots=True)
class Built:
    """Images that were made or were there, and the others."""

    made: list[StoredImage]
    failed: list[BuildOutcome]


def build_dockerfiles(
    settings: Settings,
    sources: Mapping[str, Source],
    flags: DockerfileFlags,
    *,
    force: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Built:
    import anyio

    from sandboxes.images.dockerfiles import build_many

    async def main() -> Sequence[BuildOutcome]:
        with _bar(len(sources)) as (say, done):
            return await build_many(
                image_store(settings),
                sources,
                given=flags.bases,
                jobs=flags.jobs,
                force=force or not flags.cached,
                before=before,
                progress=say,
                done=done,
            )

    outcomes = anyio.run(main) if sources else ()
    return Built(
        [outcome.image for outcome in outcomes if outcome.image is not None],
        [outcome for outcome in outcomes if outcome.image is None],
    )


def show_built(built: Built, *, as_json: bool) -> None:
    if not as_json:
        show_images(built.made, as_json=False)
        return
    failed = [
        {
            "name": one.name,
            "source": str(one.source),
            "error": getattr(one.error, "summary", str(one.error)),
            "hint": getattr(one.error, "hint", ""),
        }
        for one in built.failed
    ]
    common.print_json([*map(image_as_dict, built.made), *failed])


def _files(paths: Sequence[str], *, every: bool) -> Iterator[tuple[Path, Path]]:
    """Yield each Dockerfile's path after the folder that its name is relative to."""
    for text in paths:
        path = Path(text).expanduser().absolute()
        if not every:
            yield (path if path.is_dir() else path.parent).parent, path
            continue
        for found in sorted(path.rglob(FILE)):
            yield path, found


def _name(file: Path, root: Path) -> str:
    """Name an image by its folder, or by its path below a folder whose Dockerfiles are all built."""
    from sandboxes.images.sources import name_of_reference

    folder = file.parent
    if folder.name == LAYOUT and folder.parent not in {root, root.parent}:
        folder = folder.parent
    parts = folder.relative_to(root).parts if folder.is_relative_to(root) else (folder.name,)
    return name_of_reference("-".join(parts) or folder.name)


@contextmanager
def _bar(count: int) -> Iterator[tuple[Callable[[str, str], None], Callable[[BuildOutcome], None]]]:
    """Show a bar with the last line of any build, or, off a terminal, one line for each image that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = common.err()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=count)

        def say(name: str, line: str) -> None:
            progress.update(bar, description=f"{name}: {line[: console.width // 3]}")

        def done(outcome: BuildOutcome) -> None:
            progress.advance(bar)
            console.print(_sentence(outcome), markup=False, highlight=False, soft_wrap=True)

        yield say, done


def _sentence(outcome: BuildOutcome) -> str:
    if outcome.image is not None:
        return f"{outcome.name}: {outcome.image.size_bytes / 2**20:.0f} MiB"
    hint = getattr(outcome.error, "hint", "")
    return f"{outcome.name}: {outcome.error}" + (f"\n  {hint}" if hint else "")
