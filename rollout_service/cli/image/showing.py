"""Images, what they offer, and what was pruned, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_service.cli import common

if TYPE_CHECKING:
    from sandboxes.images.eviction import EvictionCandidate
    from sandboxes.images.facts import ImageFacts
    from sandboxes.images.store import StoredImage

MEBIBYTE = 2**20


def show_images(images: list[StoredImage], *, as_json: bool) -> None:
    """Show images, their sizes and where they are."""
    if as_json:
        common.print_json([image_as_dict(image) for image in images])
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("name"), "size", "built", "file")
    for image in images:
        values = image_as_dict(image)
        rows.add_row(image.name, f"{image.size_bytes / MEBIBYTE:.0f} MiB", values["built_at"], values["path"])
    common.out().print(
        rows if images else "There are no images. Build one with `rollout-service image build base`."
    )


def image_as_dict(image: StoredImage) -> dict[str, Any]:
    """Return an image as JSON."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    built_at = datetime.fromtimestamp(image.built_at, UTC).isoformat(timespec="seconds")
    return asdict(image) | {"path": str(image.path), "built_at": built_at}


def show_facts(path: Path, facts: ImageFacts, *, as_json: bool) -> None:
    """Show what an image offers and lacks."""
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


def show_pruned(decided: Sequence[EvictionCandidate], *, dry_run: bool, as_json: bool) -> None:
    """Show what was removed and kept, and why."""
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
