"""Which chat format a model has, by its name or by its folder.

A format is never guessed; a model that may have several must have its own named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_service.tokens.errors import RendererMismatchError, UnknownRendererError
from rollout_service.tokens.tokenizer import read_json

_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "gemma4": "gemma4",
}
"""Model types that have one chat format. `llama`, `qwen2` or `deepseek_v3` have many, so they must be named."""


def resolve_format(path: str, name: str) -> str:
    """Return a format that the library knows; `auto` stands for that of the model at `path`."""
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import _CONFIG_BY_NAME

    known = sorted(set(_CONFIG_BY_NAME) - {"auto"})
    if name in known:
        return name
    if name != "auto":
        raise UnknownRendererError(f"there is no renderer {name!r}", hint=f"Known ones: auto, {', '.join(known)}.")
    model_type = read_json(Path(path).expanduser() / "config.json").get("model_type")
    found = MODEL_RENDERER_MAP.get(path) or _BY_MODEL_TYPE.get(str(model_type))
    if found is None:
        seen = f"its model type is {model_type!r}" if model_type else "it has no config.json with a model_type"
        raise UnknownRendererError(
            f"the chat format of {path!r} cannot be told: {seen}",
            hint=f"Name it, as in renderer = 'qwen3'. Known ones: {', '.join(known)}.",
        )
    return found


def format_config(name: str, options: Mapping[str, Any]) -> Any:
    from renderers.configs import _CONFIG_BY_NAME

    defaults = {} if name == "default" else {"thinking_retention": "all"}
    try:
        return _CONFIG_BY_NAME[name](**{**defaults, **options})
    except ValueError as error:
        raise RendererMismatchError(
            f"the chat format {name!r} does not take these options: {error}",
            hint="Remove the options that it does not know.",
        ) from error


def ends_of_turn(path: str) -> list[int]:
    """Return the ids that end a turn, from the model's generation settings; a tokenizer names only one of them."""
    ids = read_json(Path(path).expanduser() / "generation_config.json").get("eos_token_id")
    return [ids] if isinstance(ids, int) else list(ids or ())
