"""`sandboxes` re-exports the names that its users need."""

import inspect

import sandboxes
from sandboxes import config, contract, errors, factory


def test_the_public_names_are_importable_from_the_package():
    for module in (config, contract, errors, factory):
        own = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__.startswith("sandboxes")
        }
        assert own - {"parse_user_range"} <= set(sandboxes.__all__), module.__name__
    for name in sandboxes.__all__:
        assert hasattr(sandboxes, name)
