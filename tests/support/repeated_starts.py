"""Apptainer's provider, whose sandboxes are made by the launcher as Apptainer made one of the same kind before."""

from dataclasses import replace
from pathlib import Path

from sandboxes import SandboxSpec
from sandboxes.providers.apptainer.provider import ApptainerProvider
from sandboxes.providers.sandbox import ControlledSandbox


class RepeatedStarts(ApptainerProvider):
    """Starts another sandbox of the kind first, and closes it."""

    async def start(self, spec: SandboxSpec) -> ControlledSandbox:
        first = replace(spec, snapshot=None, saved=None, lifetime_seconds=None)
        await (await super().start(first)).close()
        sandbox = await super().start(spec)
        assert not runs_apptainer(sandbox)
        return sandbox


def runs_apptainer(sandbox: ControlledSandbox) -> bool:
    """Return whether Apptainer started a sandbox; it names its process itself."""
    return Path(f"/proc/{sandbox.pid}/cmdline").read_bytes().startswith(b"Apptainer runtime parent")
