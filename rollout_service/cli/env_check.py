"""Looking at environments without running them: which there are, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout_service.cli.console import identity, table
from rollout_service.environments.contract import Environment
from rollout_service.environments.declaration import FILE_NAME
from rollout_service.environments.registry import EnvironmentRegistry, load_path
from rollout_service.errors import InvalidFieldError
from rollout_service.settings import Settings, load_settings
from sandboxes.errors import ImageError
from sandboxes.images import ImageStore

SHOWN_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What was found out about an environment."""

    name: str
    image: str | None
    tools: list[str]
    instances: int
    findings: list[str]
    """What is wrong, each with where it is."""

    def as_dict(self) -> dict[str, JsonValue]:
        """For `--json`."""
        return asdict(self)

    def show(self, console: Console) -> None:
        """For a terminal."""
        rows = table("", "", header=False)
        rows.add_row("environment", self.name)
        rows.add_row("image", self.image or "none: it needs no sandbox")
        rows.add_row("tools", ", ".join(self.tools) or "none")
        rows.add_row("data set", f"{self.instances} instances")
        console.print(rows)
        for finding in self.findings[:SHOWN_FINDINGS]:
            console.print(Text(finding, style="red"), soft_wrap=True)
        if (more := len(self.findings) - SHOWN_FINDINGS) > 0:
            console.print(f"and {more} more")
        console.print("nothing is wrong" if not self.findings else f"{len(self.findings)} findings")


def installed() -> tuple[list[dict[str, JsonValue]], list[str]]:
    """The environments that a server on this machine would have, and what could not be loaded."""
    registry = EnvironmentRegistry.load(load_settings().environments)
    specs = [environment.spec.model_dump(mode="json") for environment in registry.list()]
    return specs, [f"{source}: {error}" for source, error in registry.problems.items()]


def environment_table(specs: Sequence[dict[str, JsonValue]]) -> Table:
    """A table of environments."""
    rows = table(identity("name"), "image", "tools", "description")
    for spec in specs:
        tools = spec.get("tools")
        names = ", ".join(map(str, tools)) if isinstance(tools, list) else ""
        rows.add_row(str(spec["name"]), str(spec.get("image") or ""), names, str(spec.get("description", "")))
    return rows


def place_of(name_or_path: str) -> Path | None:
    """The path of an environment; None when it is the name of an installed one."""
    path = Path(name_or_path).expanduser()
    is_place = "/" in name_or_path or path.is_file() or (path / FILE_NAME).is_file()
    return path.absolute() if is_place else None


def load_environment(name_or_path: str) -> Environment:
    """An installed environment, or the one at a path. Raises ConfigurationError, InvalidFieldError."""
    place = place_of(name_or_path)
    if place is not None:
        return load_path(place)
    return EnvironmentRegistry.load(load_settings().environments).get(name_or_path)


def check_environment(name_or_path: str) -> Report:
    """Everything that can be said of an environment without starting a sandbox."""
    settings = load_settings()
    environment = load_environment(name_or_path)
    dataset = environment.dataset()
    findings = [*_image(environment, settings), *_instances(environment, dataset)]
    spec = environment.spec
    return Report(spec.name, spec.image, list(spec.tools), len(dataset), findings)


def _image(environment: Environment, settings: Settings) -> Iterator[str]:
    image = environment.spec.image
    if image is None:
        return
    try:
        ImageStore(settings.images_dir).resolve(image)
    except ImageError as error:
        yield f"image: {error} ({error.hint})" if error.hint else f"image: {error}"


def _instances(environment: Environment, dataset: Sequence[dict[str, JsonValue]]) -> Iterator[str]:
    for number, instance in enumerate(dataset):
        try:
            environment.check(instance)
        except InvalidFieldError as error:
            yield f"data set, instance {number}: {error}"
