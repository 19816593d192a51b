"""A Python with ipykernel that runs in any image: bound read-only at one place, it brings all that it loads.

It is the interpreter, the standard library, the packages and the C library of the base image. The interpreter is
started through its own loader, which is told where its libraries are by arguments, not by variables: so what code
starts from it uses the image's own libraries, whatever C library those are of. It finds its modules by where it
lies; the variables and folders by which others find theirs are not looked at.

The Python tool then imports the toolkit's packages and not the image's; bash sees the image's own Python. The image
needs bash, nothing else.
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
"""Changes with what `assemble` makes of the same image."""

INSIDE = "/run/rollout/python"
PYTHON = f"{INSIDE}/bin/python3"
LIBRARIES = "libraries"

# -p: the image's BASH_ENV is not read. -X utf8: it does not have the image's locales.
WRAPPER = """#!/bin/bash -p
exec {loader} --inhibit-cache --library-path {libraries} --argv0 "$0" {python} -E -s -X utf8 "$@"
"""


def assemble(root: Path, facts: ImageFacts, target: Path) -> None:
    """Make the toolkit of an unpacked image that has a Python with ipykernel, in the empty folder `target`.

    Files are linked, not copied, where both folders are on one file system: it takes a second and no space, and
    what the kernel caches of them serves sandboxes of both.

    Raises:
        ImageError: the image has no such Python, or one that the toolkit cannot be made of.
    """
    if facts.needs_toolkit or facts.python is None or facts.python_version is None:
        raise ImageError(
            f"no Python toolkit can be made of {root}: {facts.python_problem or 'it has no python3 with ipykernel'}",
            hint="build the image that sandbox.toolkit_image names with python3 and ipykernel",
        )
    tree = ImageTree(root)
    program, python = tree.program(facts.python), tree.find(facts.python)
    loader = tree.find(program.loader) if program is not None and program.loader is not None else None
    if loader is None or python is None:
        raise ImageError(f"no Python toolkit can be made of {root}: its python3 is linked statically")
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
    """Every shared library that the image has beside its loader, by each of its names."""
    target.mkdir()
    folders = dict.fromkeys((posixpath.dirname(loader), f"/usr/lib/{platform.machine()}-linux-gnu"))
    for folder in folders:
        for name in tree.names(folder):
            found = tree.find(f"{folder}/{name}")
            if ".so" in name and found is not None and tree.host(found).is_file():
                _link(str(tree.host(found)), str(target / name))


def _link_python(tree: ImageTree, python: str, version: str, target: Path) -> None:
    """The interpreter and its modules, where they are in relation to each other."""
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
