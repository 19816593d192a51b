"""Dockerfiles as sources of the image store: their bases, and builds of many at once.

A base is looked for among the given ones, then among the store's images, and last in a registry.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.errors import ImageError, ImageNotFoundError, SandboxError
from sandboxes.image_names import read_image_name
from sandboxes.images.build import Progress
from sandboxes.images.sources import (
    REFERENCE,
    DockerfileSource,
    Reference,
    Source,
    name_of_reference,
    source_of_reference,
)
from sandboxes.images.store import ImageStore, StoredImage

FILE = "Dockerfile"
REGISTRY = (
    "where no registry can be reached, name a local image with --base {base}=PATH (an image file, a folder, or "
    "oci-archive:FILE), or give an image of this machine its name"
)


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    source: Source
    name: str
    image: StoredImage | None = None
    error: SandboxError | None = None


def dockerfile_at(path: Path, context: Path | None = None) -> DockerfileSource:
    """Return the source of a Dockerfile, or of a folder's; the file's folder is the default context.

    Raises:
        ImageNotFoundError: There is no such file.
    """
    file = path.expanduser().absolute()
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise ImageNotFoundError(f"there is no Dockerfile {file}", hint="name a Dockerfile, or its folder")
    return DockerfileSource(file, (context or file.parent).expanduser().absolute())


def find_bases(
    store: ImageStore,
    source: DockerfileSource,
    given: Mapping[str, str] | None = None,
    progress: Progress = lambda _line: None,
) -> DockerfileSource:
    """Return the source with the image of each of its bases; those of a registry are pulled now.

    Args:
        given: for names of bases, a path, or a reference to a file such as oci-archive:FILE.
        progress: called with each line of a pull.

    Raises:
        DockerfileError: The file asks for something unsupported.
        ImagePathError: The file names a path of this machine as a base; only `given` may.
        ImageNotFoundError: A given base does not exist.
        ImageBuildError: A base cannot be pulled.
    """
    bases = {}
    for base, line in source.plan().bases.items():
        try:
            bases[base] = _find_base(store, base, given or {}, progress)
        except ImageError as error:
            hint = f"{error.hint}; {REGISTRY.format(base=base)}" if error.hint else REGISTRY.format(base=base)
            message = f"{source.path.name}:{line}: the base {base}: {error}"
            raise type(error)(message, hint=hint) from error
    return replace(source, bases=bases)


def _find_base(store: ImageStore, base: str, given: Mapping[str, str], progress: Progress) -> Path:
    named = given.get(base)
    if named is not None and REFERENCE.fullmatch(named):
        return store.provide(source_of_reference(named), progress=progress).path.resolve()
    if named is not None:
        path = Path(named).expanduser().absolute()
        if not path.exists():
            raise ImageNotFoundError(f"there is no {path}", hint="name an image file, a folder or an archive")
        return path
    return find_or_pull(store, base, progress)


def find_or_pull(store: ImageStore, image: str, progress: Progress = lambda _line: None) -> Path:
    """Return the file of an image that is named as Docker does; one that is not here is pulled.

    Raises:
        ImagePathError: It is a path of this machine.
        ImageBuildError: It cannot be pulled.
    """
    name = read_image_name(image)
    reference = name if REFERENCE.fullmatch(name) else f"docker://{name}"
    for known in (name, reference):
        try:
            return store.resolve(known).resolve()
        except ImageNotFoundError:
            continue
    pulled = source_of_reference(reference)
    return store.provide(pulled, name_of_reference(reference), progress=progress).path.resolve()


async def build_many(
    store: ImageStore,
    sources: Mapping[str, Source],
    *,
    given: Mapping[str, str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    before: Callable[[], None] = lambda: None,
    progress: Callable[[str, str], None] = lambda _name, _line: None,
    done: Callable[[BuildOutcome], None] = lambda _outcome: None,
) -> Sequence[BuildOutcome]:
    """Build images, a few at a time, and return the outcomes in the order of `sources`. One that fails stops no other.

    If this is cancelled, the running steps are ended; a second call goes on from the layers that were made by then.

    Args:
        sources: by the names of their images; that of a reference follows from itself.
        given: bases, as in `find_bases`.
        jobs: how many builds run at once; by default, half as many as there are CPUs, and at least one.
        force: build images that are unchanged, too.
        before: called before each build, in another thread; a SandboxError that it raises becomes the outcome.
        progress: called with an image's name and a line, in another thread.
        done: called with each outcome, in the order in which they end.
    """
    outcomes: dict[str, BuildOutcome] = {}
    pending, workers = iter(sources.items()), jobs or max(1, (os.cpu_count() or 1) // 2)
    limiter, finished = anyio.CapacityLimiter(workers), anyio.Event()

    def build(name: str, source: Source) -> BuildOutcome:
        def say(line: str) -> None:
            progress(name, line)

        try:
            before()
            found = find_bases(store, source, given, say) if isinstance(source, DockerfileSource) else source
            named = None if isinstance(source, Reference) else name
            return BuildOutcome(source, name, store.provide(found, named, force=force, progress=say))
        except SandboxError as error:
            return BuildOutcome(source, name, error=error)

    async def work() -> None:
        for name, source in pending:
            outcomes[name] = await anyio.to_thread.run_sync(build, name, source, limiter=limiter)
            done(outcomes[name])
        if len(outcomes) == len(sources):
            finished.set()

    async def end_steps() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if len(outcomes) < len(sources):  # cancelled: the threads wait for their steps
                store.builder.namespace.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_steps)
        for _ in range(max(1, min(workers, len(sources)))):
            tasks.start_soon(work)
        # Ctrl-C cancels this task alone, so it must not wait at the end of a group that lacks `end_steps`.
        await finished.wait()
        tasks.cancel_scope.cancel()
    return [outcomes[name] for name in sources]
