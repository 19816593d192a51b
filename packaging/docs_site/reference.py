"""The generated pages of the reference: commands, HTTP routes, and the Python that users import.

Commands come from the command line's own help, routes from the service's OpenAPI document, and classes from their
docstrings, so none of them can be out of date.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

PYTHON = {
    "Client": (
        "rollout_client.client",
        "rollout_client.sync",
        "rollout_client.runs",
        "rollout_client.errors",
    ),
    "Batches": ("rollout_client.arrays", "rollout_client.run_export"),
    "Wire models": (
        "api_schemas.tasks",
        "api_schemas.rollouts",
        "api_schemas.rollouts.stages",
        "api_schemas.rollouts.steps",
        "api_schemas.rollouts.trees",
        "api_schemas.rollouts.tokens",
        "api_schemas.trajectories",
        "api_schemas.runs",
        "api_schemas.runs.history",
        "api_schemas.sessions",
        "api_schemas.inference",
        "api_schemas.nodes",
        "api_schemas.events",
        "api_schemas.errors",
        "api_schemas.views.overview",
        "api_schemas.views.hangs",
        "api_schemas.views.summaries",
    ),
    "Environments": ("rollout_service.environments.contract", "rollout_service.episodes"),
    "Sandboxes": ("sandboxes.contract.sandbox", "sandboxes.contract.sessions", "sandboxes.errors"),
    "Testing": ("rollout_service.testing.script", "rollout_service.testing.sglang_engine"),
}
"""The modules of the reference, by page."""
COMPOSED = ("rollout_client.client",)
"""Those whose classes are shown with what they inherit: their methods are divided among modules."""
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>HTTP routes of the rollout service</title>
<link rel="stylesheet" href="swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="swagger-ui-bundle.js"></script>
<script src="document.js"></script>
</body>
</html>
"""
START = "SwaggerUIBundle({spec: %s, dom_id: '#swagger-ui', supportedSubmitMethods: [], validatorUrl: null});\n"


def write_reference(root: Path, target: Path) -> None:
    """Write the generated pages into the folder of the reference."""
    _write_commands(root, target / "commands.md")
    _write_routes(target)
    _write_python(root, target / "python")


def _write_commands(root: Path, page: Path) -> None:
    command = [sys.executable, "-m", "typer", "rollout_service.cli", "utils", "docs"]
    command += ["--name", "rollout-service", "--output", str(page)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    text = page.read_text().replace("# `rollout-service`", "# Every command", 1)
    page.write_text(re.sub(r"<([a-z\[\]]+)>", r"\1", text))


def _write_routes(target: Path) -> None:
    from rollout_service.server.api.app import create_app
    from rollout_service.server.api.openapi import build
    from rollout_service.settings import Settings

    document = build(create_app(Settings()), keyed=True)
    folder = target / "openapi"
    folder.mkdir()
    for name in ASSETS:
        shutil.copyfile(str(files("fastapi_offline") / "static" / name), folder / name)
    (folder / "openapi.json").write_text(json.dumps(document, ensure_ascii=False))
    (folder / "document.js").write_text(START % json.dumps(document))
    (folder / "browse.html").write_text(FRAME)
    (target / "openapi.md").write_text(_route_table(document))


def _route_table(document: dict[str, object]) -> str:
    lines = [
        "# HTTP routes",
        "",
        '[Browse them with their models](openapi/browse.html){target="_blank"}, or take the '
        "[OpenAPI document](openapi/openapi.json). A running service has both, at `/docs` and `/openapi.json`.",
        "",
        "| route | what it does |",
        "|---|---|",
    ]
    paths = document["paths"]
    if isinstance(paths, dict):
        for path, methods in paths.items():
            for method, operation in methods.items():
                summary = str(operation.get("description", operation.get("summary", ""))).split("\n")[0]
                lines.append(f"| `{method.upper()} {path}` | {summary.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _write_python(root: Path, folder: Path) -> None:
    folder.mkdir()
    index = ["# Python", "", "What programs import, made from the docstrings.", ""]
    for title, modules in PYTHON.items():
        name = title.lower().replace(" ", "-")
        page = [f"# {title}", ""]
        for module in modules:
            page += [f"::: {module}", "    options:", f"      members: {_public(root, module)}"]
            page += [f"      inherited_members: {str(module in COMPOSED).lower()}", ""]
        (folder / f"{name}.md").write_text("\n".join(page))
        index += [f"- [{title}]({name}.md): {', '.join(f'`{module}`' for module in modules)}"]
    (folder / "index.md").write_text("\n".join(index) + "\n")


def _public(root: Path, module: str) -> str:
    """Return the public classes and functions that a module defines itself, as a YAML list."""
    path = root / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    return json.dumps(names)
