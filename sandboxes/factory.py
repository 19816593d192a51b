"""The factory that turns settings into a provider.

A provider's module is imported only when its settings are used, so a service that runs Apptainer never loads Docker's.
"""

from pathlib import Path

from sandboxes.config import DockerConfig, E2BConfig, LocalConfig, ProviderConfig, default_state_dir
from sandboxes.contract import SandboxProvider


def make_provider(
    config: ProviderConfig, state_dir: Path | None = None, images_dir: Path | None = None
) -> SandboxProvider:
    """Make a provider without starting anything.

    `state_dir` is created when it is first used. `images_dir` holds the named images.

    Raises:
        ProviderUnavailableError: This host lacks something that the provider needs; the hint says how to install it.
        SandboxConfigError: The settings contradict this host, for example a user that does not exist.
    """
    state = state_dir or default_state_dir()
    if isinstance(config, LocalConfig):
        from sandboxes.providers.local import LocalProvider

        return LocalProvider(config, state)
    if isinstance(config, DockerConfig):
        from sandboxes.providers.docker import DockerProvider

        return DockerProvider(config, state)
    if isinstance(config, E2BConfig):
        from sandboxes.providers.e2b.provider import E2BProvider

        return E2BProvider(config, state)
    from sandboxes.images.store import ImageStore
    from sandboxes.providers.apptainer.provider import ApptainerProvider

    return ApptainerProvider(config, state, ImageStore(images_dir))
