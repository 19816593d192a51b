"""OpenRLHF: an agent executor. Checked against the interface of OpenRLHF 0.11.2.

    # agent.py, named by --train.agent_func_path
    from rollout_client.adapters.openrlhf import agent_executor
    AgentExecutor = agent_executor()

The service's address is ROLLOUT_URL, its key ROLLOUT_KEY. A row's task is its prompt as text (`submit.task_text`), or
its label where the prompt is a question for people.

Rollouts use the engine of the actor that runs them, over HTTP (`engine_server`). The version of its weights is the
number of OpenRLHF's updates since the first rollout, because OpenRLHF gives an actor no step. OpenRLHF requires a
reward for each sample: a rollout without one is run again, and then NoRewardError is raised. It takes one row per
rollout, no longer than `max_length`; its log has the number of tokens that it did not get as `left_out`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import anyio

from api_schemas.rollouts import Rollout
from rollout_client.adapters.engine_server import EngineServer
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import CUT_OFF, RowTooLongError, count_left_out, only_largest, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, TaskRowError, parse_task
from rollout_client.errors import ClientError

log = logging.getLogger(__name__)

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
UPDATES = ("update_weight", "update_weight_cuda_ipc")
"""The calls by which OpenRLHF's actor gives its engine one parameter; their last argument is true for the last one."""


class Executor:
    def __init__(self, submitter: RolloutSubmitter | None = None) -> None:
        self.engines = TrainerEngines("openrlhf", submitter or RolloutSubmitter.from_environment(), kind="sglang")
        self._starting = anyio.Lock()
        self._server: EngineServer | None = None
        self._address = ""

    async def execute(
        self,
        prompt: object,
        label: object,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: object = None,
    ) -> dict[str, Any]:
        """Run a rollout for a prompt; OpenRLHF calls this. `llm_engine` is its actor, or an `AsyncLLMEngine`.

        Raises:
            NoRewardError: The rollout has no reward after all attempts.
            RowTooLongError: No token to train on has room.
        """
        del hf_tokenizer  # the service loads it
        submitter = self.engines.submitter if llm_engine is None else await self._serve(llm_engine)
        given = {name: getattr(sampling_params, name, None) for name in SAMPLING}
        most = getattr(sampling_params, "max_tokens", None)
        request = submitter.request(_task(prompt, label), given, max_tokens=most, trainer="openrlhf")
        rollout = await submitter.run_scored(request)
        return {"prompt": prompt, "label": label, "images": images} | response(rollout, max_length)

    async def _serve(self, llm_engine: Any) -> RolloutSubmitter:
        """Serve the engine, once, and have it registered."""
        async with self._starting:
            if self._server is None:
                engine = getattr(llm_engine, "llm", llm_engine)
                server = EngineServer(engine)
                self._address = await server.start(_host())
                self._count_updates(engine, server)
                self._server = server
        return await self.engines.follow([self._address], self._server.version)

    def _count_updates(self, engine: Any, server: EngineServer) -> None:
        """Count the weights that OpenRLHF's actor gives its engine, and tell the service before the actor goes on."""
        call = engine.collective_rpc

        async def counted(method: Any, *given: Any, **named: Any) -> Any:
            answer = await call(method, *given, **named)
            server.signs += 1
            if method in UPDATES and named["args"][-1]:
                server.version += 1
                try:
                    await self.engines.follow([self._address], server.version)
                except ClientError as error:  # the next rollout tells it again
                    log.warning("the service does not know of version %d yet: %s", server.version, error)
            return answer

        engine.collective_rpc = counted


def _host() -> str:
    """Return this node's address in Ray's cluster; loopback without Ray."""
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray and ray.is_initialized() else "127.0.0.1"


def agent_executor(submitter: RolloutSubmitter | None = None) -> type:
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(Executor, AgentExecutorBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(submitter)

    return AgentExecutor


def _task(prompt: object, label: object) -> object:
    try:
        return parse_task(prompt)
    except TaskRowError:
        if label is None:
            raise
        return parse_task(label)


def response(rollout: Rollout, max_length: int) -> dict[str, Any]:
    """Return a rollout in the form of OpenRLHF's response, without the prompt that it repeats.

    Raises:
        RowTooLongError: No token to train on has room; OpenRLHF would divide by their number.
    """
    samples = samples_of(rollout)
    if not samples:
        raise ValueError(f"rollout {rollout.rollout_id} sampled nothing")
    [sample] = only_largest([one.cut(max(0, max_length - len(one.prompt_ids))) for one in samples])
    if not sample.sampled:
        raise RowTooLongError.of(samples, f"max_length ({max_length})")
    before = len(sample.prompt_ids)
    return {
        "mm_train_inputs": None,
        "reward": sample.reward,
        "scores": sample.reward,
        "observation_tokens": sample.token_ids,
        "action_ranges": _ranges(sample.response_mask, before),
        "rollout_log_probs": [0.0] * before + sample.logprobs,
        "truncated": rollout.stop_reason in CUT_OFF,
        "extra_logs": {"turns": rollout.usage.turns, "left_out": count_left_out(samples, [sample])},
    }


def _ranges(mask: list[int], start: int) -> list[tuple[int, int]]:
    """Return the half-open ranges that the policy sampled."""
    ranges: list[tuple[int, int]] = []
    for position, sampled in enumerate(mask, start):
        if not sampled:
            continue
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges
