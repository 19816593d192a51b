"""Requests as JSON.

Guarantee: a prompt that is an array is written from its memory, without an object for every id, and as the same JSON as
a list of these ids.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray


def prompt_for_json(ids: Sequence[int]) -> list[int] | NDArray[Any]:
    """Return a prompt's ids as `dump_request` takes them; an array must not grow while the result is in use."""
    if isinstance(ids, array):
        return np.frombuffer(ids, dtype=ids.typecode)
    return ids if isinstance(ids, list) else list(ids)


def dump_request(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
