"""vLLM's streamed answers: each chunk has the new tokens; versions, experts and counts come at the end."""

from collections.abc import Mapping
from typing import Any

from rollout_service.engines.contract import (
    GenerateRequest,
    Generation,
    ModelInfo,
    TokenChunk,
    TokenSink,
)
from rollout_service.engines.kinds.token_stream import TokenStream
from rollout_service.engines.kinds.vllm import wire


class VllmStream(TokenStream):
    """The chunks of one answer of the token-in, token-out route."""

    def __init__(
        self, request: GenerateRequest, info: ModelInfo | None, backend_id: str, on_tokens: TokenSink
    ) -> None:
        super().__init__(request, info, backend_id, on_tokens)
        self._entries: list[Any] = []
        self._last: dict[str, Any] | None = None
        self._usage: object = None

    def take(self, chunk: Mapping[str, Any]) -> None:
        wire.expect_request(chunk, self._request)
        if chunk.get("choices") == []:
            self._usage = chunk.get("usage")
            return
        if self._last is not None:
            self._refuse_more()
        choice = wire.only_choice(chunk)
        ids = self._new_ids(choice.get("token_ids") or [], "token_ids")
        entries = wire.logprob_entries(choice) if ids else []
        if choice.get("finish_reason") is not None:
            content = {"content": [*self._entries, *entries]}
            self._last = {**choice, "token_ids": [*self._ids, *ids], "logprobs": content}
        elif ids:
            self._deliver_new(choice, ids)
            self._entries += entries

    def _deliver_new(self, choice: Mapping[str, Any], ids: list[int]) -> None:
        wanted = self._request.extras.top_logprobs
        chunk = TokenChunk(
            ids=ids,
            logprobs=wire.token_logprobs(choice, ids),
            versions=None,
            top_logprobs=wire.top_logprobs(choice, wanted, len(ids), self._info) if wanted else None,
        )
        self._deliver(chunk)

    def _whole(self, engine_seconds: float) -> Generation:
        if self._last is None or self._usage is None:
            raise self._broken_off()
        answer = {
            "request_id": wire.engine_request_id(self._request.request_id),
            "choices": [self._last],
            "usage": self._usage,
        }
        return wire.parse_generation(
            answer,
            self._request,
            backend_id=self._backend_id,
            info=self._info,
            engine_seconds=engine_seconds,
        )
