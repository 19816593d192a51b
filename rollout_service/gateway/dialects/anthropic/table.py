"""The parameters of Anthropic's Messages."""

from __future__ import annotations

from rollout_service.gateway.dialects.fields import (
    FORCES_NOTHING,
    Parameter,
    ParameterTable,
    Treatment,
)

_HONORED, _RECORDED, _IGNORED = Treatment.HONORED, Treatment.RECORDED, Treatment.IGNORED

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("messages", _HONORED, "with `system` messages among them"),
        Parameter("system", _HONORED, "a client's block about its billing is left out"),
        Parameter("tools", _HONORED, "tools that Anthropic runs are left out and counted"),
        Parameter("tool_choice.type", _RECORDED, FORCES_NOTHING),
        Parameter("tool_choice.name", _RECORDED),
        Parameter("tool_choice.disable_parallel_tool_use", _IGNORED),
        Parameter("max_tokens", _HONORED, "may be left out"),
        Parameter("stream", _HONORED),
        Parameter("stop_sequences", _HONORED),
        Parameter("output_config.format", _HONORED, "as `output_format`"),
        Parameter("output_format", _HONORED, "such a turn is not trained on"),
        Parameter("output_config.effort", _RECORDED, recorded_as="reasoning_effort"),
        Parameter("thinking", _RECORDED),
        Parameter("temperature", _RECORDED),
        Parameter("top_p", _RECORDED),
        Parameter("top_k", _RECORDED),
        Parameter("metadata", _IGNORED, "`user_id` may name the session of the call's lane"),
        Parameter("cache_control", _IGNORED),
        Parameter("context_management", _IGNORED),
        Parameter("service_tier", _IGNORED),
        Parameter("speed", _IGNORED),
        Parameter("inference_geo", _IGNORED),
        Parameter("container", _IGNORED),
        Parameter("mcp_servers", _IGNORED),
    )
)
