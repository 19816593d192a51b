"""Prepare images for Apptainer sandboxes: the image on disk, and the Python that runs its kernels.

The image's own python3 is used if the image's files show that it runs and has ipykernel; otherwise the toolkit's is.
This is determined once per image, when it is unpacked, and costs a start nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from sandboxes.config import ApptainerConfig
from sandboxes.contract import Bind
from sandboxes.errors import ImageNotFoundError
from sandboxes.images import toolkit
from sandboxes.images.cache import default_cache
from sandboxes.images.store import ImageStore
from sandboxes.images.unpacked import UnpackedImages


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image that is ready to start sandboxes from."""

    image: Path
    """The image file, or the folder it is unpacked in."""

    python: str = "python3"
    binds: tuple[Bind, ...] = ()
    workdir: str | None = None
    """The working folder that the image names."""

    user_env: dict[str, str] = field(default_factory=dict)
    """HOME, USER and LOGNAME of the user that the image names."""


class PreparedImages:
    """Finds images by name, and prepares them."""

    def __init__(
        self, config: ApptainerConfig, images: ImageStore, apptainer: Path, owner: tuple[int, int]
    ) -> None:
        self._config = config
        self._images = images
        self.unpacked = UnpackedImages(
            apptainer,
            config.unpacked_dir or default_cache() / "unpacked",
            *owner,
            budget_bytes=config.unpacked_budget_bytes,
        )
        """The unpacked images."""

    async def prepare(self, name: str) -> PreparedImage:
        """Prepare an image. The first time takes seconds if the image has to be unpacked.

        Raises:
            ImageNotFoundError: The image does not exist, or the toolkit is required and its image does not exist.
            ImageError: The image cannot be unpacked, or the toolkit cannot be made.
        """
        return await anyio.to_thread.run_sync(self._prepare, name)

    def _prepare(self, name: str) -> PreparedImage:
        image = self._images.resolve(name)
        facts = None if self._config.unpack or image.is_dir() else self.unpacked.facts(image)
        if facts is None:
            unpacked = self.unpacked.provide(image)
            image, facts = unpacked.folder, unpacked.facts
        if self._config.python == "image" or (self._config.python == "auto" and not facts.needs_toolkit):
            return PreparedImage(image, workdir=facts.workdir, user_env=facts.user_env)
        try:
            folder = self.unpacked.toolkit(self._images.resolve(self._config.toolkit_image))
        except ImageNotFoundError:
            if self._config.python == "toolkit":
                raise
            # Bash works anyway; the start of a kernel reports what is missing.
            return PreparedImage(image, workdir=facts.workdir, user_env=facts.user_env)
        bind = Bind(str(folder), toolkit.INSIDE)
        return PreparedImage(image, toolkit.PYTHON, (bind,), facts.workdir, facts.user_env)
