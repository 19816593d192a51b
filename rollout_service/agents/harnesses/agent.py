"""Runs a program in the sandbox as the agent; the gateway answers and records its calls.

The program reaches the gateway at its sandbox's own loopback, with a key for this episode alone. Its exit code and the
end of its output are kept, however it ended. A program that made no call is a failure of the environment, never a
score.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from string import Template
from typing import Any, Final

from api_schemas.rollouts import AgentProgram, StopReason
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Message
from rollout_service.activity import waits_for
from rollout_service.agents.harnesses.preset import HarnessPreset, HarnessSettings, ServerForm
from rollout_service.agents.harnesses.registry import get_harness
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.tool_calling.agent import final_answer
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.episodes import Episode, GatewayAccess
from rollout_service.tokens import ToolSpec
from sandboxes import ExecResult, Sandbox
from sandboxes.task_groups import open_task_group

OUTPUT_BYTES = 64 * 1024
KEPT_CHARS = 16 * 1024
"""The end of a program's output, which is kept with the rollout."""
QUOTED_CHARS = 2_000
QUICK_SECONDS = 60.0
"""For looking at the image, and asking the program for its version."""
LARGEST_ARGUMENT = 120_000
"""The kernel takes no argument and no variable of 128 KiB or more."""


class ProgramSilentError(EnvironmentFailedError):
    """The program of a harness has ended, or its time has, without a call to the model."""


class HarnessAgent:
    def __init__(self, settings: HarnessSettings, servers: Sequence[McpSettings] = ()) -> None:
        """The program also has the tools of `servers`.

        Raises:
            ConfigurationError: There is no such harness, or it does not take these servers.
        """
        self._settings = settings
        self._preset = with_servers(settings.applied_to(get_harness(settings.name)), servers)
        if not self._preset.command:
            raise ConfigurationError(
                f"the harness {settings.name!r} has no command",
                hint='Give one, as in command = ["my-agent", "$prompt"].',
            )

    @property
    def definitions(self) -> list[ToolSpec]:
        """None, since the program brings its own tools."""
        return []

    def check(self, messages: Sequence[Message]) -> None:
        prompt = messages[-1].content
        parts = [*self._preset.command, *self._preset.env.values()]
        if not any("prompt" in Template(part).get_identifiers() for part in parts):
            return
        if len(prompt.encode(errors="replace")) > LARGEST_ARGUMENT or "\0" in prompt:
            problem = f"its prompt must have at most {LARGEST_ARGUMENT} bytes and no NUL, as {self._name} takes it"
            raise InvalidFieldError.at(
                "instance",
                f"{problem} as an argument or a variable",
                hint="Write the task into a file in [init], and name the file in `prompt`.",
            )

    async def prepare(self, episode: Episode) -> None:
        """Check that the image has the program in the wanted version."""
        sandbox, program = episode.require_sandbox(), self._preset.command[0]
        found = await sandbox.exec(["bash", "-c", 'command -v -- "$1"', "-", program], timeout=QUICK_SECONDS)
        if found.exit_code != 0:
            raise EnvironmentFailedError(
                f"the image {sandbox.spec.image!r} has no program {program!r}", hint=self._image_hint()
            )
        wanted, command = self._settings.version, self._preset.version_command
        if wanted is None or not command:
            return
        said = await sandbox.exec(command, timeout=QUICK_SECONDS)
        if wanted not in said.stdout.decode(errors="replace"):
            raise EnvironmentFailedError(
                f"the image has another version than {wanted} of {self._name}: {_end_of(said, QUOTED_CHARS)}",
                hint=self._image_hint(),
            )

    async def run(self, episode: Episode, messages: Sequence[Message]) -> StopReason:
        """Run the program on the last message's task; put its last text into `episode.answer`.

        May be called again in the same episode: each time is a session of its own for the program.

        Raises:
            ProgramSilentError: The program made no call.
            EnvironmentFailedError: There is no gateway.
            InferenceError: No engine answered.
            SandboxError: The sandbox failed.
        """
        sandbox, gateway = episode.require_sandbox(), episode.gateway
        if gateway is None or sandbox.listener is None:
            raise EnvironmentFailedError(
                "a harness needs the gateway, which only a service has",
                hint="Try the environment with `rollout-service env run --script FILE`.",
            )
        host, port = sandbox.listener.getsockname()
        values = {
            "prompt": messages[-1].content,
            "url": f"http://{host}:{port}",
            "key": gateway.key,
            "model": self._settings.model,
            "workdir": sandbox.workdir,
        }
        await self._write_files(sandbox, values)
        turns_before = episode.policy.usage.turns
        async with gateway.serve(sandbox.listener.dup()):
            result = await self._run_program(episode, gateway, values)
        episode.answer = final_answer(episode.policy.messages)
        if episode.policy.usage.turns == turns_before and gateway.stop_reason is None:
            raise self._asked_nothing(result)
        return self._stop_reason(gateway, result)

    async def _write_files(self, sandbox: Sandbox, values: dict[str, str]) -> None:
        if not self._preset.files:
            return
        said = await sandbox.exec(["bash", "-c", 'printf %s "$HOME"'], timeout=QUICK_SECONDS)
        home = said.stdout.decode(errors="replace") or sandbox.workdir
        for path, text in self._preset.files.items():
            await sandbox.write_file(path.replace("~", home, 1) if path[0] == "~" else path, _filled(text, values))

    async def _run_program(self, episode: Episode, gateway: GatewayAccess, values: dict[str, str]) -> ExecResult:
        sandbox, preset, started = episode.require_sandbox(), self._preset, time.perf_counter()
        async with open_task_group() as tasks:
            tasks.start_soon(gateway.until_failed)
            with waits_for(StepKind.AGENT, self._name, sandbox=sandbox.id):
                result = await sandbox.exec(
                    [_filled(part, values) for part in preset.command],
                    stdin=_filled(preset.stdin or "", values).encode(errors="replace"),
                    cwd=sandbox.workdir,
                    env={name: _filled(text, values) for name, text in preset.env.items()},
                    timeout=episode.limits.agent_seconds,
                    output_limit=OUTPUT_BYTES,
                )
            tasks.cancel_scope.cancel()
        episode.limit_violations.extend(result.limit_violations)
        episode.program = AgentProgram(
            harness=self._name,
            exit_code=result.exit_code,
            seconds=time.perf_counter() - started,
            output=_end_of(result, KEPT_CHARS),
        )
        return result

    def _asked_nothing(self, result: ExecResult) -> ProgramSilentError:
        how = "did not end in time" if result.timed_out else f"ended with exit code {result.exit_code}"
        return ProgramSilentError(
            f"{self._name} {how} and asked the model nothing; its output ends with: "
            f"{_end_of(result, QUOTED_CHARS) or 'nothing'}",
            hint=f"Run `rollout-service harness check {self._name}` to see whether it works here.",
        )

    def _stop_reason(self, gateway: GatewayAccess, result: ExecResult) -> StopReason:
        if gateway.stop_reason is not None:
            return gateway.stop_reason
        if result.timed_out:
            return StopReason.AGENT_TIMEOUT
        return StopReason.FINISHED if result.exit_code == 0 else StopReason.EXITED

    @property
    def _name(self) -> str:
        return self._preset.name

    def _image_hint(self) -> str:
        if self._preset.image is None:
            return "Name an image that has it, in `image`."
        return f"Build one with `rollout-service image build {self._preset.image}`, and name it in `image`."


def _filled(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)


def _end_of(result: ExecResult, chars: int) -> str:
    """Return the end of standard output, then of standard error."""
    parts = (result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace"))
    return "\n".join(part.strip() for part in parts if part.strip())[-chars:]


Servers = Sequence[McpSettings]
Writer = Callable[[str, Servers], str]
"""Adds servers to the text of a program's settings, which still has placeholders."""


def with_servers(preset: HarnessPreset, servers: Servers) -> HarnessPreset:
    """Add MCP servers to the program's own settings.

    These name all servers of the environment, or the environment is refused; no part of a server's declaration is taken
    for a placeholder, or reaches a shell.
    """
    if not servers:
        return preset
    table = preset.mcp
    if table is None:
        raise ConfigurationError(
            f"[[mcp]]: the harness {preset.name!r} takes no servers",
            hint="Leave [[mcp]] out, or configure the servers in the program's own way, by `[harness] files`.",
        )
    for server in servers:
        if server.tools is not None:
            raise ConfigurationError(
                f"[[mcp]]: the harness {preset.name!r} offers all tools of the server {server.name!r}",
                hint="Leave `tools` out: only the built-in agent can choose among them.",
            )
    try:
        text = _WRITERS[table.form](preset.files.get(table.file, ""), servers)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"[[mcp]]: servers cannot be added to the file {table.file!r} of [harness]: {error}",
            hint="Write the file as an object of JSON without comments, or leave [[mcp]] out.",
        ) from error
    command = [*preset.command[:1], *table.arguments, *preset.command[1:]]
    return preset.model_copy(update={"command": command, "files": {**preset.files, table.file: text}})


def _literal(value: Any) -> Any:
    """Escape dollar signs, which would begin placeholders."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    return value


def _json_writer(key: str, table: Callable[[McpSettings], dict[str, Any]]) -> Writer:
    def write(text: str, servers: Servers) -> str:
        settings = json.loads(text or "{}")
        tables = {server.name: _literal(table(server)) for server in servers}
        return json.dumps({**settings, key: {**settings.get(key, {}), **tables}}, indent=2)

    return write


def _claude(server: McpSettings) -> dict[str, Any]:
    if server.url is not None:
        return {"type": "http", "url": server.url, "headers": server.headers}
    return {"type": "stdio", "command": server.command[0], "args": server.command[1:], "env": server.env}


def _gemini(server: McpSettings) -> dict[str, Any]:
    limit = {} if server.call_seconds is None else {"timeout": round(server.call_seconds * 1000)}
    if server.url is not None:
        return {"httpUrl": server.url, "headers": server.headers, "trust": True, **limit}
    command = {"command": server.command[0], "args": server.command[1:], "env": server.env}
    return {**command, "trust": True, **limit}


def _opencode(server: McpSettings) -> dict[str, Any]:
    limit = {"enabled": True, "timeout": round(server.start_seconds * 1000)}
    if server.url is not None:
        return {"type": "remote", "url": server.url, "headers": server.headers, **limit}
    return {"type": "local", "command": server.command, "environment": server.env, **limit}


def _codex(text: str, servers: Servers) -> str:
    def lines(server: McpSettings) -> list[str]:
        if server.url is not None:
            settings: dict[str, Any] = {"url": server.url, "http_headers": server.headers}
        else:
            settings = {"command": server.command[0], "args": server.command[1:], "env": server.env}
        settings["startup_timeout_sec"] = server.start_seconds
        if server.call_seconds is not None:
            settings["tool_timeout_sec"] = server.call_seconds
        written = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        return ["", f"[mcp_servers.{server.name}]", *written]

    return text + "\n".join(line for server in servers for line in lines(server)) + "\n"


def _toml(value: Any) -> str:
    """Write TOML, whose strings, numbers and lists are those of JSON but for one character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(_literal(value), ensure_ascii=False).replace("\x7f", "\\u007f")


_WRITERS: Final[dict[ServerForm, Writer]] = {
    "claude": _json_writer("mcpServers", _claude),
    "codex": _codex,
    "gemini": _json_writer("mcpServers", _gemini),
    "opencode": _json_writer("mcp", _opencode),
}
