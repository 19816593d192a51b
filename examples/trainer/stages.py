"""The utilization of the service's stages, from its `/metrics`."""

from __future__ import annotations

import re
import time

import httpx

_WORKED = re.compile(r'^rollout_stage_seconds_sum\{stage="(\w+)"\} (\S+)$', re.MULTILINE)


class StageClock:
    """Reads how much time the stages have worked."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/metrics"
        self._read: tuple[float, dict[str, float]] | None = None

    async def busy(self) -> dict[str, float]:
        """Return the mean number of busy workers in each stage since the previous call; nothing on the first."""
        async with httpx.AsyncClient(trust_env=False) as http:  # on this machine, whose address no proxy reaches
            text = (await http.get(self._url)).raise_for_status().text
        before = self._read
        now, worked = time.monotonic(), {stage: float(seconds) for stage, seconds in _WORKED.findall(text)}
        self._read = (now, worked)
        if before is None:
            return {}
        then, earlier = before
        return {
            f"busy_{stage}": (seconds - earlier.get(stage, 0.0)) / (now - then) for stage, seconds in worked.items()
        }
