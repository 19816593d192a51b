"""Train with SkyRL, with a generator that gets rollouts from the service at ROLLOUT_URL.

Start it like SkyRL's `main_base`, with the same settings. Each row has `environment` and `instance`.
"""

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.utils import initialize_ray

from rollout_client.adapters.skyrl import generator


class ServiceExp(BasePPOExp):
    """SkyRL's experiment, whose rollouts come from the service."""

    def get_generator(self, cfg, tokenizer, inference_engine_client):  # noqa: ANN001, ANN201, ARG002 - SkyRL's own
        return generator(inference_engine_client, step_wise=cfg.generator.step_wise_trajectories)


@ray.remote(num_cpus=1)
def entrypoint(cfg: SkyRLTrainConfig) -> None:
    ServiceExp(cfg).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    initialize_ray(config)
    ray.get(entrypoint.remote(config))
