"""Builds the client from a checkout, where its packages stand at the root of the repository.

A source distribution has them beside this file, as pyproject.toml says.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("api_schemas", "rollout_client")


class CheckoutHook(BuildHookInterface[Any]):
    """Adds the packages of a checkout; an editable installation finds them through `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the packages, unless they stand here or this is an editable build."""
        here = Path(self.root)
        if version != "editable" and not all((here / package).is_dir() for package in PACKAGES):
            checkout = here.parents[1]
            build_data["force_include"].update({str(checkout / package): package for package in PACKAGES})
