"""The shared parts of all commands: options, the way they run, and error reports.

Results go to stdout and everything else to stderr. A known error ends a command with its message, what to do next, and
exit code 1, without a traceback. Heavy modules are imported only when a command needs them, so `--help` is quick.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import Parameter, iscoroutinefunction, signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from rollout_client.client import RolloutClient
    from rollout_service.cli.console import SafeConsole

P = ParamSpec("P")
T = TypeVar("T")

TERMINATED = 128 + signal.SIGTERM
DEFAULT_URL = "http://127.0.0.1:8080"

Url = Annotated[str, typer.Option("--url", envvar="ROLLOUT_URL", help="The server's URL.")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="ROLLOUT_KEY", help="The server's bearer key.", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="Settings file; by default, rollout.toml if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class CommandError(Exception):
    """A command cannot continue; `hint` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def out(*, color: bool = True) -> SafeConsole:
    """Return the console for results; without `color`, or with `NO_COLOR`, it has no styles."""
    from rollout_service.cli.console import SafeConsole

    return SafeConsole(color=color)


def err() -> SafeConsole:
    """Return the console for progress, warnings, and errors."""
    from rollout_service.cli.console import SafeConsole

    return SafeConsole(stderr=True)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as `2 results`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def joined_counts(counts: Mapping[Any, int]) -> str:
    """Return counts by name as a text, such as `1 opted_out, 2 side`."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


async def first(found: AsyncGenerator[T, None], limit: int) -> list[T]:
    """Return the first items of a paged list; no more pages are requested than needed."""
    from contextlib import aclosing

    some: list[T] = []
    async with aclosing(found) as listed:
        async for one in listed:
            some.append(one)
            if len(some) == limit:
                break
    return some


def print_json(value: Any) -> None:
    """Print data as JSON, with models and dataclasses in it; a number that JSON cannot hold becomes null."""
    import json

    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(value, by_alias=False, inf_nan_mode="null")
    print_line(json.dumps(plain, indent=2, ensure_ascii=False))


def print_line(document: str) -> None:
    """Print a line, escaping characters that a terminal would obey."""
    from rollout_service.base.terminal_text import escape_controls_in_json

    typer.echo(escape_controls_in_json(document))


def connect(url: str, key: str | None, *, patience_seconds: float = 0.0) -> RolloutClient:
    """Return a client for a command; by default it does not retry a server that does not answer."""
    from rollout_client.client import RolloutClient

    ca_file = os.environ.get("ROLLOUT_CA_FILE")
    return RolloutClient(url, key, patience_seconds=patience_seconds, ca_file=ca_file)


def command(function: Callable[P, Awaitable[int | None] | int | None]) -> Callable[P, None]:
    """Turn a function or coroutine that returns its exit code into a command, and explain its known errors."""

    @wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        call: Callable[[], Any] = partial(function, *arguments, **options)
        run_blocking(partial(run_coroutine, call) if iscoroutinefunction(function) else call)

    return run


def client_command(
    show: Callable[[Any], object] | None = None, *, patience_seconds: float = 0.0
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., None]]:
    """Turn a coroutine into a command; its first argument, `client`, is connected to the server at --url.

    With `show`, the coroutine returns a result: --json prints it as JSON, otherwise `show` does. Without, it returns
    its exit code, as with `command`.
    """
    options = [
        Parameter("url", Parameter.KEYWORD_ONLY, default=DEFAULT_URL, annotation=Url),
        Parameter("key", Parameter.KEYWORD_ONLY, default=None, annotation=Key),
    ]
    if show is not None:
        options.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))

    def made(function: Callable[..., Awaitable[Any]]) -> Callable[..., None]:
        @wraps(function)
        async def run(*, url: str, key: str | None, **given: Any) -> Any:
            as_json = given.pop("as_json") if show is not None else False
            async with connect(url, key, patience_seconds=patience_seconds) as client:
                found = await function(client, **given)
            if show is None:
                return found
            print_json(found) if as_json else show(found)
            return None

        for imported_for_types_alone in ("client", "return"):
            del function.__annotations__[imported_for_types_alone]
        own = signature(function, eval_str=True)
        parameters = [*list(own.parameters.values())[1:], *options]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command(run)

    return made


def run_coroutine(command: Callable[[], Awaitable[int | None]]) -> int | None:
    """Run a coroutine, and return its exit code. SIGTERM cancels it, as Ctrl-C does, with all it started."""
    import asyncio

    import anyio

    async def main() -> int | None:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, scope.cancel)
            return await command()
        return TERMINATED

    return anyio.run(main, backend_options={"use_uvloop": True})


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Leave the block by an exception, as Ctrl-C does, at SIGTERM and at the end of the terminal."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def name_value_pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str]:
    """Return the values of a flag that may be repeated, each NAME=VALUE."""
    pairs = [text.partition("=") for text in texts or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise CommandError(f"{flag} {name!r} is not of the form NAME=VALUE", hint=f"Write it as {flag} NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def run_blocking(command: Callable[[], int | None]) -> None:
    """Run a command; explain a known error on stderr, and exit with 1."""
    try:
        exit_code = command()
    except Exception as error:
        cause = _alone(error)
        if isinstance(cause, BrokenPipeError):  # whoever reads the output has enough: Typer ends quietly
            raise cause from None
        if not _is_known(cause):
            raise
        explain(cause)
        exit_code = 1
    if exit_code:
        raise typer.Exit(exit_code)


def explain(error: Exception) -> None:
    from rich.text import Text

    console = err()
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    for text in (getattr(error, "hint", ""), _advice(error)):
        if text:
            console.print(Text.assemble(("hint: ", "bold"), text), soft_wrap=True)


def _alone(error: Exception) -> Exception:
    """Return the only error inside the groups of task groups."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _is_known(error: Exception) -> bool:
    from rollout_client.client import ClientError
    from rollout_service.base.errors import ServiceError
    from rollout_service.engines.local_servers.process import EngineStartError
    from sandboxes.errors import SandboxError

    return isinstance(error, CommandError | ClientError | ServiceError | SandboxError | EngineStartError)


def _advice(error: Exception) -> str:
    from rollout_client.client import UnauthorizedError, UnreachableError

    if isinstance(error, UnreachableError):
        return "start a server with `rollout-service serve`, or name another with --url or ROLLOUT_URL."
    if isinstance(error, UnauthorizedError):
        return "pass the server's key with --key or ROLLOUT_KEY."
    return ""
