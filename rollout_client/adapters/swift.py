"""ms-swift: the routes of `swift rollout`, and a plugin for the trainer. Tested with ms-swift 4.6.0.

    python -m rollout_client.adapters.swift --port 8000      # instead of `swift rollout`

    # plugin.py, for the trainer:
    from rollout_client.adapters.swift import install
    install(weights="/shared/weights")

    swift rlhf --rlhf_type grpo --use_vllm true --vllm_mode server --vllm_server_host HOST --vllm_server_port 8000 \
        --external_plugins plugin.py --template rollout_service --use_gym_env true ...

A row's task is the content of its last message as text (`submit.task_text`), or its columns `environment` and
`instance`, with `--vllm_server_pass_dataset true`.

Each segment of a rollout is a sample of its request, with mask 0 on what the policy did not sample; swift counts a
request once in its group. The plugin's template adds no token. Before swift samples with new weights, the engines have
loaded them from the folder: there is no NCCL group, and routes that announce a broadcast answer 501. swift cannot leave
a rollout out of a group, and reads a missing reward as 0. So a rollout without a reward is run again, and then the
whole batch is refused with a 503, which ends the training.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import Message
from rollout_client.adapters.samples import CUT_OFF, Sample, last_said, samples_of
from rollout_client.adapters.submit import (
    NoRewardError,
    RolloutSubmitter,
    TaskRowError,
    run_in_order,
    task_text,
)
from rollout_client.adapters.trl import WeightsFolder, keep_up
from rollout_client.errors import ClientError

log = logging.getLogger(__name__)

TEMPLATE = "rollout_service"
"""The name of the plugin's template, in which a sample is only its tokens."""
ENGINE = {
    "engine_type": "AsyncLLMEngine",
    "enable_multi_turn": True,
    "use_gym_env": True,
    "enable_lora": False,
}
"""The service's answer to `/get_engine_type/`: rollouts of several turns and samples, with the environment's reward."""
BROADCASTS = (
    "/get_world_size/",
    "/get_model_state_keys/",
    "/init_communicator/",
    "/update_named_param/",
    "/update_adapter_flattened_param/",
    "/update_adapter_param/",
    "/update_flattened_params/",
    "/process_weights_after_loading/",
)
NO_BROADCAST = (
    "The rollout service has no NCCL group: its engines load weights from a folder. Give the trainer a plugin with "
    "`rollout_client.adapters.swift.install(weights=FOLDER)` by --external_plugins."
)
CACHES = ("/reset_prefix_cache/", "/reset_encoder_cache/", "/reset_mm_cache/", "/close_communicator/")
"""Routes with nothing to do: engines drop their caches when they load weights."""


def rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": task_text(task)}]} for task in tasks]


def _request_of(submitter: RolloutSubmitter, asked: Mapping[str, Any], config: Mapping[str, Any]) -> RolloutRequest:
    columns = asked.get("data_dict") or {}
    row = columns if "environment" in columns else asked.get("messages") or []
    return submitter.request(row, config, max_tokens=config.get("max_tokens"), trainer="swift")


async def infer(submitter: RolloutSubmitter, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of swift's requests in their order.

    Raises:
        TaskRowError: A request does not name a task; none is run.
        NoRewardError: A rollout has no reward after all attempts.
    """
    asked = body["infer_requests"]
    config = body.get("request_config") or {}
    requests = [_request_of(submitter, one, config) for one in asked]
    calls = [partial(submitter.run_scored, request) for request in requests]
    rollouts = await run_in_order(calls, concurrency=submitter.concurrency)  # swift takes all or nothing
    return [
        output(sample, rollout, given.get("uuid") or rollout.rollout_id)
        for given, rollout in zip(asked, rollouts, strict=True)
        for sample in samples_of(rollout)
    ]


def output(sample: Sample, rollout: Rollout, request_id: str) -> dict[str, Any]:
    """Return a segment in the form of swift's RolloutOutput; `request_id` is the same for all of a rollout."""
    asked, said = _texts(rollout)
    logprobs = [one for one, sampled in zip(sample.logprobs, sample.response_mask, strict=True) if sampled]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": said},
        "finish_reason": "length" if rollout.stop_reason in CUT_OFF else "stop",
    }
    usage = {
        "prompt_tokens": len(sample.prompt_ids),
        "completion_tokens": len(sample.response_ids),
        "total_tokens": len(sample.token_ids),
    }
    return {
        "response": {
            "model": rollout.pool,
            "choices": [choice],
            "usage": usage,
            "id": request_id,
            "created": int(time.time()),
        },
        "messages": [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": asked},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": said},
        ],
        "response_token_ids": [sample.prompt_ids, sample.response_ids],
        "response_loss_mask": [[0] * len(sample.prompt_ids), sample.response_mask],
        "rollout_logprobs": [[], logprobs],
        "rollout_infos": {
            "total_reward": sample.reward,
            "num_turns": rollout.usage.turns,
            "rollout_id": sample.rollout_id,
            "segment": sample.segment,
        },
    }


def _texts(rollout: Rollout) -> tuple[str, str]:
    """Return texts for swift's log and reward functions: the beginning, and the policy's last message."""
    messages: Sequence[Message] = rollout.trajectory.messages if rollout.trajectory is not None else []
    asked = [f"{one.role}: {one.content}" for one in takewhile(lambda one: one.role != "assistant", messages)]
    return "\n".join(asked), last_said(rollout)


def make_app(submitter: RolloutSubmitter) -> Any:
    """Return the routes of `swift rollout` as an ASGI application; it needs starlette, which swift has."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def engine_type(_: Request) -> Response:
        return JSONResponse(ENGINE)

    async def nothing_to_do(_: Request) -> Response:
        return JSONResponse({"message": "nothing to do: engines drop their caches when they load weights"})

    async def refuse(_: Request) -> Response:
        return JSONResponse({"detail": NO_BROADCAST}, status_code=501)

    async def infer_route(request: Request) -> Response:
        try:
            return JSONResponse(await infer(submitter, await request.json()))
        except TaskRowError as error:
            return JSONResponse({"detail": str(error)}, status_code=422)
        except (NoRewardError, ClientError) as error:
            log.warning("a batch is refused: %s", error)
            return JSONResponse({"detail": str(error)}, status_code=503)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await submitter.aclose()

    routes = [
        Route("/health", health),
        Route("/health/", health),
        Route("/get_engine_type/", engine_type, methods=["POST"]),
        Route("/infer/", infer_route, methods=["POST"]),
        *(Route(path, nothing_to_do, methods=["POST"]) for path in CACHES),
        *(Route(path, refuse, methods=["GET", "POST"]) for path in BROADCASTS),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def install(*, weights: str | Path | None, submitter: RolloutSubmitter | None = None) -> None:
    """Give swift's trainer the template, and weights that reach the engines by `POST /v1/weights`.

    Called in the trainer's process. `weights` is a folder that the engines can read; None leaves their weights alone.
    """
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
    from swift.rlhf_trainers.vllm_client import VLLMClient
    from swift.template import TemplateMeta, register_template

    empty = TemplateMeta(TEMPLATE, prefix=[], prompt=["{{QUERY}}"], chat_sep=[], suffix=[])
    register_template(empty, exist_ok=True)
    service = submitter or RolloutSubmitter.from_environment()
    folder = None if weights is None else WeightsFolder(service, Path(weights))

    def no_communicator(self: Any, device: Any = 0) -> None:
        del self, device

    def move_weights(self: Any, skip_async_check: bool = False) -> None:
        if self.args.async_generate and not skip_async_check:
            self._wait_queue()
        if folder is not None:
            keep_up(folder, self)

    VLLMClient.init_communicator = no_communicator
    RolloutTrainerMixin._move_model_to_vllm = move_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the routes; the service's address is ROLLOUT_URL, its key ROLLOUT_KEY."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m rollout_client.adapters.swift", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8_000)
    arguments = parser.parse_args(argv)
    uvicorn.run(make_app(RolloutSubmitter.from_environment()), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
