"""A Python with ipykernel that runs in any image: bound read-only in one place, it brings everything it loads.

It is the interpreter, the standard library, the packages and the C library of the base image. Its own loader learns
from arguments, not from variables, where its libraries are, so programs started from it use the image's own, whatever C
library those use. It finds its modules by its own location, and ignores the variables and folders by which other
Pythons find theirs.

The Python tool then imports the toolkit's packages, not the image's; bash sees the image's own Python. The image needs
only bash.
"""

import os
import platform
import posixpath
import shlex
import shutil
from pathlib import Path

from sandboxes.errors import ImageError
from sandboxes.images.facts import ImageFacts
from sandboxes.images.tree import ImageTree

RECIPE = "1"
"""Changes when `assemble` makes something else of the same image."""

INSIDE = "/run/rollout/python"
PYTHON = f"{INSIDE}/bin/python3"
LIBRARIES = "libraries"

# -p: do not read the image's BASH_ENV. -X utf8: the image's locales are not there.
WRAPPER = """#!/bin/bash -p
exec {loader} --inhibit-cache --library-path {libraries} --argv0 "$0" {python} -E -s -X utf8 "$@"
"""


def assemble(root: Path, facts: ImageFacts, target: Path) -> None:
    """Make a toolkit in the empty folder `target` from an unpacked image that has a Python with ipykernel.

    On one file system, files are linked, not copied: that takes a second and no space, and both share the kernel's
    cache.

    Raises:
        ImageError: The image has no such Python, or one that no toolkit can be made from.
    """
    if facts.needs_toolkit or facts.python is None or facts.python_version is None:
        raise ImageError(
            f"cannot make a Python toolkit from {root}: {facts.python_problem or 'it has no python3 with ipykernel'}",
            hint="add python3 and ipykernel to the image that sandbox.toolkit_image names",
        )
    tree = ImageTree(root)
    program, python = tree.program(facts.python), tree.find(facts.python)
    loader = tree.find(program.loader) if program is not None and program.loader is not None else None
    if loader is None or python is None:
        raise ImageError(f"cannot make a Python toolkit from {root}: its python3 is statically linked")
    _link_libraries(tree, loader, target / LIBRARIES)
    _link_python(tree, python, facts.python_version, target)
    wrapper = target / "bin" / "python3"
    wrapper.write_text(
        WRAPPER.format(
            loader=shlex.quote(f"{INSIDE}/{LIBRARIES}/{posixpath.basename(loader)}"),
            libraries=shlex.quote(f"{INSIDE}/{LIBRARIES}"),
            python=shlex.quote(f"{INSIDE}/bin/{posixpath.basename(python)}"),
        )
    )
    wrapper.chmod(0o755)


def _link_libraries(tree: ImageTree, loader: str, target: Path) -> None:
    target.mkdir()
    folders = dict.fromkeys((posixpath.dirname(loader), f"/usr/lib/{platform.machine()}-linux-gnu"))
    for folder in folders:
        for name in tree.names(folder):
            found = tree.find(f"{folder}/{name}")
            if ".so" in name and found is not None and tree.host(found).is_file():
                _link(str(tree.host(found)), str(target / name))


def _link_python(tree: ImageTree, python: str, version: str, target: Path) -> None:
    """Link the interpreter and its modules, keeping their relative places."""
    prefix = posixpath.dirname(posixpath.dirname(python))
    (target / "bin").mkdir()
    _link(str(tree.host(python)), str(target / "bin" / posixpath.basename(python)))
    for part in (f"lib/python{version}", f"local/lib/python{version}", "lib/python3"):
        source = tree.find(f"{prefix}/{part}")
        if source is not None:
            shutil.copytree(tree.host(source), target / part, symlinks=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    if Path(target).exists():
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
