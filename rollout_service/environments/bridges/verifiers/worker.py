"""The program that runs verifiers: lists tasks on the host, and runs their tools and scores their agents in a sandbox.

It uses the standard library and verifiers alone. Requests and replies are lines of JSON: `{"op": "list", "tasksets"}`
on the host; in a sandbox `{"op": "open", "task"}` and then `{"op": "call", "name", "arguments", "seconds"}` and `{"op":
"state"}`, or one `{"op": "score", "task", ...}`.

Guarantees: a task is scored by the library's own `Task.score`, on a trace filled as the library fills it; a reward or a
metric without a value is an error. A task that cannot be run so is listed with the reason, since the library would
silently leave out rewards that it cannot compute.
"""

import ast
import asyncio
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]
PLAIN_ROLES = frozenset({"system", "user", "assistant"})
OWN_HOOKS = {
    "setup": "prepares a runtime",
    "finalize": "reads a runtime",
    "score": "scores in its own way",
    "runtime_env": "sets variables of a runtime",
}
"""A task's methods that must be the library's own."""
LOADER = "load_environment"
OLD_FORM = (
    "it is in the old form, with `load_environment`, which verifiers {version} no longer has; make its rows the tasks "
    "of a `vf.Taskset`, and its rubric their `@vf.reward`s, as docs/how-to/bridge-verifiers.md shows"
)
MISSING = "if it is a package that the taskset needs, name it in `requirements` of environment.toml"
MODULES = ("verifiers.v1", "verifiers.v1.utils.loaders", "verifiers.v1.trace", "mcp.server.mcpserver")
STOPS = {
    "finished": "agent_completed",
    "answered": "agent_completed",
    "max_turns": "max_turns",
    "max_tokens": "max_output_tokens",
    "truncated": "max_output_tokens",
    "context_full": "max_total_tokens",
}
"""The library's names for why an agent stopped."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that the library prints becomes a reply
    with asyncio.Runner() as runner:
        tools = ToolServers()
        known: dict[str, Callable[[Request], Any]] = {
            "ready": ready,
            "list": list_tasksets,
            "open": tools.open,
            "call": tools.call,
            "state": tools.state,
            "score": score,
        }
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if MODULES[-1] not in sys.modules:
                    import_library()
                reply = runner.run(known[request["op"]](request))
                text = json.dumps(reply)
            except Exception as error:  # noqa: BLE001 - whatever the library raises is reported
                traceback.print_exc()
                text = json.dumps({"error": _describe(error)})
            replies.write(text + "\n")
            replies.flush()


def _describe(error: BaseException) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return ", because of ".join(f"{type(one).__name__}: {one}" for one in causes)


def import_library() -> None:
    """Import what requests use, without looks for garbage, which take a fourth of the time."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


async def ready(_: Request) -> Reply:
    return {"ready": True}


# --- What tasks there are -----------------------------------------------------------------------------------


async def list_tasksets(request: Request) -> Reply:
    return {"tasksets": [await _list_one(one) for one in request["tasksets"]]}


async def _list_one(wanted: Request) -> Reply:
    from verifiers.v1.utils import loaders

    try:
        if (problem := _package_problem(wanted["id"])) is not None:
            return {"problem": problem}
        taskset = loaders.load_taskset(_config(wanted))
        tasks = list(itertools.islice(taskset, wanted["limit"]))
        if not tasks:
            return {"problem": "it has no tasks"}
        problem = next(filter(None, (_task_problem(task, taskset) for task in tasks)), None)
        if problem is not None:
            return {"problem": problem}
        tools = [
            definition
            for server in await _serve(type(taskset), taskset.config, tasks[0])
            for definition in server.definitions
        ]
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            return {"problem": f"two of its tools have the same name: {', '.join(sorted(names))}"}
        return {
            "tools": tools,
            "task_type": _reference(type(tasks[0])),
            "data_type": _reference(type(tasks[0].data)),
            "tasks": [_listed(task) for task in tasks],
        }
    except Exception as error:  # noqa: BLE001 - a package that is wrong hides no other
        traceback.print_exc()
        if _has_old_form(wanted["id"]):
            return {"problem": OLD_FORM.format(version=importlib.metadata.version("verifiers"))}
        if isinstance(error, ModuleNotFoundError):
            return {"problem": f"it cannot be loaded: {_describe(error)}; {MISSING}"}
        return {"problem": f"it cannot be loaded: {_describe(error)}"}


def _has_old_form(taskset_id: str) -> bool:
    """Return whether a package has `load_environment`, even if it cannot be imported."""
    name = taskset_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    tree = ast.parse(Path(spec.origin).read_bytes())
    return any(
        isinstance(node, ast.FunctionDef | ast.ImportFrom)
        and LOADER in ([node.name] if isinstance(node, ast.FunctionDef) else [one.name for one in node.names])
        for node in tree.body
    )


def _config(wanted: Request) -> Any:
    from verifiers.v1.utils import loaders

    kind = loaders.taskset_config_type(wanted["id"])
    return kind.model_validate({**wanted["config"], "id": wanted["id"]})


def _package_problem(taskset_id: str) -> str | None:
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils import loaders

    loaders.taskset_class(taskset_id)
    own = loaders.environment_class(taskset_id)
    if own is not SingleAgentEnv:
        return f"its environment {own.__name__} runs its episodes itself, with agents or users of its own"
    if loaders.default_harness_id(taskset_id) == taskset_id:
        return "it brings a harness of its own"
    return None


def _task_problem(task: Any, taskset: Any) -> str | None:
    """Return why such tasks cannot be run without a runtime of the library's, if so."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated

    kind = type(task)
    for name, what in OWN_HOOKS.items():
        if getattr(kind, name) is not getattr(vf.Task, name):
            return f"{kind.__name__}.{name} {what}"
    if kind.NEEDS_CONTAINER:
        return f"{kind.__name__} needs a container"
    for hook in (*task.hooks("metric"), *task.hooks("reward")):
        if "runtime" in inspect.signature(hook).parameters:
            return f"its hook {hook.__name__} asks for `runtime`"
    if stops := [*task.hooks("stop"), *discover_decorated(task, "intercept")]:
        return f"its hook {stops[0].__name__} stops or rewrites the conversation"
    if task.config.judges:
        return "its judges ask models for verdicts, and a task is scored without a network"
    if task.config != taskset.config.task or set(vars(task)) - {"data", "config", "scoring_deferred"}:
        return f"{kind.__name__} keeps more than its data and the taskset's configuration"
    return None


def _data_problem(task: Any) -> str | None:
    """Return why this task cannot be run here, though others may be."""
    data = task.data
    for name in ("image", "workdir", "agent_user", "skills", "artifacts"):
        if getattr(data, name):
            return f"it asks for a container, with its field {name!r}"
    if data.prompt is None:
        return "it has no prompt: a user would have to begin the conversation"
    for message in [] if isinstance(data.prompt, str) else data.prompt:
        if message.role not in PLAIN_ROLES or getattr(message, "tool_calls", None):
            return "its prompt has tool calls or their results"
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content or []):
            return "its prompt has images"
    written = data.model_dump_json()
    if type(data).model_validate_json(written) != data:
        return "its data does not survive JSON"
    return None


def _listed(task: Any) -> Reply:
    problem = _data_problem(task)
    if problem is not None:
        return {"problem": problem}
    return {
        "key": task.key,
        "data": task.data.model_dump(mode="json"),
        "messages": [{"role": one.role, "content": _text(one.content)} for one in _first_messages(task.data)],
        "agent_seconds": task.data.timeout.agent,
        "scoring_seconds": task.data.timeout.scoring,
    }


def _first_messages(data: Any) -> list[Any]:
    import verifiers.v1 as vf

    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return [*system, *prompt]


def _text(content: Any) -> str:
    from verifiers.v1.types import content_text

    return str(content_text(content))


def _reference(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# --- A task in a sandbox ------------------------------------------------------------------------------------


def _resolve(reference: str) -> Any:
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def make_task(wanted: Request) -> tuple[Any, Any]:
    """Return the task, and its taskset's configuration. Nothing is loaded but the package."""
    config = _config(wanted)
    data = _resolve(wanted["data_type"]).model_validate_json(json.dumps(wanted["data"]))
    task = _resolve(wanted["task_type"])(data, config.task)
    if task.key != wanted["key"]:
        raise ValueError("the task is not the one that was listed: its key has changed")
    return task, config


class ToolServers:
    """The tools of a task, with the state that they share with its rewards."""

    def __init__(self) -> None:
        self._state: Any = None
        self._calls: dict[str, Callable[[Request], Any]] = {}

    async def open(self, request: Request) -> Reply:
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils import loaders

        task, config = make_task(request["task"])
        self._state = state_cls(type(task))()
        # Not made as an object of its own: its constructor may read files that only the host has.
        kind = loaders.taskset_class(config.id)
        for server in await _serve(kind, config, task):
            await server.set_up(task.data, self)
            self._calls |= server.calls
        return {"tools": sorted(self._calls)}

    async def call(self, request: Request) -> Reply:
        call = self._calls[request["name"]](request["arguments"])
        try:
            return {"text": await asyncio.wait_for(call, request["seconds"])}
        except TimeoutError:
            return {"text": f"[stopped: it took longer than {request['seconds']:g} s]"}

    async def state(self, _: Request) -> Reply:
        return {"state": self.read_state().decode()}

    def read_state(self) -> bytes:
        from pydantic import TypeAdapter

        return bytes(TypeAdapter(type(self._state)).dump_json(self._state))

    def write_state(self, value: bytes) -> None:
        from pydantic import TypeAdapter

        self._state = TypeAdapter(type(self._state)).validate_json(value)


class ToolServer:
    """A server of tools, without its process and its port."""

    def __init__(self, server: Any, is_shared: bool) -> None:
        from mcp.server.mcpserver import MCPServer

        self._server, self._is_shared = server, is_shared
        self._mcp = MCPServer(server.server_name or type(server).__name__)
        server.register(self._mcp)
        self.calls: dict[str, Callable[[Request], Any]] = {}
        self.definitions: list[Reply] = []

    async def describe(self) -> "ToolServer":
        prefix = f"{self._server.server_name}_" if self._server.server_name else ""
        for tool in await self._mcp.list_tools():
            function = {
                "name": prefix + tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.definitions.append({"type": "function", "function": function})
            self.calls[prefix + tool.name] = self._caller(tool.name)
        return self

    async def set_up(self, data: Any, shared: ToolServers) -> None:
        server = self._server

        async def pull() -> Any:
            return server._state_adapter.validate_json(shared.read_state())

        async def push(before: bytes) -> None:
            from verifiers.v1.mcp.server import _call_state

            after = server._state_adapter.dump_json(_call_state.get())
            if after != before:
                shared.write_state(after)

        server._pull_state, server._push_state = pull, push
        await server.setup()
        if not self._is_shared:
            await server.setup_task(data)

    def _caller(self, name: str) -> Callable[[Request], Any]:
        async def call(arguments: Request) -> str:
            try:
                result = await self._mcp.call_tool(name, arguments)
            except Exception as error:  # noqa: BLE001 - as the library's server, which shows it to the policy
                return str(error)
            return "\n".join(
                block.text if block.type == "text" else f"[{block.type} left out]" for block in result.content
            )

        return call


async def _serve(kind: Any, config: Any, task: Any) -> list[ToolServer]:
    made = [(server, True) for server in kind.toolsets(config)]
    made += [(server, False) for server in type(task).toolsets(task.config)]
    return [await ToolServer(server, is_shared).describe() for server, is_shared in _checked(made)]


def _checked(made: list[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    for server, is_shared in made:
        if getattr(server.config, "url", None):
            raise ValueError(f"the tools of {type(server).__name__} are on a server elsewhere")
        runtime = getattr(server.config, "runtime", None)
        if runtime is not None and runtime.type != "subprocess":
            raise ValueError(f"the tools of {type(server).__name__} need a runtime of type {runtime.type!r}")
        yield server, is_shared


# --- The score ----------------------------------------------------------------------------------------------


async def score(request: Request) -> Reply:
    task, _ = make_task(request["task"])
    trace = make_trace(task, request)
    await task.score(trace)
    if trace.errors:
        raise RuntimeError(trace.errors[-1].message)
    missing = [name for scores in (trace.rewards, trace.metrics) for name in scores if scores[name] is None]
    if missing:
        raise RuntimeError(f"no value was given for {', '.join(missing)}")
    return {
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
    }


def make_trace(task: Any, request: Request) -> Any:
    """Fill a trace as the library's own runs do."""
    import verifiers.v1 as vf
    from pydantic import TypeAdapter
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, TraceTask

    kind = state_cls(type(task))
    written = request.get("state")
    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=TypeAdapter(kind).validate_json(written) if written else kind(),
        agent=AgentInfo(config=vf.AgentConfig(model="policy", harness={"id": "null"})),
    )
    trace.timing.agent.start = time.time() - request["agent_seconds"]
    _add_turns(trace, request)
    trace.timing.agent.end = time.time()
    trace.split_agent_time()
    if request["stop"] == "agent_timeout":
        trace.record_timeout("agent")
    trace.stop(STOPS.get(request["stop"], request["stop"]))
    return trace


def _add_turns(trace: Any, request: Request) -> None:
    from pydantic import TypeAdapter
    from verifiers.v1 import graph
    from verifiers.v1.trace import ModelCall
    from verifiers.v1.types import Message, Response, Tool, TurnTokens, Usage

    messages = TypeAdapter(list[Message]).validate_python(request["messages"])
    tools = [Tool(**tool["function"]) for tool in request["tools"]]
    turns = iter(request["turns"])
    for end, message in enumerate(messages):
        if end < request["first_messages"] or message.role != "assistant":
            continue
        turn = next(turns)
        tokens = TurnTokens(**turn["tokens"]) if turn["tokens"] else None
        usage = (
            Usage(prompt_tokens=len(tokens.prompt_ids), completion_tokens=len(tokens.completion_ids))
            if tokens
            else None
        )
        reason = "length" if turn["truncated"] else "tool_calls" if message.tool_calls else "stop"
        reply = Response(
            id=str(end),
            created=int(time.time()),
            model="policy",
            message=message,
            finish_reason=reason,
            usage=usage,
            tokens=tokens,
        )
        node = graph.prepare_turn(trace, messages[:end], tools).commit(reply)
        trace.calls.append(ModelCall(node=node, model="policy", finish_reason=reason, usage=usage))


if __name__ == "__main__":
    for place in reversed(sys.argv[1:]):
        sys.path.insert(0, place)
    main()
