"""The kinds of engines, and which of them listens at an address."""

from http import HTTPStatus

import anyio

from api_schemas.inference import EngineKind
from rollout_service.engines.contract import Backend
from rollout_service.engines.kinds.http_client import HttpClient
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.kinds.vllm.backend import VllmBackend

_BACKENDS: dict[EngineKind, type[SGLangBackend] | type[VllmBackend]] = {
    EngineKind.SGLANG: SGLangBackend,
    EngineKind.VLLM: VllmBackend,
}
_ASK_SECONDS = 10.0


async def connect(url: str, backend_id: str, kind: EngineKind | None = None) -> Backend:
    """Return a backend for the engine at `url`; if `kind` is None, ask the engine."""
    return _BACKENDS[kind or await ask_kind(url)](url, backend_id=backend_id)


async def ask_kind(url: str) -> EngineKind:
    """Return the kind of the engine at `url`.

    One that does not answer counts as SGLang, whose backend then reports that.
    """
    client = HttpClient(url)
    try:
        with anyio.fail_after(_ASK_SECONDS):
            if await _has(client, "/model_info") or not await _has(client, "/version"):
                return EngineKind.SGLANG
    except (OSError, UnicodeError):
        return EngineKind.SGLANG
    finally:
        await client.close()
    return EngineKind.VLLM


async def _has(client: HttpClient, path: str) -> bool:
    status, _ = await client.exchange("GET", path, None)
    return status == HTTPStatus.OK
