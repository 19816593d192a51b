"""The bodies of the embedded engine's requests: the part of SGLang's that this engine supports.

Unknown fields are refused.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from api_schemas.inference import PauseMode


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SamplingParams(_Body):
    """The part of SGLang's `sampling_params` that this engine supports."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    # With penalties, the reported logprobs would not be those of the distribution that is sampled from.
    frequency_penalty: float = Field(0.0, ge=0.0, le=0.0)
    presence_penalty: float = Field(0.0, ge=0.0, le=0.0)
    repetition_penalty: float = Field(1.0, ge=1.0, le=1.0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: Literal[True] = True
    sampling_seed: int | None = None
    json_schema: str | None = None
    """Known only to be refused by name."""
    stream_interval: int = Field(1, ge=1)


class GenerateBody(_Body):
    """The body of `/generate`."""

    input_ids: list[int] = Field(min_length=1)
    rid: str | None = Field(None, min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0)
    extra_key: str | None = Field(None, max_length=256)
    stream: bool = False


class AbortBody(_Body):
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(_Body):
    """The body of `/pause_generation`."""

    mode: Literal[PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE] = PauseMode.ABORT


class UpdateBody(_Body):
    """The body of `/update_weights_from_disk`."""

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(_Body):
    """The body of `/update_weight_version`."""

    new_version: str
    abort_all_requests: bool = True
