"""The client of rollout-service: everything a trainer installs.

    async with RolloutClient("http://127.0.0.1:8080") as client:
        rollout = await client.run(RolloutRequest(task=task))

`adapters` plugs the service into existing trainers. The wire models are in `api_schemas`.

It needs httpx, anyio and pydantic, on Python 3.10 or newer, and numpy for batches as arrays. Importing this package
imports none of them: each name below is loaded when it is first used. Importing a client loads only anyio; making one
loads httpx and pydantic, and a call loads the wire models that it needs.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def load_lazily(namespace: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are loaded when they are first used.

    Args:
        namespace: The module's globals, which keep the loaded names.
        homes: The module that each name is loaded from.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        home = homes[name]
        # The package first: two threads, one with each, would wait for each other.
        import_module(home.rpartition(".")[0] or home)
        namespace[name] = getattr(import_module(home), name)
        return namespace[name]

    return load


if TYPE_CHECKING:
    from rollout_client.arrays import BatchArrays as BatchArrays
    from rollout_client.client import RolloutClient as RolloutClient
    from rollout_client.errors import ClientError as ClientError
    from rollout_client.run_export import RunExport as RunExport
    from rollout_client.runs import ClientRun as ClientRun
    from rollout_client.runs import LeasedBatch as LeasedBatch
    from rollout_client.sync import SyncRolloutClient as SyncRolloutClient
else:
    _HOMES = {
        "BatchArrays": "rollout_client.arrays",
        "ClientError": "rollout_client.errors",
        "ClientRun": "rollout_client.runs",
        "LeasedBatch": "rollout_client.runs",
        "RolloutClient": "rollout_client.client",
        "RunExport": "rollout_client.run_export",
        "SyncRolloutClient": "rollout_client.sync",
    }
    __getattr__ = load_lazily(globals(), _HOMES)
