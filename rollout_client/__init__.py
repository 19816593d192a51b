"""The client of rollout-service: everything a trainer installs.

    async with RolloutClient("http://127.0.0.1:8080") as client:
        rollout = await client.run(RolloutRequest(task=task))

`adapters` plugs the service into existing trainers. The wire models are in `api_schemas`.

Guarantees: needs httpx, anyio and pydantic, on Python 3.10 or newer, and numpy for batches as arrays. Importing this
package imports none of them: each name below is loaded when it is first used. Importing a client loads only anyio;
making one loads httpx and pydantic, and a call loads the wire models that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
        "BatchArrays": "arrays",
        "ClientError": "errors",
        "ClientRun": "runs",
        "LeasedBatch": "runs",
        "RolloutClient": "client",
        "RunExport": "run_export",
        "SyncRolloutClient": "sync",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
