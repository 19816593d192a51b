"""Segment files as objects of a bucket that speaks S3's API.

A file is one object that one request writes, so it is there as a whole or not at all, and nothing of a write that
failed is left in the bucket unseen. What is there already is replaced only by requests with a condition. Of a server's
answer only its code is passed on, because the rest may contain what a request was signed with.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError, UnauthenticatedError
from obstore.store import ObjectStore

from rollout_service.base.errors import StoreError
from rollout_service.store.segments.contract import PlaceTexts, SegmentFile, SegmentFiles
from rollout_service.store.segments.ledger import FILE_HEADER

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode

WRITE_SECONDS = 0.2
"""How long a service gathers records for the next object: each has its price, so it writes at most five a second."""
READS_AT_ONCE = 32
ANOTHER = f'"{"0" * 32}"'
"""No object's contents have this tag."""
TRIES = 8
"""How often an object is read and written again, if others change it meanwhile, before an overwriting fails."""


class ObjectFiles(SegmentFiles):
    """The objects below one prefix of a bucket."""

    reads_at_once = READS_AT_ONCE

    def __init__(self, store: ObjectStore, address: str, *, write_seconds: float = WRITE_SECONDS) -> None:
        """`address` is how errors call the store."""
        self._store = store
        self._address = address
        self.write_seconds = write_seconds

    @property
    def texts(self) -> PlaceTexts:
        return PlaceTexts(
            where=self._address,
            subject=f"the object store {self._address}",
            unused="Set [store] objects to a bucket or a prefix that nobody uses.",
            shared="Set [store] objects and objects_endpoint to the same values on all nodes.",
            bring_back="Bring the objects back, or correct [store] objects; no restart is needed for the first.",
            slow="Look at [store] objects_endpoint, its server, and the network; no restart is needed.",
        )

    def prepare(self) -> None:
        """Do nothing: a prefix needs no creation, and buckets are the operator's."""

    def begin(self, name: str) -> SegmentFile:
        return _ObjectFile(self, name)

    def store(self, name: str, data: bytes) -> None:
        with explained():
            # In one request: the parts of an unfinished upload are seen by nobody, and kept forever.
            obstore.put(self._store, name, data, use_multipart=False)

    def store_once(self, name: str, data: bytes) -> None:
        with explained():
            obstore.put(self._store, name, data, mode="create")
        if self._ignores(name, data, "create") or self._ignores(name, data, {"e_tag": ANOTHER}):
            self.delete(name)
            raise RequestFailedError(UNCONDITIONAL)

    def read(self, name: str, offset: int, length: int) -> bytes:
        try:
            with explained():
                return bytes(obstore.get_range(self._store, name, start=offset, length=length))
        except RequestFailedError as error:
            if error.is_beyond_end:
                return b""
            raise

    def overwrite(self, name: str, offset: int, length: int) -> None:
        for _ in range(TRIES):
            with explained():
                found = obstore.get(self._store, name)
                data = bytearray(found.bytes())
            end = min(offset + length, len(data))
            data[offset:end] = bytes(max(0, end - offset))
            with suppress(ObjectChangedError, FileExistsError), explained():
                obstore.put(self._store, name, bytes(data), mode={"e_tag": found.meta["e_tag"]})
                return
        raise RequestFailedError(CONFLICT)

    def delete(self, *names: str) -> None:
        with explained():
            obstore.delete(self._store, list(names))

    def has(self, name: str) -> bool:
        try:
            with explained():
                obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def sizes(self) -> dict[str, int]:
        return {one["path"]: one["size"] for one in self._listed()}

    def ages(self) -> dict[str, float]:
        probe = f"probe-{uuid4().hex}"
        self.store(probe, b"")
        try:
            changed = {one["path"]: one["last_modified"] for one in self._listed()}
        finally:
            self.delete(probe)
        now = changed.pop(probe)
        return {name: (now - at).total_seconds() for name, at in changed.items()}

    def failed(self, error: OSError) -> StoreError:
        why = error.strerror or type(error).__name__
        hint = error.hint if isinstance(error, RequestFailedError) else self.texts.bring_back
        return StoreError(f"{self.texts.subject} cannot be used: {why}", hint=hint)

    def _listed(self) -> list[ObjectMeta]:
        with explained():
            return [one for some in obstore.list(self._store) for one in some]

    def _ignores(self, name: str, data: bytes, condition: PutMode) -> bool:
        """Return whether the server writes although a condition does not hold."""
        with suppress(FileExistsError, ObjectChangedError), explained():
            obstore.put(self._store, name, data, mode=condition)
            return True
        return False


class _ObjectFile(SegmentFile):
    takes_more = False

    def __init__(self, files: ObjectFiles, name: str) -> None:
        self._files = files
        self._name = name

    def append(self, parts: Sequence[bytes], offset: int) -> None:
        del offset  # it follows the header
        self._files.store(self._name, b"".join([FILE_HEADER, *parts]))

    def is_there(self) -> bool:
        return True  # the server has said so

    def close(self) -> None:
        """Do nothing: nothing is held."""


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
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "TooManyRequests", "429", "503"), ("it is too busy", _BUSY)),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"), ("it is full", _SPACE)),
}


class RequestFailedError(OSError):
    def __init__(self, code: str) -> None:
        why, self.hint = _MEANINGS.get(code, ("a request failed", "Look at the log of its server."))
        super().__init__(errno.EIO, f"{why} ({code})" if code[0].isupper() or code[0].isdigit() else why)
        self.code = code

    @property
    def is_beyond_end(self) -> bool:
        """Bytes after the end of an object were asked for."""
        return self.code in (_BEYOND_END, "416")


class ObjectChangedError(OSError):
    """The object is not the one that was to be replaced."""


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
    """Return a server's code, or its status without one, or None if there was no answer."""
    for sign, code in (("timed out", _LATE), ("TimedOut", _LATE), ("StartTooLarge", _BEYOND_END)):
        if sign in text:
            return code
    if found := _CODE.search(text):
        return found[1] or found[2]
    found = _STATUS.search(text)
    return found[1] if found else None
