"""`rollout-service serve`: run the server in the foreground."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_service.cli import common

EXAMPLE = "Example: rollout-service serve --port 8080 --backend http://gpu-1:30000 --rollout-workers 64"


def command(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond loopback, keys are required.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="What runs untrusted code: apptainer, or local (isolates nothing).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine if there is no --backend: embedded, or none.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The embedded engine's model: calc-base, calc-tuned, live-base, parl-base, or a folder."
        ),
    ] = None,
    pool_model: Annotated[
        list[str] | None,
        typer.Option(
            help="POOL=MODEL: one more embedded engine, for another pool, as frozen-1=calc-tuned; may be repeated."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="URL of an engine to register; may be repeated.")
    ] = None,
    environment: Annotated[
        list[Path] | None, typer.Option(help="Folder with an environment.toml; may be repeated.")
    ] = None,
    config: common.Config = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder for the store, on a local disk.")] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="TOML file with the API's keys; may change while the server runs.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate and its chain; enables HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    port_file: Annotated[
        Path | None, typer.Option(help="File to write the server's URL to once it listens.")
    ] = None,
    init_workers: Annotated[int | None, typer.Option(help="Rollouts being set up at once.")] = None,
    rollout_workers: Annotated[int | None, typer.Option(help="Agents at once.")] = None,
    evaluate_workers: Annotated[int | None, typer.Option(help="Rollouts being scored at once.")] = None,
    max_sandboxes: Annotated[
        int | None, typer.Option(help="The most sandboxes alive at once, warm ones included.")
    ] = None,
    warm_sandboxes: Annotated[
        int | None, typer.Option(help="Sandboxes started ahead, of each kind; 0 for none.")
    ] = None,
    node_name: Annotated[
        str | None, typer.Option(help="Name of this node, unique among those that share the store.")
    ] = None,
    node_label: Annotated[
        list[str] | None,
        typer.Option(help="What this node has that environments may require; may be repeated."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    own: Annotated[
        bool, typer.Option("--own", hidden=True, help="Ignore the settings of a service for others.")
    ] = False,
) -> None:
    """Run the server in the foreground, until Ctrl-C.

    Ctrl-C lets rollouts end for the drain period, and returns the rest to the store; a second Ctrl-C skips the wait.
    Every setting can also be a ROLLOUT_* variable, or stand in rollout.toml; flags win. `rollout-service config docs`
    lists all settings, and `config show` prints each value with its source.
    """
    parameters = locals()
    gc.disable()  # the imports make no garbage; `serve` enables it
    common.run_blocking(lambda: _serve(config, settings_of(parameters), port_file, own=own))


def _serve(config: Path | None, flags: dict[str, Any], port_file: Path | None, *, own: bool) -> int:
    from rollout_service.server.api.serve import serve
    from rollout_service.settings import load_own_settings, load_settings

    load = load_own_settings if own else load_settings
    return serve(load(config, **flags), port_file=port_file)


def settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the command's flags set, as nested tables."""
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
