"""The parsed source of this repository, shared by the tests of its text."""

import ast
from functools import cache
from pathlib import Path


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file once in each worker."""
    return ast.parse(path.read_text())
