"""Weights from the trainer to the engines, through a folder for each step and `POST /v1/weights`.

Guarantees: after `push`, the engines serve the saved weights, under a higher version than any before. The folder that
they serve from is kept, so an engine that comes back finds it; the previous folder is removed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from api_schemas.inference import PoolOutcome
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.client import RolloutClient
from rollout_client.errors import WeightsError

log = logging.getLogger(__name__)


class WeightsFolder:
    """Weights of one trainer under `folder`, which the engines must be able to read."""

    def __init__(self, submitter: RolloutSubmitter, folder: Path) -> None:
        self.submitter = submitter
        self.folder = folder.absolute()
        self.step: int | None = None
        """The step whose weights the engines serve; None before the first push."""
        self.version: int | None = None
        self._base = 0

    def path(self, step: int) -> Path:
        """Return the folder for the weights of a step."""
        return self.folder / f"step-{step}"

    def push(self, step: int, save: Callable[[str], None]) -> int:
        """Save the weights of a step, load them into every engine of the pool, and return their version.

        If only some engines loaded them, that is logged and training continues: the others are out of service until
        they have them.

        Raises:
            WeightsError: No engine loaded them.
            ClientError: The service cannot be reached or refuses.
        """
        path = self.path(step)
        path.mkdir(parents=True, exist_ok=True)
        save(str(path))
        outcome: PoolOutcome = self.submitter.blocking(lambda client: self._update(client, step))
        if self.step is not None and self.step != step:
            shutil.rmtree(self.path(self.step), ignore_errors=True)
        self.step, self.version = step, outcome.version
        return self._base + step

    async def _update(self, client: RolloutClient, step: int) -> PoolOutcome:
        if self.step is None:  # continue the numbers of earlier trainers of this service
            served = [
                one.weight_version for one in await client.backends() if one.pool == self.submitter.pool
            ]
            self._base = max(served, default=0) + 1
        try:
            return await client.update_weights(
                str(self.path(step)), self._base + step, pool=self.submitter.pool
            )
        except WeightsError as error:
            if not error.outcome.changed:
                raise
            log.warning("%s", error)
            return error.outcome
