"""The program that runs one resources server of NeMo Gym for one episode, without ray, a head server or a port.

It uses the standard library and NeMo Gym's packages alone. Requests and replies are lines of JSON: `{"op": "begin",
"server", "row", "config"}`, `{"op": "call", "tool", "arguments"}`, `{"op": "verify", "row"}`, `{"op": "step", "row"}`
and, during installation, `{"op": "interpreter"}`.

Guarantees: the episode has one jar of cookies, so one session; a verification fails, and is never a reward, if the
server tried to reach a model or another server, whatever it made of that.
"""

import asyncio
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]

LEFT_OUT = {"ray", "wandb", "mlflow", "hydra", "yappi", "gprof2dot", "pydot"}
"""NeMo Gym imports these packages, which are not installed; its servers do not use them when they run like this."""
SLOW = {"pandas"}
"""NeMo Gym imports them for its statistics; a server that uses one imports it for itself."""
OK = 200
MAX_SAID_CHARS = 1_000


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets missing packages be imported; the use of anything in them is an ImportError."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        _ = path, target
        if fullname.split(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": refuse})

        def refuse(*_: Any, **__: Any) -> None:
            raise ImportError(f"{module.__name__} is needed, and is not installed here")

        module.__dict__.update(__version__="0", __getattr__=attribute)


class Gym:
    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._app: Any = None
        self._http: Any = None
        self._missed: list[str] = []

    async def begin(self, request: Request) -> Reply:
        server, row = request["server"], request["row"]
        if self._app is None:
            import_library()
        self._app = self._make(server, request["config"])
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        httpx = importlib.import_module("httpx")
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://gym", timeout=None)
        self._http = await self._stack.enter_async_context(client)
        turns = {"/reset", "/step"} <= {getattr(route, "path", "") for route in self._app.router.routes}
        said = await self._ask("reset" if turns else "seed_session", row)
        tools = (row.get("responses_create_params") or {}).get("tools") or []
        answered = [tool["name"] for tool in tools if self._has(tool["name"])]
        return {"turns": turns, "tools": answered, "observation": said.get("observation")}

    async def call(self, request: Request) -> Reply:
        """Return an error of the server as the result, as NeMo Gym's own agent does."""
        said = await self._http.post(f"/{request['tool']}", json=request["arguments"])
        return {"text": said.text, "status": said.status_code}

    async def verify(self, request: Request) -> Reply:
        return {"verdict": await self._ask("verify", request["row"])}

    async def step(self, request: Request) -> Reply:
        return {"step": await self._ask("step", request["row"])}

    async def _ask(self, route: str, row: Request) -> Reply:
        said = await self._http.post(f"/{route}", json=row)
        if self._missed:
            raise RuntimeError(f"it needs another server ({self._missed[0]}), which it cannot reach here")
        if said.status_code != OK:
            raise RuntimeError(f"/{route} answered {said.status_code}: {said.text[:MAX_SAID_CHARS]}")
        answer = said.json()
        return answer if isinstance(answer, dict) else {}

    def _has(self, route: str) -> bool:
        scope = {"type": "http", "method": "POST", "path": f"/{route}", "headers": []}
        full = importlib.import_module("starlette.routing").Match.FULL
        return any(one.matches(scope)[0] == full for one in self._app.router.routes)

    def _make(self, name: str, config: Request) -> Any:
        folder = _folder(name)
        sys.path.append(str(folder))  # some servers import what lies beside them
        kind = server_class(importlib.import_module(f"resources_servers.{name}.app"))
        settings = kind.model_fields["config"].annotation.model_validate(read_config(folder, config))
        server = kind(config=settings, server_client=self._no_servers())
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        return app

    def _no_servers(self) -> Any:
        """Return a client that reaches no server, and remembers that it was asked."""
        missed = self._missed

        async def refuse(_: Any, server_name: str, *__: Any, **___: Any) -> Any:
            missed.append(server_name)
            raise RuntimeError(f"the server {server_name!r} cannot be reached")

        client = importlib.import_module("nemo_gym.server_utils").ServerClient
        unreachable: Any = type("NoServers", (client,), {"request": refuse})
        return unreachable.model_construct()


def import_library() -> None:
    """Leave out modules that NeMo Gym needs only on a cluster or for statistics."""
    sys.meta_path.append(StandIns(LEFT_OUT))
    slow = StandIns(SLOW)
    sys.meta_path.insert(0, slow)
    importlib.import_module("nemo_gym.base_resources_server")
    sys.meta_path.remove(slow)
    for name in [name for name in sys.modules if name.split(".")[0] in SLOW]:
        del sys.modules[name]


def _folder(name: str) -> Path:
    package = importlib.import_module("resources_servers")
    return Path(next(iter(package.__path__))) / name


def server_class(module: types.ModuleType) -> Any:
    """Return the last class, if one is derived from another."""
    base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, base) and kind.__module__ == module.__name__
    ]
    if not found:
        raise ValueError(f"{module.__name__} has no resources server")
    return found[-1]


def read_config(folder: Path, config: Request) -> Request:
    """Change a server's own settings by those of the instance."""
    omegaconf = importlib.import_module("omegaconf").OmegaConf
    files = sorted((folder / "configs").glob("*.yaml"), key=lambda path: (path.stem != folder.name, path.name))
    for path in files:
        for name, entry in omegaconf.load(path).items():
            servers = entry.get("resources_servers") if omegaconf.is_dict(entry) else None
            if servers and folder.name in servers:
                own = omegaconf.merge(servers[folder.name], config)
                settings: Request = omegaconf.to_container(own, resolve=True, throw_on_missing=True)
                return settings | {"name": name, "host": "127.0.0.1", "port": 1}
    return {**config, "entrypoint": "app.py", "name": folder.name, "host": "127.0.0.1", "port": 1}


def interpreter() -> Reply:
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    shared = []
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        name = str(sysconfig.get_config_var("INSTSONAME"))
        folders = [str(sysconfig.get_config_var("LIBDIR")), f"{sys.base_prefix}/lib"]
        shared = [path for folder in folders if Path(path := f"{folder}/{name}").exists()]
    return {
        "executable": executable,
        "library": os.path.realpath(sysconfig.get_path("stdlib")),
        "shared": shared[:1],
        "version": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }


async def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a server prints becomes a reply
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        gym = Gym(stack)
        known = {"begin": gym.begin, "call": gym.call, "verify": gym.verify, "step": gym.step}
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            try:
                reply = interpreter() if request["op"] == "interpreter" else await known[request["op"]](request)
            except Exception as error:  # noqa: BLE001 - whatever a server raises is reported
                reply = {"error": f"{type(error).__name__}: {error}"[:MAX_SAID_CHARS]}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
    asyncio.run(main())
