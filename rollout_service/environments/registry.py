"""The environments of a service: built-in ones, plug-ins, folders, images, and tasks in Harbor's format.

Guarantees: an environment that cannot be loaded does not hide the others, and looking it up raises the reason; of two
with the same name, the second is an error.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tomllib
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Final, Self

from pydantic import ValidationError

from rollout_service.base.errors import ConfigurationError, InvalidFieldError, did_you_mean
from rollout_service.base.validation import describe_problems
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.declarative.declaration import FILE_NAME, INSIDE
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.declarative.from_image import extract_environment
from rollout_service.environments.harbor.collection import (
    ALL,
    HarborEnvironment,
    is_harbor_folder,
    join,
    load_harbor,
)
from rollout_service.settings.pipeline import HarborSettings

GROUP = "rollout_service.environments"
"""Entry points: each is an `Environment`, or a function without arguments that returns one."""
FIELD = "environment"
"""The path in a task; callers prefix it with the task's own."""
SHOWN_CHARS = 300
_OBJECT = re.compile(r"[\w-]+(\.\w+)*:\w+(\.\w+)*")


class EnvironmentRegistry:
    def __init__(self, environments: Iterable[Environment] = ()) -> None:
        self._environments: dict[str, Environment] = {}
        self.problems: dict[str, ConfigurationError] = {}
        """The reason for each environment that could not be loaded, by the plug-in's name or the path."""
        for environment in environments:
            self.add(environment, environment.spec.name)

    @classmethod
    def load(
        cls,
        paths: Iterable[Path] = (),
        *,
        plugins: Iterable[EntryPoint] | None = None,
        harbor: HarborSettings | None = None,
    ) -> Self:
        """Load all plug-ins, built-in ones included, and the environments at the paths.

        A path is a folder with an `environment.toml`, such a file, an image with `/environment`, or a folder of tasks
        in Harbor's format, whose tasks the environment `harbor` has too; a Python file; or `module:object`. Call this
        in a thread: it imports plug-ins and may read images.
        """
        registry = cls()
        for plugin in entry_points(group=GROUP) if plugins is None else plugins:
            registry._try(plugin.name, partial(_make, plugin.load, f"the plug-in {plugin.name!r} ({plugin.value})"))
        for path in paths:
            registry._try(str(path), partial(load_path, path, harbor))
        tasks = [one for one in registry.list() if isinstance(one, HarborEnvironment)]
        if tasks and ALL not in registry:
            registry.add(join(tasks), ALL)
        return registry

    def add(self, environment: Environment, source: str) -> None:
        """
        Raises:
            ConfigurationError: The environment's name is taken.
        """
        name = environment.spec.name
        if name in self._environments:
            raise ConfigurationError(
                f"{source}: environment {name!r} is already registered", hint="Give it another name."
            )
        self._environments[name] = environment

    def __contains__(self, name: str) -> bool:
        return name in self._environments

    def get(self, name: str) -> Environment:
        """
        Raises:
            InvalidFieldError: There is no such environment; the hint lists the known names.
            ConfigurationError: The plug-in of that name could not be loaded.
        """
        if name in self._environments:
            return self._environments[name]
        if name in self.problems:
            raise self.problems[name]
        known = sorted(self._environments)
        raise InvalidFieldError.at(
            FIELD,
            f"there is no environment {name!r}{did_you_mean(name, known)}",
            hint=f"Known environments: {', '.join(known) or 'none'}.",
            context={"environments": known},
        )

    def list(self) -> list[Environment]:
        return [self._environments[name] for name in sorted(self._environments)]

    def _try(self, source: str, load: Callable[[], Environment]) -> None:
        try:
            self.add(load(), source)
        except ConfigurationError as error:
            self.problems[source] = error


def load_path(path: Path, harbor: HarborSettings | None = None) -> Environment:
    """Load the environment at a path; `harbor` is for tasks in Harbor's format.

    Raises:
        ConfigurationError: The path has no environment, or not a valid one; the message names the path.
    """
    try:
        return _load_at(path.expanduser(), harbor)
    except ConfigurationError:
        raise
    except Exception as error:  # such as the name of a file that is too long, or brackets without end in a prompt
        why = f"{type(error).__name__}: {error}"[:SHOWN_CHARS]
        raise ConfigurationError(f"{str(path)[:SHOWN_CHARS]} cannot be loaded: {why}") from error


def _load_at(path: Path, harbor: HarborSettings | None) -> Environment:
    if path.name == FILE_NAME:
        path = path.parent
    if path.is_dir() and (path / FILE_NAME).is_file():
        return load_declared(path)
    if path.is_dir() and is_harbor_folder(path):
        return load_harbor(path, harbor or HarborSettings())
    if path.suffix == ".py" and path.is_file():
        return _make(lambda: _only_one_in(path.resolve()), str(path))
    if path.is_file():
        return _load_image(path.resolve())
    if names_python_object(path.name):
        return _make(lambda: _object_at(path), str(path))
    raise ConfigurationError(
        f"there is no environment at {path}",
        hint=f"Name a folder with an {FILE_NAME} or of Harbor's tasks, an image that contains one, a Python file, or "
        "module:object.",
    )


def names_python_object(text: str) -> bool:
    """Recognize `module:object` and `file.py:object`."""
    return _OBJECT.fullmatch(text) is not None


def _load_image(image: Path) -> Environment:
    """Let errors name paths in the image, not in the folder that it is copied to."""
    folder = extract_environment(image)
    if not (folder / FILE_NAME).is_file():
        raise ConfigurationError(
            f"the image {image} has no {INSIDE}/{FILE_NAME}",
            hint="Put one there, or name a folder that has one instead of the image.",
        )
    try:
        return load_folder(folder, image=image)
    except ConfigurationError as error:
        message = str(error).replace(str(folder), f"{image}:{INSIDE}")
        raise ConfigurationError(message, hint=error.hint) from error


def _object_at(path: Path) -> object:
    """Load an object of a module that is installed, or in the folder of the path."""
    module, _, name = path.name.partition(":")
    if (file := path.with_name(module)).is_file():
        return _find(name, _import_file(file.resolve()))
    if module.endswith(".py"):
        raise ConfigurationError("there is no such file", hint="Correct its name, or the folder before it.")
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # last, so that it hides no installed module
    return EntryPoint(name, path.name, GROUP).load()


def _find(name: str, module: ModuleType) -> object:
    if not hasattr(module, name):
        raise ConfigurationError(
            f"it defines no {name}{did_you_mean(name, vars(module))}", hint="Name an environment of the file."
        )
    return getattr(module, name)


def _only_one_in(file: Path) -> Environment | type[Environment]:
    """Return the file's `environment`, or else its one class of environments."""
    module = _import_file(file)
    if isinstance(made := getattr(module, "environment", None), Environment):
        return made
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    found = [one for one in own if issubclass(one, Environment) and not isabstract(one)]
    unfinished = next((one for one in own if issubclass(one, Environment)), None)
    if not found and unfinished is not None:
        missing = " and ".join(sorted(unfinished.__abstractmethods__))
        raise ConfigurationError(
            f"its class {unfinished.__name__} has no {missing}",
            hint="Define it with `async def`; docs/how-to/write-an-environment-in-python.md has an example.",
        )
    if len(found) != 1:
        raise ConfigurationError(
            f"it defines {len(found)} environments",
            hint=f"Define one subclass of Environment in the file, or name one: {file.name}:NAME.",
        )
    return found[0]


def _import_file(file: Path) -> ModuleType:
    """Import a Python file under a name that hides no installed module."""
    name = f"environment_{file.stem}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError("it cannot be imported", hint="Give the file a name that ends in .py.")
    sys.modules[name] = module = module_from_spec(spec)  # dataclasses and pydantic look their module up
    spec.loader.exec_module(module)
    return module


def _make(load: Callable[[], object], where: str) -> Environment:
    """Load an environment, or a class or function that returns one."""
    try:
        loaded = load()
        environment = loaded() if callable(loaded) else loaded
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}", hint=error.hint) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{where} cannot be loaded: {explain(error)}", hint=_advice(error)) from error
    if not isinstance(environment, Environment):
        raise ConfigurationError(
            f"{where} is not an Environment but an object of type {type(environment).__name__}",
            hint="Name a subclass of Environment, an object of one, or a function without arguments that returns one.",
        )
    if not isinstance(getattr(environment, "spec", None), EnvironmentSpec):
        raise ConfigurationError(
            f"{where}: {type(environment).__name__} has no `spec`",
            hint='Give the class one, such as `spec = EnvironmentSpec(name="mine")`.',
        )
    return environment


def explain(error: BaseException) -> str:
    """Describe an error of an author's code in a line, with the place in that code."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        said = f"{error.title}: {'; '.join(describe_problems(error, EnvironmentSpec))}"
    return said + _place_of(error)


def _place_of(error: BaseException) -> str:
    others = (__file__, "<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _advice(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Correct the name, or install {error.name} for {sys.executable}."
    if isinstance(error, SyntaxError) or _place_of(error):
        return "Correct the code at that line."
    if isinstance(error, TypeError):
        return "Give its parameters defaults: an environment is made without arguments."
    return "Correct the name after the colon."


# An `environment.toml` with `kind = "swe"` is read by the loader of that kind.

_HERE: Final = "rollout_service.environments"
KINDS: Final = {
    "game": f"{_HERE}.bridges.games.declared_game:load_game",
    "openenv": f"{_HERE}.bridges.openenv:load_openenv",
    "swe": f"{_HERE}.swe.environment:load_swe",
    "verifiers": f"{_HERE}.bridges.verifiers.environment:load_verifiers",
}
"""The loader of each kind, imported when needed; raises ConfigurationError with what is wrong."""


def load_declared(folder: Path) -> Environment:
    kind = _kind(folder)
    if kind is None:
        return load_folder(folder)
    if kind in KINDS:
        load: Callable[[Path], Environment] = resolve_name(KINDS[kind])
        return load(folder)
    raise ConfigurationError(
        f"{folder / FILE_NAME}: there is no kind {kind!r}{did_you_mean(kind, KINDS)}",
        hint=f"Known kinds: {', '.join(sorted(KINDS))}. Leave `kind` out to declare commands of your own.",
    )


def _kind(folder: Path) -> str | None:
    try:
        kind = tomllib.loads((folder / FILE_NAME).read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, RecursionError):
        return None  # loading the folder says what is wrong
    return None if kind is None else str(kind)
