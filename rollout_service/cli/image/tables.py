"""Images, their features, and the outcome of pruning, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_service.cli import common

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.build import ApptainerBuilder
    from sandboxes.images.eviction import EvictionCandidate
    from sandboxes.images.facts import ImageFacts
    from sandboxes.images.store import ImageStore, StoredImage
    from sandboxes.images.unpacked import UnpackedImages

MEBIBYTE = 2**20


def show_images(images: list[StoredImage], *, as_json: bool) -> None:
    if as_json:
        common.print_json([image_as_dict(image) for image in images])
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("name"), "size", "built", "file")
    for image in images:
        values = image_as_dict(image)
        rows.add_row(image.name, f"{image.size_bytes / MEBIBYTE:.0f} MiB", values["built_at"], values["path"])
    common.out().print(rows if images else "There are no images. Build one with `rollout-service image build base`.")


def image_as_dict(image: StoredImage) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(image) | {"path": str(image.path), "built_at": _utc(image.built_at)}


def _utc(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def show_facts(path: Path, facts: ImageFacts, *, as_json: bool) -> None:
    if as_json:
        more = {"path": path, "missing": facts.missing, "needs_toolkit": facts.needs_toolkit}
        common.print_json({**facts.as_json(), **more, "advice": facts.advice})
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
        "working folder": facts.workdir,
        "user": facts.user,
        "python3": facts.python,
        "its version": facts.python_version,
        "its ipykernel": facts.ipykernel,
    }
    for name, value in found.items():
        rows.add_row(name, value or "none")
    rows.add_row("Python tool", "from the toolkit image" if facts.needs_toolkit else "the image's own python3")
    rows.add_row("missing", ", ".join(facts.missing) or "nothing")
    for title, pairs in (("label", facts.labels), ("variable", facts.environment)):
        for name, value in pairs.items():
            rows.add_row(title, f"{name}={value}")
    for sentence in facts.advice:
        rows.add_row("advice", sentence)
    common.out().print(rows)


def show_pruned(decided: Sequence[EvictionCandidate], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        common.print_json({"dry_run": dry_run, "decided": decided})
        return
    from rollout_service.cli.console import table

    rows = table("what", "name", "of", "size", "last used", "")
    gone = "would be removed" if dry_run else "removed"
    for one in decided:
        state = gone if one.evicted else f"kept: {one.kept or 'within the budget'}"
        size = f"{one.size_bytes / MEBIBYTE:.0f} MiB"
        rows.add_row(one.kind, one.name[:20], one.of, size, _utc(one.last_used), state)
    common.out().print(rows if decided else "There are no images.")


def read_settings() -> Settings:
    from rollout_service.settings import load_settings

    return load_settings()


def image_store(settings: Settings) -> ImageStore:
    """Return the image store of the settings, which a server on this machine uses too."""
    from sandboxes.images.store import ImageStore

    return ImageStore(settings.images_dir, image_builder(settings))


def image_builder(settings: Settings) -> ApptainerBuilder:
    from sandboxes.images.build import ApptainerBuilder

    return ApptainerBuilder(settings.layers_dir)


def unpacked_images(settings: Settings) -> UnpackedImages:
    from sandboxes.config import ApptainerConfig
    from sandboxes.providers.apptainer.provider import ApptainerProvider

    config = settings.sandbox if isinstance(settings.sandbox, ApptainerConfig) else ApptainerConfig()
    return ApptainerProvider(config, settings.state_dir, image_store(settings)).prepared_images.unpacked


def used_images(settings: Settings) -> set[str]:
    from rollout_service.environments.registry import EnvironmentRegistry

    known = EnvironmentRegistry.load(settings.environments, harbor=settings.harbor).list()
    names = {environment.spec.image for environment in known}
    names |= {name for environment in known for name in environment.dockerfiles()}
    names |= {getattr(settings.sandbox, key, None) for key in ("image", "toolkit_image")}
    return {name for name in names if name is not None}
