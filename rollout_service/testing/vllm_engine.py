"""A scripted engine with vLLM's HTTP protocol, as observed in vLLM 0.32.

Like the real one, and unlike SGLang: a budget that does not fit the context is cut silently; unknown fields are
ignored; gauges are those of the last step, so an abort leaves them unchanged; a folder without weights ends the
process.
"""

import base64
import io
from typing import Any

import anyio
import numpy as np
from aiohttp import web

from rollout_service.testing.engine_turn import (
    EngineTurn,
    Fault,
    ScriptedRequest,
    experts,
    likeliest,
    prompt_logprob,
)
from rollout_service.testing.script import Script
from rollout_service.testing.sglang_engine import ScriptedEngine, json_answer, refusal

_ID_PREFIX = "generate-tokens-"
_NO_LOGPROB = -9999.0
_BLOCK = 32
_BLOCKS = 8192


class ScriptedVllm(ScriptedEngine):
    """A scripted engine as an async context manager; inside, it listens at `url`.

    Args:
        script: decides the answers.
        development: whether it has the routes of VLLM_SERVER_DEV_MODE: pauses and weights.
        scale_out: whether it was started with --enable-scale-out.
        cached_details: whether it was started with --enable-prompt-tokens-details.
        logprobs_mode: raw_logprobs, processed_logprobs, or raw_logits.
        more: further arguments of `ScriptedEngine`.
    """

    def __init__(
        self,
        script: Script,
        *,
        development: bool = True,
        scale_out: bool = True,
        cached_details: bool = True,
        logprobs_mode: str = "processed_logprobs",
        **more: Any,
    ) -> None:
        super().__init__(script, **more)
        self._scale_out = scale_out
        self._cached_details = cached_details
        self._logprobs_mode = logprobs_mode
        self._gauge = 0
        self._sampled_tokens = 0
        self._generate_path = "/inference/v1/generate"
        self._routes = {
            "/inference/v1/abort_requests": self._abort,
            "/inject_fault": self._inject,
            "/health": self._health,
            "/version": self._tell_version,
            "/v1/models": self._models,
            "/metrics": self._metrics,
        }
        if development:
            self._routes |= {
                "/abort_requests": self._abort,
                "/pause": self._pause,
                "/resume": self._continue,
                "/is_paused": self._is_paused,
                "/collective_rpc": self._reload,
                "/reset_prefix_cache": self._reset,
                "/update_weight_version": self._set_version,
                "/weight_info": self._weight_info,
                "/server_info": self._server_info,
            }

    # ---- generation

    async def _generate(self, body: dict[str, Any], request: web.BaseRequest) -> web.StreamResponse:
        if not self._scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return json_answer({"error": {"message": message}}, 403)
        wrong = next((token for token in body["token_ids"] if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            return refusal(f"Token id {wrong} is out of vocabulary")
        if len(body["token_ids"]) >= self._context_length:
            return refusal(f"The decoder prompt is longer than the maximum model length of {self._context_length}.")
        if body["sampling_params"].get("top_k") == 1:
            return self._answer_probe(body)
        return await super()._generate(body, request)

    def _read(self, body: dict[str, Any]) -> ScriptedRequest:
        params, ids = body["sampling_params"], body["token_ids"]
        return ScriptedRequest(
            rid=body["request_id"],
            ids=ids,
            budget=min(params["max_tokens"], self._context_length - len(ids)),
            top_logprobs=params.get("logprobs") or 0,
            prompt_logprobs_from=None if params.get("prompt_logprobs") is None else 0,
            routed_experts_from=params.get("routed_experts_prompt_start", 0),
        )

    def _stream_interval(self, body: dict[str, Any]) -> int | None:
        return 1 if body.get("stream") else None

    def _events(self, turn: EngineTurn, fault: Fault | None, *, is_last: bool) -> list[dict[str, Any]]:
        answer = self._answer(turn, fault)
        usage = {"request_id": answer["request_id"], "choices": [], "usage": answer.pop("usage")}
        del answer["prompt_logprobs"]
        if not is_last:
            answer["choices"][0] |= dict.fromkeys(("finish_reason", "stop_reason", "weight_versions", "routed_experts"))
        return [answer, usage] if is_last else [answer]

    def _answer_probe(self, body: dict[str, Any]) -> web.Response:
        """Answer with one token, the only one that `top_k` 1 leaves; its logprobs depend on the mode."""
        values = {"processed_logprobs": (0.0, _NO_LOGPROB), "raw_logprobs": (-0.5, -1.5)}
        first, second = values.get(self._logprobs_mode, (12.5, 7.25))
        rows = [{"token_id": 1, "logprob": first}, {"token_id": 2, "logprob": second}]
        choice = {"logprobs": {"content": [rows[0] | {"top_logprobs": rows}]}, "token_ids": [1]}
        return json_answer({"request_id": _ID_PREFIX + body["request_id"], "choices": [choice]})

    async def _sample(self, turn: EngineTurn) -> None:
        self._gauge = self.in_flight
        await super()._sample(turn)
        if not turn.aborted:
            self._gauge = self.in_flight - 1
        self._sampled_tokens += turn.done

    def _answer(self, turn: EngineTurn, fault: Fault | None) -> dict[str, Any]:
        ids = self._output_ids(turn, fault)
        prompt, reason = turn.prompt_tokens, turn.finish_reason()
        usage = {"prompt_tokens": prompt, "completion_tokens": turn.done, "total_tokens": prompt + turn.done}
        details = {"cached_tokens": turn.cached_tokens} if self._cached_details else None
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": reason["type"],
            "stop_reason": reason.get("matched"),
            "logprobs": None if fault is Fault.NO_LOGPROBS else {"content": self._content(turn, fault)},
            "weight_versions": turn.version_spans(self.version),
            "routed_experts": None if fault is Fault.NO_EXTRAS else self._routed(turn, fault),
        }
        return {
            "request_id": _ID_PREFIX + turn.rid,
            "choices": [choice],
            "usage": usage | {"prompt_tokens_details": details},
            "prompt_logprobs": None if fault is Fault.NO_EXTRAS else _prompt(turn, fault),
        }

    def _content(self, turn: EngineTurn, fault: Fault | None) -> list[dict[str, Any]]:
        content = []
        for value, token in self._logprobs(turn, fault):
            less = int(fault is Fault.SHORT_EXTRAS)
            count = max(turn.asked.top_logprobs, 1) - less
            rows = likeliest(token, count, self._vocab_size)
            content.append(
                {
                    "token_id": token,
                    "logprob": value,
                    "top_logprobs": [{"token_id": id_, "logprob": each} for id_, each in rows],
                }
            )
        return content

    def _routed(self, turn: EngineTurn, fault: Fault | None) -> str | None:
        first = turn.asked.routed_experts_from
        if self._routing is None or first is None or not turn.done:
            return None
        rows = turn.prompt_tokens + turn.done - 1 - first - int(fault is Fault.SHORT_EXTRAS)
        array = np.array(list(experts(first, rows, self._routing)), np.uint8).reshape(-1, *self._routing)
        file = io.BytesIO()
        np.save(file, array)
        return base64.b64encode(file.getvalue()).decode()

    # ---- control

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        names = body.get("request_ids") or [_ID_PREFIX + rid for rid in self._turns]
        rids = [name.removeprefix(_ID_PREFIX) for name in names]
        self.aborts.extend(rids)
        for rid in rids:
            if rid in self._turns:
                self._abort_turns(rid)
        return web.Response()

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        mode = body.get("mode", "abort")
        if mode == "wait":
            before = list(self._turns.values())
            for turn in before:
                turn.ignores_pause = True
            self.paused = True
            for turn in before:
                await turn.ended.wait()
        return await super()._pause({"mode": mode})

    async def _is_paused(self, _: dict[str, Any]) -> web.Response:
        return json_answer({"is_paused": self.paused})

    async def _reload(self, body: dict[str, Any]) -> web.Response:
        folder = anyio.Path(body["kwargs"]["weights_path"])
        if not await folder.is_dir():
            await self.die()
            return json_answer({"error": {"message": "Call to collective_rpc method failed"}}, 500)
        return json_answer({"results": [None]})

    async def _reset(self, _: dict[str, Any]) -> web.Response:
        await self._flush({})
        return json_answer({"success": True})

    async def _weight_info(self, _: dict[str, Any]) -> web.Response:
        return json_answer({"weight_version": self.version})

    async def _tell_version(self, _: dict[str, Any]) -> web.Response:
        return json_answer({"version": "0.32.0"})

    async def _server_info(self, _: dict[str, Any]) -> web.Response:
        return json_answer({"vllm_config": {"device_config": {"device_type": "cuda"}}})

    async def _models(self, _: dict[str, Any]) -> web.Response:
        model = {"id": self._model_path, "root": self._model_path, "max_model_len": self._context_length}
        return json_answer({"data": [model]})

    async def _metrics(self, _: dict[str, Any]) -> web.Response:
        figures: dict[str, float] = {
            'vllm:num_requests_running{engine="0"}': self._gauge,
            'vllm:num_requests_waiting{engine="0"}': 0,
            'vllm:kv_cache_usage_perc{engine="0"}': 0.0,
            'vllm:generation_tokens_total{engine="0"}': self._sampled_tokens,
            'vllm:prompt_tokens_total{engine="0"}': self.requests,
            f'vllm:cache_config_info{{block_size="{_BLOCK}",num_gpu_blocks="{_BLOCKS}"}}': 1.0,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in figures.items()))


def _prompt(turn: EngineTurn, fault: Fault | None) -> list[dict[str, Any] | None] | None:
    ids = turn.asked.ids
    if turn.asked.prompt_logprobs_from is None:
        return None
    rows = [{str(id_): {"logprob": prompt_logprob(i + 1)}} for i, id_ in enumerate(ids[1:])]
    return [None, *rows][: len(ids) - int(fault is Fault.SHORT_EXTRAS)]
