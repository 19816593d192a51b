"""Lists environments, and checks one without running it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from pydantic import JsonValue
from rich.table import Table
from rich.text import Text

from rollout_service.base.errors import ConfigurationError, InvalidFieldError, ServiceError
from rollout_service.cli.common import CommandError, count, err
from rollout_service.cli.console import SafeConsole, id_column, table
from rollout_service.cli.files import written
from rollout_service.cli.image.tables import unpacked_images
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.environments.dataset_files import SPLIT, count_splits, get_split
from rollout_service.environments.declarative.declaration import FILE_NAME
from rollout_service.environments.harbor.collection import is_harbor_folder
from rollout_service.environments.harbor.compose import REFERENCE
from rollout_service.environments.registry import EnvironmentRegistry, explain, load_path, names_python_object
from rollout_service.environments.secrets import HostSecrets
from rollout_service.pipeline.sandbox_source import check_sizes
from rollout_service.settings import Settings, load_settings
from sandboxes.errors import ImageError, ProviderUnavailableError, SandboxConfigError
from sandboxes.images.store import ImageStore

if TYPE_CHECKING:
    from rollout_service.cli.env.engines import PoolModels
    from rollout_service.cli.env.solutions import TriedTask

SHOWN_FINDINGS = 20
COROUTINES = ("init", "run", "solve", "execute", "evaluate", "evaluate_checkpoint")
SHOWN_CHARS = 100
LARGE_INSTANCE_BYTES = 1024 * 1024
"""Batches have a copy of an instance for each sample and one for the group: this gives many megabytes."""


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    name: str
    image: str | None
    harness: str | None
    """A program that is the agent; None for the built-in one."""
    tools: list[str]
    """The built-in tools and the environment's own, as the policy sees them."""
    instances: int
    splits: dict[str, int]
    findings: list[str]
    warnings: list[str]
    """Settings that have no effect, and instances that are large."""
    tried: list[TriedTask] = field(default_factory=list)
    task_images: bool = False
    secrets: list[dict[str, JsonValue]] = field(default_factory=list)
    """Without their values; says whether each is allowed, present, and long enough."""

    def show(self, console: SafeConsole) -> None:
        rows = table("", "", header=False)
        rows.add_row("environment", self.name)
        without = "that of each task" if self.task_images else "none; it needs no sandbox"
        rows.add_row("image", self.image or without)
        if self.harness is not None:
            rows.add_row("harness", self.harness)
        else:
            rows.add_row("tools", ", ".join(self.tools) or "none")
        splits = ", ".join(f"{name} {number}" for name, number in self.splits.items())
        dataset = count(self.instances, "instance") + (f" ({splits})" if splits else "")
        rows.add_row("data set", dataset if self.instances else "none; tasks bring their own instances")
        if self.secrets:
            rows.add_row("secrets", "\n".join(map(_secret, self.secrets)))
        console.print(rows)
        for warning in self.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
        for finding in self.findings[:SHOWN_FINDINGS]:
            console.print(Text(finding, style="red"), soft_wrap=True)
        if (more := len(self.findings) - SHOWN_FINDINGS) > 0:
            console.print(f"... and {more} more")
        console.print(count(len(self.findings), "finding") if self.findings else "nothing is wrong")


def _secret(asked: dict[str, JsonValue]) -> str:
    state = "allowed and present" if asked["usable"] else "not usable, as said below"
    return f"{asked['table']} {asked['key']} from the {asked['source']}: {state}"


def list_installed() -> tuple[list[dict[str, JsonValue]], list[str]]:
    """Return the environments that a server here would have, and the errors of those that fail to load."""
    settings = load_settings()
    registry = EnvironmentRegistry.load(settings.environments, harbor=settings.harbor)
    specs = [one.spec.model_dump(mode="json") | {"tools": [*tool_names(one)]} for one in registry.list()]
    return specs, [f"{source}: {error}" for source, error in registry.problems.items()]


def tool_names(environment: Environment) -> list[str]:
    told = [str(tool["function"]["name"]) for tool in environment.tool_definitions()]
    return [*environment.spec.tools, *(name for name in told if name not in environment.spec.tools)]


def environment_table(specs: Sequence[dict[str, JsonValue]]) -> Table:
    rows = table(id_column("name"), "image", "tools", "description")
    for spec in specs:
        tools = spec.get("tools")
        names = ", ".join(map(str, tools)) if isinstance(tools, list) else ""
        rows.add_row(str(spec["name"]), str(spec.get("image") or ""), names, str(spec.get("description", "")))
    return rows


def environment_path(name_or_path: str) -> Path | None:
    """Return the path of an environment; None if it is the name of an installed one."""
    path = Path(name_or_path).expanduser()
    is_place = (
        *("/" in name_or_path, path.is_file(), (path / FILE_NAME).is_file()),
        *(is_harbor_folder(path), names_python_object(name_or_path)),
    )
    return path.absolute() if any(is_place) else None


def load_environment(name_or_path: str) -> Environment:
    """Load an installed environment, or the one at a path.

    Raises:
        ConfigurationError: The environment at the path is invalid, or nothing has this name.
    """
    settings = load_settings()
    place = environment_path(name_or_path)
    if place is not None:
        return load_path(place, settings.harbor)
    try:
        return EnvironmentRegistry.load(settings.environments, harbor=settings.harbor).get(name_or_path)
    except InvalidFieldError as error:
        found = "; ".join(field.message for field in error.fields)
        raise ConfigurationError(
            f"there is no folder ./{name_or_path} with an {FILE_NAME} here, and {found}", hint=error.hint
        ) from error


def check_environment(name_or_path: str) -> EnvironmentReport:
    settings = load_settings()
    environment = load_environment(name_or_path)
    dataset = read_dataset(environment)
    repeated = list(_repeated(dataset))
    secrets = list(HostSecrets(settings.secrets).examine(environment.spec))
    findings = [
        *_find_functions(environment),
        *environment.findings(),
        *_find_oversized(environment.spec, settings),
        *_check_image(environment, settings),
        *_check_instances(environment, dataset),
        *_check_tasks(environment, dataset, settings),
        *_find_unsplit(dataset),
        *_find_shared(dataset, repeated),
        *(f"{problem} ({problem.hint})" for _, problem in secrets if problem is not None),
    ]
    spec = environment.spec
    return EnvironmentReport(
        spec.name,
        spec.image,
        spec.harness.name if spec.harness is not None else None,
        tool_names(environment),
        len(dataset),
        count_splits(dataset),
        findings,
        [*environment.warnings(), *_find_literal(environment), *_find_large(dataset), *_find_repeated(repeated)],
        task_images=spec.image is None and spec.evaluate_in is EvaluateIn.FRESH,
        secrets=[
            {"table": one.table, "key": one.key, "source": str(one.source), "usable": problem is None}
            for one, problem in secrets
        ],
    )


def read_dataset(environment: Environment) -> Sequence[dict[str, JsonValue]]:
    try:
        dataset = environment.dataset()
    except ServiceError:
        raise
    except Exception as error:
        raise CommandError(
            f"{environment.spec.name}: dataset() failed: {explain(error)}",
            hint="Correct the code at that line.",
        ) from error
    for number, instance in enumerate(dataset, start=1):
        if not isinstance(instance, dict):
            raise CommandError(
                f"{environment.spec.name}: dataset(): instance {number} is {instance!r:.100}",
                hint='Return a list of dicts, such as [{"question": "1 + 1"}].',
            )
    return dataset


def with_solutions(
    report: EnvironmentReport,
    name_or_path: str,
    *,
    limit: int | None,
    at_once: int,
    good: Path | None,
    pools: PoolModels,
) -> EnvironmentReport:
    """Run the solutions of an environment's tasks, and an idle agent; return the report with the findings."""
    from rollout_service.cli.env.solutions import try_tasks

    environment = load_environment(name_or_path)
    dataset = read_dataset(environment)
    if not environment.has_solution or not dataset:
        raise CommandError(
            f"{report.name} brings no solutions of its tasks",
            hint="Leave --run out, and try a solution of yours with `env run --script`.",
        )

    def show(tried: TriedTask) -> None:
        first = [problem.partition("\n")[0] for problem in tried.problems]  # the report has the rest
        outcome = "; ".join(line[:SHOWN_CHARS] for line in first) or "good"
        err().print(Text(f"{instance_name(tried.instance)}: {outcome}"), soft_wrap=True)

    async def try_all() -> list[TriedTask]:
        async with pools.trial(load_settings()) as (sandboxes, models):
            return await try_tasks(environment, dataset[:limit], sandboxes, at_once=at_once, models=models, done=show)

    tried = anyio.run(try_all)
    if good is not None:
        lines = [json.dumps(one.instance) + "\n" for one in tried if not one.problems]
        with written(good, hint="Name another file with --good.") as write:
            write("".join(lines).encode())
        err().print(f"{count(len(lines), 'good task')} in {good}", soft_wrap=True)
    problems = [f"{instance_name(one.instance)}: {problem}" for one in tried for problem in one.problems]
    return replace(report, findings=[*report.findings, *problems], tried=tried)


def instance_name(instance: dict[str, JsonValue]) -> str:
    name = instance.get("instance_id")
    return name if isinstance(name, str) else json.dumps(instance)


def _find_oversized(spec: EnvironmentSpec, settings: Settings) -> Iterator[str]:
    try:
        check_sizes(spec, settings.sandboxes)
    except SandboxConfigError as error:
        yield f"sandbox: {error} ({error.hint})"


def _check_image(environment: Environment, settings: Settings) -> Iterator[str]:
    image = environment.spec.image
    if image is None:
        return
    try:
        path = ImageStore(settings.images_dir).resolve(image)
        facts = unpacked_images(settings).facts(path)
    except (ImageError, ProviderUnavailableError) as error:
        yield f"image: {error} ({error.hint})" if error.hint else f"image: {error}"
        return
    for name in facts.missing:
        yield f"image: it lacks {name}, which every sandbox needs"


def _check_tasks(
    environment: Environment, dataset: Sequence[dict[str, JsonValue]], settings: Settings
) -> Iterator[str]:
    store, built = ImageStore(settings.images_dir), environment.dockerfiles()
    seen: set[str] = {environment.spec.image or ""}
    for instance in dataset:
        try:
            spec = environment.for_instance(instance).spec
        except InvalidFieldError:
            continue  # found already
        if spec is not environment.spec:
            yield from (f"{instance_name(instance)}: {problem}" for problem in _find_oversized(spec, settings))
        for image in {spec.image, spec.for_grader().image} - seen - {None}:
            seen.add(image or "")
            try:
                store.resolve(image or "")
            except ImageError as error:
                hint = "build it with `rollout-service env build`" if image in built else error.hint
                yield f"{instance_name(instance)}: image: {error} ({hint})"


def _find_literal(environment: Environment) -> Iterator[str]:
    for name, value in environment.spec.sandbox.env.items():
        if REFERENCE.search(value):
            yield (
                f"[sandbox] env.{name}: {value} stays as it is written: no variable of the host is filled in, "
                "and the API shows env. Name the variable in `secrets`; docs/reference/environment-toml.md says how"
            )


def _find_large(dataset: Sequence[dict[str, JsonValue]]) -> Iterator[str]:
    sizes = [len(json.dumps(instance)) for instance in dataset]
    if large := [(size, number) for number, size in enumerate(sizes, 1) if size > LARGE_INSTANCE_BYTES]:
        size, number = max(large)
        yield (
            f"data set: {count(len(large), 'instance')} of over {LARGE_INSTANCE_BYTES / 1e6:.0f} MB, of which number "
            f"{number} has {size / 1e6:.1f} MB: every sample of a batch has a copy, so put large data into the image"
        )


def _find_unsplit(dataset: Sequence[dict[str, JsonValue]]) -> Iterator[str]:
    without = sum(1 for instance in dataset if get_split(instance) is None)
    if without and count_splits(dataset):
        yield f"data set: {count(without, 'instance')} without a split, which no run can use"


def _find_shared(dataset: Sequence[dict[str, JsonValue]], repeated: Sequence[tuple[int, int]]) -> Iterator[str]:
    for first, again in repeated:
        one, other = get_split(dataset[first - 1]), get_split(dataset[again - 1])
        if one != other and one is not None and other is not None:
            yield f"data set: number {again} of the split {other!r} is number {first}, of {one!r}, again"
            return


def _find_repeated(repeated: Sequence[tuple[int, int]]) -> Iterator[str]:
    if repeated:
        first, again = repeated[0]
        yield (
            f"data set: {count(len(repeated), 'instance')} repeated, by `instance_id` or as a whole; number {again} is "
            f"number {first} again"
        )


def _repeated(dataset: Sequence[dict[str, JsonValue]]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of each instance that comes again, and of its first."""
    seen: dict[str, int] = {}
    for number, instance in enumerate(dataset, start=1):
        without = {key: value for key, value in instance.items() if key != SPLIT}
        text = json.dumps(instance.get("instance_id") or without, sort_keys=True)
        if (first := seen.setdefault(text, number)) != number:
            yield first, number


def _find_functions(environment: Environment) -> Iterator[str]:
    for name in COROUTINES:
        method = inspect.unwrap(getattr(type(environment), name))
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            code = method.__code__
            yield f"{code.co_filename}, line {code.co_firstlineno}: {name} is not a coroutine; write `async def {name}`"


def _check_instances(environment: Environment, dataset: Sequence[dict[str, JsonValue]]) -> Iterator[str]:
    for number, instance in enumerate(dataset, start=1):
        where = f"data set, instance {number}"
        try:
            environment.check(instance)
        except InvalidFieldError as error:
            yield f"{where}: {error}"
        except Exception as error:  # noqa: BLE001 any error is the finding
            yield f"{where}: check() failed with {explain(error)}; raise InvalidFieldError for what cannot be used"
