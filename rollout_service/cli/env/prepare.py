"""`rollout-service env prepare` and `env build`: make the images of a data set's instances, or of Dockerfiles.

`env prepare` makes an image once, however many instances use it, and skips those that are there, so a second call
continues an interrupted one. An image that cannot be made, or an instance that cannot be used, stops no other, and is
listed with its cause. Instances are looked at one at a time, and only their images are kept in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from rollout_service.agents.harnesses.registry import harness_image
from rollout_service.base.errors import ServiceError
from rollout_service.cli import common
from rollout_service.cli.env.check import instance_name, load_environment
from rollout_service.cli.env.dataset_part import DatasetPart
from rollout_service.cli.image.dockerfiles import DockerfileFlags, build_dockerfiles, show_built
from rollout_service.cli.image.tables import image_builder, image_store
from rollout_service.environments.contract import Environment
from rollout_service.settings import Settings, load_settings
from sandboxes.errors import ImageBuildError, ImageError
from sandboxes.images.dockerfiles import dockerfile_at
from sandboxes.images.sources import REFERENCE, Source, packaged, source_of_reference
from sandboxes.images.store import ImageStore

EVERY_INSTANCES = 1_000
"""How many instances are looked at between two lines of progress."""


@dataclass(frozen=True, slots=True)
class Failure:
    instance: str
    image: str | None
    error: str
    hint: str = ""


@dataclass(slots=True)
class Preparation:
    instances: int = 0
    images: int = 0
    present: int = 0
    made: int = 0
    failures: list[Failure] = field(default_factory=list)

    def show(self) -> None:
        for one in self.failures:
            cause = f"{one.instance}: {one.image + ': ' if one.image else ''}{one.error}"
            common.err().print(cause + (f"\n  {one.hint}" if one.hint else ""), style="red", soft_wrap=True)
        of = f"{common.count(self.images, 'image')} of {common.count(self.instances, 'instance')}"
        told = f"{of}: {self.present} there already, {self.made} made, {len(self.failures)} failed"
        common.err().print(told, soft_wrap=True)


def prepare(part: DatasetPart, *, bases: Mapping[str, str], jobs: int | None, as_json: bool) -> int:
    """Make the missing images; return 1 if anything failed."""
    settings = load_settings()
    store = image_store(settings)
    done = Preparation()
    missing = _missing(part, store, done)
    built = build_dockerfiles(
        settings,
        {image: one.source for image, one in missing.items()},
        DockerfileFlags(bases=bases, jobs=jobs, every=True),
        before=partial(require_room, store, settings),
    )
    done.made = len(built.made)
    done.failures += [_failure(missing[one.name].instance, one.name, one.error) for one in built.failed]
    if settings.layers_budget_bytes is not None and missing:
        image_builder(settings).layers.prune(settings.layers_budget_bytes)
    common.print_json(done) if as_json else done.show()
    return 1 if done.failures else 0


def build_images(name_or_path: str, *, bases: Mapping[str, str], jobs: int | None, force: bool, as_json: bool) -> int:
    """Build the images of an environment's Dockerfiles; return 1 if one failed."""
    files = load_environment(name_or_path).dockerfiles().items()
    flags = DockerfileFlags(bases=bases, jobs=jobs, every=True)
    built = build_dockerfiles(load_settings(), {name: dockerfile_at(path) for name, path in files}, flags, force=force)
    if as_json:
        show_built(built, as_json=True)
    else:
        told = f"{common.count(len(built.made), 'image')} ready, {len(built.failed)} failed"
        common.err().print(told, soft_wrap=True)
    return 1 if built.failed else 0


@dataclass(frozen=True, slots=True)
class MissingImage:
    """An image to be made, and the first instance that needs it."""

    instance: str
    source: Source


def _missing(part: DatasetPart, store: ImageStore, done: Preparation) -> dict[str, MissingImage]:
    missing: dict[str, MissingImage] = {}
    seen: set[str] = set()
    with common.err().status("looking at the instances") as status:
        for name, instance in part.instances:
            done.instances += 1
            if done.instances % EVERY_INSTANCES == 0:
                status.update(f"looking at the instances: {done.instances}, with {len(seen)} images")
            if isinstance(instance, Exception):
                done.failures.append(_failure(name, None, instance))
                continue
            try:
                environment = part.environment(name)
                images = set(_images(environment.for_instance(instance)))
            except ServiceError as error:
                done.failures.append(_failure(instance_name(instance), None, error))
                continue
            for image in sorted(images - seen):
                seen.add(image)
                _look_for(image, instance_name(instance), environment, store, missing, done)
    done.images = len(seen)
    return missing


def _images(environment: Environment) -> Iterator[str]:
    for spec in (environment.spec, environment.spec.for_grader()):
        if spec.image is not None:
            yield spec.image


def _look_for(
    image: str,
    instance: str,
    environment: Environment,
    store: ImageStore,
    missing: dict[str, MissingImage],
    done: Preparation,
) -> None:
    try:
        if store.find(image) is not None:
            done.present += 1
        else:
            missing[image] = MissingImage(instance, _source_of(image, environment, store))
    except ImageError as error:
        done.failures.append(_failure(instance, image, error))


def _source_of(image: str, environment: Environment, store: ImageStore) -> Source:
    if (dockerfile := environment.dockerfiles().get(image)) is not None:
        return dockerfile_at(dockerfile)
    if REFERENCE.fullmatch(image):
        return source_of_reference(image)
    if (harness := harness_image(image, {})) is not None:
        return harness
    try:
        return packaged(image)
    except ImageError:
        store.resolve(image)  # raises, with the command that makes it
        raise


def _failure(instance: str, image: str | None, error: Exception | None) -> Failure:
    said = getattr(error, "summary", str(error))
    return Failure(instance, image, said, getattr(error, "hint", ""))


def require_room(store: ImageStore, settings: Settings) -> None:
    """Check that there is room on the disk, less the need of sandboxes, and in the images' budget.

    Raises:
        ImageBuildError: There is no room for another image.
    """
    store.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store.root).free
    if free < settings.sandboxes.pressure.disk_free_bytes:
        raise ImageBuildError(
            f"the disk of {store.root} has {free / 1e9:.1f} GB left, and sandboxes need them",
            hint="free space, or set ROLLOUT_IMAGES_DIR to another disk; a second call goes on from here",
        )
    if settings.images_budget_bytes is not None:
        taken = sum({image.path.resolve(): image.size_bytes for image in store.list()}.values())
        if taken >= settings.images_budget_bytes:
            raise ImageBuildError(
                f"the images take {taken / 1e9:.1f} GB, which is all of images_budget_bytes",
                hint="raise the budget, or prepare fewer instances: the first images would be removed",
            )
