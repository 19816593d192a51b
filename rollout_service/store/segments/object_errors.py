"""Failures of an object store as errors that say what to do next.

Guarantee: of a server's answer only its code is passed on, because the rest may contain what a request was signed with.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError, UnauthenticatedError

_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>|\(code: ([A-Za-z0-9]{1,64})\)", re.ASCII)
_STATUS = re.compile(r"status code: ([0-9]{3})", re.ASCII)
_NO_BUCKET, _BEYOND_END, _NO_ANSWER, _LATE = "NoSuchBucket", "InvalidRange", "no answer", "late"
CONFLICT, UNCONDITIONAL = "conflict", "unconditional"

_ACCESS = (
    "Allow the service's credentials s3:ListBucket on the bucket of [store] objects, and s3:GetObject, s3:PutObject "
    "and s3:DeleteObject below its prefix; no restart is needed."
)
KEYS_HINT = (
    "Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names in ~/.aws; "
    "a changed file is read within five minutes."
)
_REGION = "Set [store] objects_region to the region of the bucket."
_BUSY = "It asks for fewer requests; the service repeats them, and goes on by itself."
_SPACE = "Free space there, or raise the quota; no restart is needed."
_NETWORK = "Check [store] objects_endpoint, its server, and the network; no restart is needed."
_MEANINGS: dict[str, tuple[str, str]] = {
    _NO_ANSWER: ("it cannot be reached", _NETWORK),
    _LATE: ("it did not answer in time", _NETWORK),
    CONFLICT: ("others change the same object all the time", "Repeat the request."),
    UNCONDITIONAL: (
        "it ignores the conditions of requests",
        "Use a server that honors If-None-Match and If-Match when it writes an object.",
    ),
    _NO_BUCKET: ("the bucket does not exist", "Create the bucket, or correct [store] objects."),
    "NoCredentials": ("there are no credentials", KEYS_HINT),
    "RequestTimeTooSkewed": ("the clock of this host is wrong", "Set the host's clock right."),
    "NotImplemented": ("it lacks what the store needs", "Use a server that honors conditional writes."),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "403"), ("access is denied", _ACCESS)),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401"),
        ("it refuses the credentials", KEYS_HINT),
    ),
    **dict.fromkeys(
        ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "301", "307"),
        ("the bucket is in another region", _REGION),
    ),
    **dict.fromkeys(
        ("SlowDown", "ServiceUnavailable", "TooManyRequests", "429", "503"), ("it is too busy", _BUSY)
    ),
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"), ("it is full", _SPACE)
    ),
}


class RequestFailedError(OSError):
    """A request that an object store did not do."""

    def __init__(self, code: str) -> None:
        why, self.hint = _MEANINGS.get(code, ("a request failed", "Look at the log of its server."))
        super().__init__(errno.EIO, f"{why} ({code})" if code[0].isupper() or code[0].isdigit() else why)
        self.code = code

    @property
    def is_beyond_end(self) -> bool:
        """Whether bytes were asked for that come after the end of an object."""
        return self.code in (_BEYOND_END, "416")


class ObjectChangedError(OSError):
    """An object is not the one that was to be replaced."""


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of obstore into those that `SegmentFiles` may raise, without the text of a server.

    Raises:
        FileNotFoundError: There is no such object.
        FileExistsError: There is such an object already.
        ObjectChangedError: The object is another one than was asked for.
        RequestFailedError: Everything else.
    """
    try:
        yield
    except FileNotFoundError as error:
        if _code(str(error)) == _NO_BUCKET:
            raise RequestFailedError(_NO_BUCKET) from None
        raise FileNotFoundError(errno.ENOENT, "there is no such object") from None
    except AlreadyExistsError:
        raise FileExistsError(errno.EEXIST, "there is such an object") from None
    except PreconditionError:
        raise ObjectChangedError(errno.EBUSY, "the object is another one") from None
    except UnauthenticatedError as error:
        raise RequestFailedError(_code(str(error)) or "NoCredentials") from None
    except BaseError as error:
        raise RequestFailedError(_code(str(error)) or _NO_ANSWER) from None


def _code(text: str) -> str | None:
    """Return the code in a server's answer, its status without one, or None if there was no answer."""
    for sign, code in (("timed out", _LATE), ("TimedOut", _LATE), ("StartTooLarge", _BEYOND_END)):
        if sign in text:
            return code
    if found := _CODE.search(text):
        return found[1] or found[2]
    found = _STATUS.search(text)
    return found[1] if found else None
