"""The fingerprint by which a store tells a repeated request from another one with the same id.

Guarantee: the caller's trace does not count, since a client that repeats a request may do so within another span.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel


def fingerprint(request: BaseModel) -> bytes:
    """Return the SHA-256 of the request's canonical JSON: sorted keys, defaults filled in, no white space."""
    canonical = json.dumps(
        request.model_dump(mode="json", exclude={"trace"}), sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).digest()
