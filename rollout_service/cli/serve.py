"""`rollout-service serve`: run the server in the foreground."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_service.cli import common

EXAMPLE = "Example: rollout-service serve --port 8080 --backend http://gpu-1:30000 --rollout-workers 64"


OPTIONS: dict[str, tuple[Any, str]] = {
    "host": (str, "Address to listen on; beyond loopback, keys are required."),
    "port": (int, "Port to listen on; 0 picks a free one."),
    "sandbox": (str, "What runs untrusted code: apptainer, or local (isolates nothing)."),
    "engine": (str, "Engine if there is no --backend: embedded, or none."),
    "model": (str, "The embedded engine's model: calc-base, calc-tuned, live-base, parl-base, or a folder."),
    "pool_model": (
        list[str],
        "POOL=MODEL: one more embedded engine, for another pool, as frozen-1=calc-tuned; may be repeated.",
    ),
    "backend": (list[str], "URL of an engine to register; may be repeated."),
    "environment": (list[Path], "Folder with an environment.toml; may be repeated."),
    "state_dir": (Path, "Folder for the store, on a local disk."),
    "keys_file": (Path, "TOML file with the API's keys; may change while the server runs."),
    "tls_certificate": (Path, "PEM file with the certificate and its chain; enables HTTPS."),
    "tls_key": (Path, "PEM file with the certificate's private key."),
    "init_workers": (int, "Rollouts being set up at once."),
    "rollout_workers": (int, "Agents at once."),
    "evaluate_workers": (int, "Rollouts being scored at once."),
    "max_sandboxes": (int, "The most sandboxes alive at once, warm ones included."),
    "warm_sandboxes": (int, "Sandboxes started ahead, of each kind; 0 for none."),
    "node_name": (str, "Name of this node, unique among those that share the store."),
    "node_label": (list[str], "What this node has that environments may require; may be repeated."),
    "log_level": (str, "debug, info, warning or error."),
}


def command(
    config: common.Config = None,
    port_file: Annotated[Path | None, typer.Option(help="File to write the server's URL to once it listens.")] = None,
    own: Annotated[
        bool, typer.Option("--own", hidden=True, help="Ignore the settings of a service for others.")
    ] = False,
    **options: Any,
) -> None:
    """Run the server in the foreground, until Ctrl-C.

    Ctrl-C lets rollouts end for the drain period, and returns the rest to the store; a second Ctrl-C skips the wait.
    Every setting can also be a ROLLOUT_* variable, or stand in rollout.toml; flags win. `rollout-service config docs`
    lists all settings, and `config show` prints each value with its source.
    """
    gc.disable()  # the imports make no garbage; `serve` enables it
    common.run_blocking(lambda: _serve(config, settings_of(options), port_file, own=own))


command.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        *list(signature(command, eval_str=True).parameters.values())[:-1],
        *(
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, typer.Option(help=text)],
            )
            for name, (kind, text) in OPTIONS.items()
        ),
    ]
)


def _serve(config: Path | None, flags: dict[str, Any], port_file: Path | None, *, own: bool) -> int:
    from rollout_service.server.api.serve import serve
    from rollout_service.settings import load_own_settings, load_settings

    load = load_own_settings if own else load_settings
    return serve(load(config, **flags), explain=common.explain, port_file=port_file)


def settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    from rollout_service.settings.sources import FLAGS

    settings: dict[str, Any] = {}
    for key, flag in FLAGS.items():
        value = parameters[flag.removeprefix("--").replace("-", "_")]
        if value is None or value in ([], ()):
            continue
        *path, name = key.split(".")
        table = settings
        for part in path:
            table = table.setdefault(part, {})
        table[name] = [{"url": url} for url in value] if key == "backends" else value
    return settings
