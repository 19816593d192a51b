"""AReaL: a rollout workflow. Checked against the interface of AReaL 1.0.4.

    trainer.train(workflow="rollout_client.adapters.areal.Workflow", workflow_kwargs={"url": ...})

Each row of the data set has `environment` and `instance`. The versions of tokens are the service's, so AReaL's bound
on staleness holds if its trainer's weights reach the service under AReaL's own version numbers.

Guarantees: those of the package. Each segment is a row of the episode. A rollout without a reward is rejected as AReaL
expects: the episode is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from api_schemas.rollouts import Rollout
from rollout_client.adapters.samples import samples_of
from rollout_client.adapters.submit import RolloutSubmitter, read_sampling

PADDING = {"input_ids": 0, "loss_mask": 0, "logprobs": 0.0, "versions": -1, "attention_mask": False}
"""The padding of rows that are shorter than the longest one of their episode."""


class Episodes:
    """Runs one rollout for an episode."""

    def __init__(
        self, submitter: RolloutSubmitter | None = None, *, url: str | None = None, gconfig: Any = None
    ) -> None:
        """Read sampling parameters from `gconfig`, which is AReaL's GenerationHyperparameters."""
        self.submitter = submitter or RolloutSubmitter.from_environment(**({"url": url} if url else {}))
        names = ("temperature", "top_p", "top_k")
        self.sampling = read_sampling({name: getattr(gconfig, name, None) for name in names})
        self.max_tokens = getattr(gconfig, "max_new_tokens", None)

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Run an episode; AReaL calls this."""
        del engine  # the service has the engines
        request = self.submitter.request(
            data, sampling=self.sampling, max_tokens=self.max_tokens, metadata={"trainer": "areal"}
        )
        return tensors(await self.submitter.run(request))


@lru_cache(maxsize=1)
def make_workflow_class() -> Any:
    """Return `Episodes` as a subclass of AReaL's workflow; the attribute `Workflow` is the same, for import paths."""
    from areal.api.workflow_api import RolloutWorkflow

    class Workflow(Episodes, RolloutWorkflow):  # type: ignore[misc]
        """`Episodes` with AReaL's base class."""

    return Workflow


def __getattr__(name: str) -> Any:
    if name == "Workflow":  # made on first use, since its base class is AReaL's
        return make_workflow_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tensors(rollout: Rollout) -> dict[str, Any] | None:
    """Return a rollout in AReaL's form, `[rows, longest row]`; None if it must not be trained on."""
    columns = padded(rollout)
    if columns is None:
        return None
    import torch

    types = {
        "input_ids": torch.int32,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "attention_mask": torch.bool,
        "rewards": torch.float32,
    }
    return {name: torch.tensor(values, dtype=types[name]) for name, values in columns.items()}


def padded(rollout: Rollout) -> dict[str, list[Any]] | None:
    """Return the columns of all rows, of equal length; None if there is nothing to train on."""
    samples = samples_of(rollout)
    if rollout.reward is None or not samples:
        return None
    longest = max(len(sample.token_ids) for sample in samples)
    rows = []
    for sample in samples:
        before = len(sample.prompt_ids)
        row: dict[str, list[Any]] = {
            "input_ids": sample.token_ids,
            "loss_mask": [0] * before + sample.response_mask,
            "logprobs": [0.0] * before + sample.logprobs,
            "versions": [-1] * before + sample.versions,
            "attention_mask": [True] * len(sample.token_ids),
        }
        missing = longest - len(sample.token_ids)
        rows.append({name: values + [PADDING[name]] * missing for name, values in row.items()})
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in PADDING}
    return columns | {"rewards": [rollout.reward] * len(rows)}
