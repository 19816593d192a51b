"""The measurements of images that share layers: what each takes to build, and on disk."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import folder_kept_on_error
from support.environments.rollout_costs import Figures

from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import build_many, dockerfile_at
from sandboxes.images.store import ImageStore, StoredImage

MEGABYTE = 1e6
COMMON_BYTES, GROUP_BYTES, OWN_BYTES = 8_000_000, 2_000_000, 250_000
"""What the layer of all images has, that of each group, and that of each image: bytes that cannot be compressed."""
GROUP = 10
"""How many images share a group's layer."""
DOCKERFILE = """\
FROM base
RUN head -c {common} /dev/urandom >/opt/common
RUN head -c {group_bytes} /dev/urandom >/opt/group-{group}
COPY own /opt/own
"""


async def image_figures(count: int) -> Figures:
    """Build images one after the other in folders of their own, which are removed."""
    with _builds() as builds:
        taken, images = [], []
        for number in range(count):
            context = _make_context(builds.place, number)
            begun = time.perf_counter()
            images.append(await builds.build(context))
            taken.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        await builds.build(context)
        unchanged = time.perf_counter() - begun
        layers = [one.size_bytes for one in builds.builder.layers.prune(None, dry_run=True)]
        own = COMMON_BYTES + -(-count // GROUP) * GROUP_BYTES + count * OWN_BYTES
        sizes = [image.size_bytes / MEGABYTE for image in images]
        return {
            "images": count,
            "image_mb_p50": statistics.median(sizes),
            "images_mb": sum(sizes),
            "limit_images_mb": (builds.base.stat().st_size + own) / MEGABYTE,
            "layers_mb": sum(layers) / MEGABYTE,
            "layers": len(layers),
            "build_first_s": taken[0],
            "build_s_p50": statistics.median(taken[1:]),
            "build_s_max": max(taken[1:]),
            "build_unchanged_ms": unchanged * 1e3,
        }


@dataclass(frozen=True, slots=True)
class ImageBuilds:
    """A store of images and a cache of layers, both in one folder."""

    place: Path
    builder: ApptainerBuilder
    store: ImageStore
    base: Path

    async def build(self, context: Path) -> StoredImage:
        """Do what `rollout-service image build` does; a cancellation ends the step that runs."""
        sources = {context.name: dockerfile_at(context)}
        [outcome] = await build_many(self.store, sources, given={"base": str(self.base)})
        if outcome.image is None:
            raise outcome.error or RuntimeError(f"{context} was not built")
        return outcome.image


@contextmanager
def _builds() -> Iterator[ImageBuilds]:
    base = ImageStore().resolve("base").resolve()
    with folder_kept_on_error("rollout-benchmark-") as place:
        builder = ApptainerBuilder(place / "layers")
        try:
            yield ImageBuilds(place, builder, ImageStore(place / "images", builder), base)
        finally:
            builder.namespace.remove(place / "layers")  # its files may belong to other users


def _make_context(place: Path, number: int) -> Path:
    """Return the folder of an image's Dockerfile."""
    folder = place / f"image-{number}"
    folder.mkdir()
    text = DOCKERFILE.format(common=COMMON_BYTES, group_bytes=GROUP_BYTES, group=number // GROUP)
    (folder / "Dockerfile").write_text(text)
    (folder / "own").write_bytes(os.urandom(OWN_BYTES))
    return folder
