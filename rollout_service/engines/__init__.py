"""Engines: the pools of backends, and the contract that each kind of engine keeps.

Authors of kinds import everything from here; these names stay. Each is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from rollout_client import load_lazily

if TYPE_CHECKING:
    from rollout_service.engines.contract import Backend as Backend
    from rollout_service.engines.contract import BackendLoad as BackendLoad
    from rollout_service.engines.contract import GenerateRequest as GenerateRequest
    from rollout_service.engines.contract import Generation as Generation
    from rollout_service.engines.contract import ModelInfo as ModelInfo
    from rollout_service.engines.contract import RequestedExtras as RequestedExtras
    from rollout_service.engines.contract import ReturnedExtras as ReturnedExtras
    from rollout_service.engines.contract import SamplingOptions as SamplingOptions
    from rollout_service.engines.contract import TokenChunk as TokenChunk
    from rollout_service.engines.contract import TopLogprob as TopLogprob
    from rollout_service.engines.contract import new_request_id as new_request_id
    from rollout_service.engines.errors import BackendProtocolError as BackendProtocolError
    from rollout_service.engines.errors import BackendRejected as BackendRejected
    from rollout_service.engines.errors import BackendUnreachable as BackendUnreachable
    from rollout_service.engines.errors import ExtraUnsupported as ExtraUnsupported
    from rollout_service.engines.errors import InferenceError as InferenceError
    from rollout_service.engines.errors import PromptTooLong as PromptTooLong
    from rollout_service.engines.errors import SchemaRefused as SchemaRefused
    from rollout_service.engines.errors import WeightsRefused as WeightsRefused
    from rollout_service.engines.kinds.http_backend import HttpBackend as HttpBackend
else:
    _HOMES = {
        "Backend": "rollout_service.engines.contract",
        "BackendLoad": "rollout_service.engines.contract",
        "GenerateRequest": "rollout_service.engines.contract",
        "Generation": "rollout_service.engines.contract",
        "ModelInfo": "rollout_service.engines.contract",
        "RequestedExtras": "rollout_service.engines.contract",
        "ReturnedExtras": "rollout_service.engines.contract",
        "SamplingOptions": "rollout_service.engines.contract",
        "TokenChunk": "rollout_service.engines.contract",
        "TopLogprob": "rollout_service.engines.contract",
        "new_request_id": "rollout_service.engines.contract",
        "BackendProtocolError": "rollout_service.engines.errors",
        "BackendRejected": "rollout_service.engines.errors",
        "BackendUnreachable": "rollout_service.engines.errors",
        "ExtraUnsupported": "rollout_service.engines.errors",
        "InferenceError": "rollout_service.engines.errors",
        "PromptTooLong": "rollout_service.engines.errors",
        "SchemaRefused": "rollout_service.engines.errors",
        "WeightsRefused": "rollout_service.engines.errors",
        "HttpBackend": "rollout_service.engines.kinds.http_backend",
    }
    __getattr__ = load_lazily(globals(), _HOMES)
