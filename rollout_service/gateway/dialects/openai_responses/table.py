"""The parameters of Responses."""

from __future__ import annotations

from rollout_service.gateway.dialects.fields import (
    FORCES_NOTHING,
    Parameter,
    ParameterTable,
    Treatment,
)

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED
_WHOLE_HISTORY = "nothing is kept between requests; send the whole history"

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("input", _HONORED),
        Parameter("instructions", _HONORED),
        Parameter(
            "tools",
            _HONORED,
            "`function`, `custom`, `namespace`, `local_shell`, `tool_search`; others are left out",
        ),
        Parameter("tool_choice", _RECORDED, FORCES_NOTHING),
        Parameter("max_output_tokens", _HONORED),
        Parameter("stream", _HONORED),
        Parameter("text.format", _HONORED, "a turn that must fit a schema is not trained on"),
        Parameter("text.verbosity", _IGNORED),
        Parameter("temperature", _RECORDED),
        Parameter("top_p", _RECORDED),
        Parameter("reasoning", _RECORDED),
        Parameter("store", _IGNORED, "nothing is kept"),
        Parameter("include", _IGNORED, "reasoning always has its `encrypted_content`"),
        Parameter("metadata", _IGNORED),
        Parameter("client_metadata", _IGNORED),
        Parameter("user", _IGNORED),
        Parameter("safety_identifier", _IGNORED),
        Parameter("service_tier", _IGNORED),
        Parameter("prompt_cache_key", _IGNORED, "names the session of the call's lane"),
        Parameter("prompt_cache_retention", _IGNORED),
        Parameter("parallel_tool_calls", _IGNORED),
        Parameter("max_tool_calls", _IGNORED),
        Parameter("stream_options", _IGNORED),
        Parameter("truncation", _IGNORED, "a prompt that is too long is an error"),
        Parameter("context_management", _IGNORED),
        Parameter("top_logprobs", _REFUSED, "log-probabilities are in the trajectory"),
        Parameter("previous_response_id", _REFUSED, _WHOLE_HISTORY),
        Parameter("conversation", _REFUSED, _WHOLE_HISTORY),
        Parameter("background", _REFUSED, _WHOLE_HISTORY),
        Parameter("prompt", _REFUSED, "no prompts are stored; send its text"),
    )
)
