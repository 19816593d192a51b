"""The parameters of Chat Completions."""

from __future__ import annotations

from rollout_service.gateway.dialects.fields import (
    FORCES_NOTHING,
    Parameter,
    ParameterTable,
    Treatment,
)

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("messages", _HONORED),
        Parameter("tools", _HONORED, "`function` and `custom`; `strict` has no effect"),
        Parameter("tool_choice", _RECORDED, FORCES_NOTHING),
        Parameter("max_tokens", _HONORED),
        Parameter("max_completion_tokens", _HONORED, "goes before `max_tokens`"),
        Parameter("stream", _HONORED),
        Parameter("stream_options.include_usage", _HONORED),
        Parameter("response_format", _HONORED, "a turn that must fit a schema is not trained on"),
        Parameter("stop", _HONORED),
        Parameter("n", _HONORED, "refused over 1 in a stream"),
        Parameter("modalities", _HONORED, "only `text`"),
        Parameter("temperature", _RECORDED),
        Parameter("top_p", _RECORDED),
        Parameter("top_k", _RECORDED),
        Parameter("min_p", _RECORDED),
        Parameter("seed", _RECORDED),
        Parameter("frequency_penalty", _RECORDED),
        Parameter("presence_penalty", _RECORDED),
        Parameter("repetition_penalty", _RECORDED),
        Parameter("logit_bias", _RECORDED),
        Parameter("reasoning_effort", _RECORDED),
        Parameter("chat_template_kwargs", _RECORDED),
        Parameter("store", _IGNORED),
        Parameter("metadata", _IGNORED),
        Parameter("user", _IGNORED),
        Parameter("safety_identifier", _IGNORED),
        Parameter("service_tier", _IGNORED),
        Parameter("prompt_cache_key", _IGNORED, "names the session of the call's lane"),
        Parameter("prompt_cache_retention", _IGNORED),
        Parameter("parallel_tool_calls", _IGNORED),
        Parameter("prediction", _IGNORED),
        Parameter("verbosity", _IGNORED),
        Parameter("web_search_options", _IGNORED),
        Parameter(
            "logprobs", _HONORED, "of all sampled tokens, calls included; a stream has them at its end"
        ),
        Parameter("top_logprobs", _REFUSED, "only the log-probabilities of the sampled tokens are returned"),
        Parameter("audio", _REFUSED, "the model writes text only"),
        Parameter("functions", _REFUSED, "use `tools`"),
        Parameter("function_call", _REFUSED, "use `tool_choice`"),
    )
)
