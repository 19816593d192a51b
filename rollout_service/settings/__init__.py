"""The service's settings: flags over `ROLLOUT_*` environment variables over `rollout.toml` over defaults.

An unknown key is refused, with the closest known one, and a service that listens beyond loopback without a key does not
start. Nested keys are tables in TOML and `__` in variables: `[pipeline] rollout_workers = 64` is
`ROLLOUT_PIPELINE__ROLLOUT_WORKERS=64`.
"""

from rollout_service.settings.engines import DefaultEngine, PoolSettings
from rollout_service.settings.loader import build_settings, load_own_settings, load_settings, read_sources
from rollout_service.settings.pipeline import PipelineSettings, SandboxesSettings
from rollout_service.settings.service import LogFormat, Settings, is_loopback
from rollout_service.settings.store import RetentionSettings, StoreSettings

__all__ = [
    "DefaultEngine",
    "LogFormat",
    "PipelineSettings",
    "PoolSettings",
    "RetentionSettings",
    "SandboxesSettings",
    "Settings",
    "StoreSettings",
    "build_settings",
    "is_loopback",
    "load_own_settings",
    "load_settings",
    "read_sources",
]
