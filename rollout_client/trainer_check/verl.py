"""verl's default trainer in this process, with a dictionary for TransferQueue, which moves rows between processes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from api_schemas.tasks import Task
from rollout_client.adapters import verl as adapter
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.trainer_check.check import Row, Trainer, run_together

LOOP = "- {name: rollout_service, _target_: rollout_client.adapters.verl.RolloutAgentLoop}\n"
FIELDS = ["uid", "prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs"]


class Queue:
    """TransferQueue's calls by a worker and the trainer, in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.statuses: dict[str, str] = {}

    def init(self, *_: object, **__: object) -> None:
        """Do nothing: there is nothing to connect to."""

    async def async_kv_put(self, key: str, partition_id: str, tag: Mapping[str, Any]) -> None:
        del partition_id
        self.statuses[key] = tag["status"]

    async def async_kv_batch_put(self, keys: Sequence[str], fields: Any, tags: Any, partition_id: str) -> None:
        del tags, partition_id
        for number, key in enumerate(keys):
            self.rows[key] = {name: fields[name][number] for name in FIELDS if name in fields.keys()}  # noqa: SIM118 - a TensorDict iterates over rows

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        del partition_id
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        return list_of_dict_to_tensordict(
            [{name: row[name] for name in select_fields if name in row} for row in map(self.rows.get, keys) if row]
        )

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> None:
        del partition_id
        for number, key in enumerate(keys):
            self.rows[key] |= {name: fields[name][number] for name in fields.keys()}  # noqa: SIM118


class Verl(Trainer):
    package = "verl"
    drops_failures = True

    def __init__(self, submitter: RolloutSubmitter, policy: str, group: int) -> None:
        super().__init__(submitter, policy, group)
        self._folder = tempfile.TemporaryDirectory()
        loops = Path(self._folder.name) / "agent_loops.yaml"
        loops.write_text(LOOP)
        self.config = _config(policy, group, loops)
        self.queue = Queue()

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        from transfer_queue import KVBatchMeta
        from verl.trainer.ppo.v1 import trainer_base

        self._generate(tasks, validate=False)
        finished = {uid for uid, status in self.queue.statuses.items() if status == "finished"}
        keys = [key for key in self.queue.rows if key.rsplit("_", 2)[0] in finished]
        for key in keys:  # the actor would compute the same, since its weights are the engine's
            self.queue.rows[key]["old_log_probs"] = self.queue.rows[key]["rollout_log_probs"]
        batch = KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train")
        trainer_base.tq = self.queue
        trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=self.config), batch, {})
        self.rows = [self.queue.rows[key] for key in keys]
        return [row_of(one) for one in self.rows]

    def _generate(self, tasks: Sequence[Task], *, validate: bool) -> None:
        from verl.trainer.ppo.v1 import agent_loop_tq

        self.queue = agent_loop_tq.tq = Queue()
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(self.config, None)
        self._hand_over()
        sampling = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }

        async def prompt(number: int, task: Task) -> None:
            row = task.model_dump(mode="json")
            given = {
                "uid": uuid4().hex,
                "global_steps": self.step,
                "raw_prompt": [{"role": "user", "content": "a task of the service"}],
                "index": number,
                "agent_name": "rollout_service",
                **row,
            }
            where = {"step": self.step, "sample_index": number, "rollout_n": 0, "validate": validate}
            await worker._run_prompt(given, sampling, trajectory=where)

        run_together(self.submitter, [partial(prompt, number, task) for number, task in enumerate(tasks)])

    def _hand_over(self) -> None:
        engines = TrainerEngines("verl", self.submitter)
        adapter.engines_at = lambda *_: engines  # type: ignore[assignment]

    def loss(self, logprobs: Sequence[Any]) -> Any:
        import torch
        from verl.trainer.ppo import core_algos
        from verl.utils.config import omega_conf_to_dataclass

        def padded(values: Sequence[Any]) -> Any:
            return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)

        mask = padded([row["response_mask"] for row in self.rows])
        loss, _ = core_algos.get_policy_loss_fn("vanilla")(
            old_log_prob=padded([row["rollout_log_probs"] for row in self.rows]),
            log_prob=padded([ours[len(row["prompts"]) :] for ours, row in zip(logprobs, self.rows, strict=True)]),
            advantages=padded([row["advantages"] for row in self.rows]),
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.actor),
        )
        return loss

    def evaluate(self, tasks: Sequence[Task]) -> float:
        self._generate(tasks, validate=True)
        last = {key.rsplit("_", 1)[0]: row for key, row in sorted(self.queue.rows.items())}
        return sum(float(row["rm_scores"].sum()) for row in last.values()) / len(last)


def row_of(row: Mapping[str, Any]) -> Row:
    """Return a row of verl's, whose tensors have no padding."""
    prompt = [0] * len(row["prompts"])
    return Row(
        token_ids=row["prompts"].tolist() + row["responses"].tolist(),
        mask=prompt + row["response_mask"].tolist(),
        logprobs=[0.0] * len(prompt) + row["rollout_log_probs"].tolist(),
        advantages=[0.0] * len(prompt) + row["advantages"].tolist(),
    )


def _config(policy: str, group: int, loops: Path) -> Any:
    import verl
    from hydra import compose, initialize_config_dir

    agent = "actor_rollout_ref.rollout.agent"
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={policy}",
                "actor_rollout_ref.rollout.name=vllm",
                f"{agent}.agent_loop_config_path={loops}",
                f"{agent}.default_agent_loop=rollout_service",
                "actor_rollout_ref.rollout.calculate_log_probs=True",
                "actor_rollout_ref.rollout.prompt_length=1024",
                "actor_rollout_ref.rollout.response_length=1024",
                f"actor_rollout_ref.rollout.n={group}",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "algorithm.adv_estimator=grpo",
            ],
        )


TRAINER = Verl
