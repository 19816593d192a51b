"""AReaL: a rollout workflow. Checked against the interface of AReaL 1.0.4.

    trainer.train(workflow="rollout_client.adapters.areal.Workflow", workflow_kwargs={"url": ...})

Each row of the data set has `environment` and `instance`. The versions of tokens are the service's, so AReaL's bound on
staleness holds if its trainer's weights reach the service under AReaL's own version numbers.

AReaL normalizes within blocks of as many rows as a group has episodes. So an episode is one row, the one with the most
tokens to train on; `left_out` counts the tokens of the others, and the log warns about the first. With
`segments="all"`, each segment is a row, which is for normalization over the batch. A rollout without a reward is run
again, and then NoRewardError is raised, which makes AReaL reject the group; if the episode were None, the group would
go on with too few rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import Sample, count_left_out, only_largest, samples_of
from rollout_client.adapters.submit import RolloutSubmitter

log = logging.getLogger(__name__)

PADDING = {"input_ids": 0, "loss_mask": 0, "logprobs": 0.0, "versions": -1, "attention_mask": False}


class Episodes:
    def __init__(
        self,
        submitter: RolloutSubmitter | None = None,
        *,
        url: str | None = None,
        gconfig: Any = None,
        segments: Literal["largest", "all"] = "largest",
    ) -> None:
        """Read sampling parameters from `gconfig`, which is AReaL's GenerationHyperparameters."""
        self.segments = segments
        self.left_out = 0
        """Tokens to train on for which AReaL has no row."""
        submitter = submitter or RolloutSubmitter.from_environment(**({"url": url} if url else {}))
        self.engines = TrainerEngines("areal", submitter)
        names = ("temperature", "top_p", "top_k", "stop")
        self.params = {name: getattr(gconfig, name, None) for name in names}
        if getattr(gconfig, "greedy", False):
            self.params["temperature"] = 0.0
        self.max_tokens = getattr(gconfig, "max_new_tokens", None)

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        """Run an episode; AReaL calls this.

        Raises:
            NoRewardError: The rollout has no reward after all attempts.
        """
        submitter = await self.engines.follow(*engines_of(engine))
        request = submitter.request(data, self.params, max_tokens=self.max_tokens, trainer="areal")
        samples = samples_of(await submitter.run_scored(request))
        return tensors(samples if self.segments == "all" else self._largest(samples))

    def _largest(self, samples: list[Sample]) -> list[Sample]:
        rows = only_largest(samples)
        left_out = count_left_out(samples, rows)
        if left_out and not self.left_out:
            log.warning(
                "rollout %s has %d segments; AReaL gets the largest, and not %d sampled tokens of the others. "
                'With `segments="all"` it gets all, for normalization over the batch.',
                samples[0].rollout_id,
                len(samples),
                left_out,
            )
        self.left_out += left_out
        return rows


def engines_of(engine: Any) -> tuple[list[str], int | None]:
    """Return the addresses of AReaL's engines and the version of their weights; no addresses if it has none."""
    remote = getattr(engine, "_engine", engine)
    addresses = list(getattr(remote, "addresses", None) or ())
    return addresses, int(engine.get_version()) if addresses else None


@lru_cache(maxsize=1)
def make_workflow_class() -> Any:
    """Return `Episodes` as a subclass of AReaL's workflow; the attribute `Workflow` is the same, for import paths."""
    from areal.api.workflow_api import RolloutWorkflow

    class Workflow(Episodes, RolloutWorkflow):  # type: ignore[misc]
        pass

    return Workflow


def __getattr__(name: str) -> Any:
    if name == "Workflow":  # made on first use, since its base class is AReaL's
        return make_workflow_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tensors(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return rows in AReaL's form, `[rows, longest row]`."""
    import torch

    types = {
        "input_ids": torch.int32,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "attention_mask": torch.bool,
        "rewards": torch.float32,
    }
    return {name: torch.tensor(values, dtype=types[name]) for name, values in padded(samples).items()}


def padded(samples: Sequence[Sample]) -> dict[str, list[Any]]:
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
    return columns | {"rewards": [sample.reward for sample in samples]}
