"""The images of this machine, as the settings name them; a server on this machine uses the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from sandboxes.images.build import ApptainerBuilder
    from sandboxes.images.store import ImageStore
    from sandboxes.images.unpacked import UnpackedImages


def read_settings() -> Settings:
    """Return the settings of this machine."""
    from rollout_service.settings import load_settings

    return load_settings()


def image_store(settings: Settings) -> ImageStore:
    """Return the image store of the settings, which a server on this machine uses too."""
    from sandboxes.images.store import ImageStore

    return ImageStore(settings.images_dir, image_builder(settings))


def image_builder(settings: Settings) -> ApptainerBuilder:
    """Return the builder of the store, with the layers of Dockerfiles that the settings name."""
    from sandboxes.images.build import ApptainerBuilder

    return ApptainerBuilder(settings.layers_dir)


def unpacked_images(settings: Settings) -> UnpackedImages:
    """Return the folder in which the configured provider unpacks images."""
    from sandboxes.config import ApptainerConfig
    from sandboxes.providers.apptainer.provider import ApptainerProvider

    config = settings.sandbox if isinstance(settings.sandbox, ApptainerConfig) else ApptainerConfig()
    return ApptainerProvider(config, settings.state_dir, image_store(settings)).prepared_images.unpacked


def unpacked_budget(settings: Settings) -> int | None:
    """Return the most space for unpacked images; None sets no limit."""
    return getattr(settings.sandbox, "unpacked_budget_bytes", None)


def used_images(settings: Settings) -> set[str]:
    """Return the default images of sandboxes, and the images of all environments."""
    from rollout_service.environments.registry import EnvironmentRegistry

    known = EnvironmentRegistry.load(settings.environments, harbor=settings.harbor).list()
    names = {environment.spec.image for environment in known}
    names |= {name for environment in known for name in environment.dockerfiles()}
    names |= {getattr(settings.sandbox, key, None) for key in ("image", "toolkit_image")}
    return {name for name in names if name is not None}
