"""What a build knows of its stages: the variables, labels and layers that the instructions so far have given one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.images.dockerfile.layers import ImageLayer
from sandboxes.images.dockerfile.words import expand


@dataclass(slots=True)
class StageState:
    """What is known of a stage so far."""

    key: str
    layers: tuple[ImageLayer, ...] = ()
    """The topmost first."""

    declared: Mapping[str, str] = field(default_factory=dict)
    """The variables of the base's own scripts, which the image keeps."""

    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The folders of the layers, the topmost first."""
        return tuple(layer.files for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """What all layers take on disk."""
        return sum(layer.size_bytes for layer in self.layers)

    def expand(self, text: str, escape: str) -> str:
        """Replace the variables of a text; see `words.expand`."""
        return expand(text, self.args | self.env, escape)
