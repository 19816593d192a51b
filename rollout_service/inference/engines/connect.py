"""Which engines there are, and which of them listens at an address."""

from http import HTTPStatus

import aiohttp

from api_schemas.inference import EngineKind
from rollout_service.inference.contract import Backend
from rollout_service.inference.engines.sglang.backend import SGLangBackend
from rollout_service.inference.engines.vllm.backend import VllmBackend

_BACKENDS: dict[EngineKind, type[SGLangBackend] | type[VllmBackend]] = {
    EngineKind.SGLANG: SGLangBackend,
    EngineKind.VLLM: VllmBackend,
}
_ASK_SECONDS = 10.0


async def connect(url: str, backend_id: str, kind: EngineKind | None = None) -> Backend:
    """A backend for the engine at `url`, which is asked what it is where `kind` does not say."""
    return _BACKENDS[kind or await ask_kind(url)](url, backend_id=backend_id)


async def ask_kind(url: str) -> EngineKind:
    """What listens at `url`; an engine that does not answer is taken for SGLang, whose backend then says so."""
    limit = aiohttp.ClientTimeout(total=_ASK_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session:
            if await _has(session, f"{url}/model_info") or not await _has(session, f"{url}/version"):
                return EngineKind.SGLANG
    except (aiohttp.ClientError, OSError, UnicodeError):
        return EngineKind.SGLANG
    return EngineKind.VLLM


async def _has(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(url, allow_redirects=False) as answer:
        return answer.status == HTTPStatus.OK
