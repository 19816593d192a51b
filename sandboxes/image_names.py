"""The images that a downloaded task, an instance or a Dockerfile may name.

An administrator (settings, an environment's folder, a command) names images as they like. Downloaded data is read by
nobody before it is used, so it names no path of this machine: the agent would get the files there.

Guarantee: data names an image of this machine by its name, an image of a registry, a file in the folder that it came
in, or an image below a folder that an administrator has written in front of it. Links, `..`, `~`, variables and
transports such as `oci-archive:` lead nowhere else.
"""

import os
import re
from pathlib import Path

from sandboxes.errors import ImagePathError

MAX_CHARS = 512
SCHEMES = "docker|oras|library|https"
TRANSPORTS = (
    *("containers-storage", "dir", "docker-archive", "docker-daemon", "file", "instance", "localimage"),
    *("oci", "oci-archive", "oci-layout", "oci-sif", "ostree", "sif", "tarball"),
)
FILES = (".sif", ".img")
_REGISTRY = re.compile(rf"(?:{SCHEMES})://\S+")
_PART = r"\w(?:[\w.+-]*\w)?"
_NAME = re.compile(rf"{_PART}(?::\d+(?=/))?(?:/{_PART})*(?::{_PART})?(?:@[a-z0-9]+:[0-9a-f]+)?", re.ASCII)


def read_image_name(text: str, *, prefix: str = "") -> str:
    """Return the image that downloaded data names; a reference without its scheme gets `docker://`, as Docker reads it.

    `prefix` is the beginning of the text that an administrator has written. If that names a folder, such as in
    `/images/swe-`, the image may be a path below it.

    Raises:
        ImagePathError: The text is a path that data may not name, or no image's name at all.
    """
    if len(text) > MAX_CHARS:
        raise _refusal(text)
    if _REGISTRY.fullmatch(text):
        return text
    if _NAME.fullmatch(text) and text.partition(":")[0] not in TRANSPORTS and not text.endswith(FILES):
        return f"docker://{text}" if re.search("[/:@]", text) else text
    if _is_below(text, prefix.rpartition("/")[0]):
        return text
    raise _refusal(text)


def find_own_file(folder: Path, name: str) -> Path | None:
    """Return the file of this name below the folder that the data came in; None if there is none, or it leads out."""
    try:
        path = Path(os.path.realpath(folder / name))  # unlike `resolve`, it takes a loop of links
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError):  # too long, or with a null character
        return None


def _is_below(text: str, folder: str) -> bool:
    inside = text.removeprefix(f"{folder}/")
    return bool(folder.strip("/")) and inside != text and "\0" not in text and ".." not in inside.split("/")


def _refusal(text: str) -> ImagePathError:
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return ImagePathError(f"{shown!r} is neither the name of an image of this machine nor that of a registry")
