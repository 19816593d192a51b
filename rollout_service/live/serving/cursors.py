"""Where a page of sessions ends, as a text for its reader."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import orjson

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError


def encode_cursor(last: tuple[float, str]) -> str:
    """Return the cursor of the page after this session, by the time of its opening and its id."""
    return urlsafe_b64encode(orjson.dumps(last)).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Return the session after which a page begins.

    Raises:
        InvalidFieldError: It is not the cursor of a page.
    """
    try:
        opened_at, session_id = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        last = float(opened_at), str(session_id)
        if encode_cursor(last) == cursor:  # the decoder skips characters, and a time may be NaN
            return last
    except (ValueError, TypeError):
        pass
    raise InvalidFieldError([FieldError(path="query.cursor", message="is not the `next_cursor` of a page")])
