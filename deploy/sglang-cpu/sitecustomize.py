"""Stand-ins for the GPU packages that SGLang 0.5.23 imports on every machine: sgl_kernel, torchvision and triton.

Python imports this module at startup if its folder is on PYTHONPATH; it does nothing unless SGLANG_USE_CPU_ENGINE=1.

The stand-ins cover only imports: SGLang names these packages' kernels, types and decorators at import time and, with
the torch_native attention backend, calls none of them. A kernel that is called by mistake returns a placeholder and no
result, so the numbers of a server that runs on this must be checked; the project's agreement tests do that.

Guarantees: a package that is really installed takes precedence, and code that asks whether one of these packages is
installed is told that it is not.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self

PACKAGES = ("sgl_kernel", "torchvision", "triton")
TRITON_SUBMODULES = ("backends", "compiler", "language", "runtime", "testing", "tools")
TRITON_VERSION = "3.7.1"


def _refuse_dunder(name: str) -> None:
    """Refuse protocol lookups such as ``__wrapped__`` and ``__iter__``, which must find nothing.

    Raises:
        AttributeError: The name is a dunder name.
    """
    if name.startswith("__"):
        raise AttributeError(name)


class Placeholder:
    """An object that can be called, subscripted and read from, and used as a decorator with or without arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_bare_decorator = len(args) == 1 and not kwargs and callable(args[0])
        if is_bare_decorator and not isinstance(args[0], Placeholder):
            return args[0]
        if args or kwargs:
            return lambda decorated: decorated if callable(decorated) else None
        return self

    def __getitem__(self, key: object) -> Self:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        return Placeholder()


class PlaceholderType(type):
    """The type of stand-in classes. Their members, mostly those of enumerations, are their own names."""

    def __getattr__(cls, name: str) -> str:
        _refuse_dunder(name)
        return name


class PlaceholderModule(ModuleType):
    """A package in which every attribute exists: capitalized names are classes, the others are placeholders."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = TRITON_VERSION

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        if self.__name__ == "triton.runtime" and name == "driver":
            raise RuntimeError("0 active drivers")  # triton's own message without a GPU
        if self.__name__ == "triton" and name in TRITON_SUBMODULES:
            return importlib.import_module(f"triton.{name}")
        if self.__name__ == "triton.runtime" and name == "jit":
            return importlib.import_module("triton.runtime.jit")
        if name[0].isupper():
            return PlaceholderType(name, (), {"__init__": _accept_anything})
        return Placeholder()


def _accept_anything(self: object, *args: Any, **kwargs: Any) -> None:
    """Construct an instance of a stand-in class."""


def _is_availability_probe() -> bool:
    """Return whether the import system was entered through importlib.util.find_spec rather than an import."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        if frame.f_globals["__name__"] == "importlib.util":
            return True
        frame = frame.f_back
    return False


class PlaceholderFinder(MetaPathFinder, Loader):
    """Finds the stand-ins after every other finder has failed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname.partition(".")[0] not in PACKAGES or _is_availability_probe():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> PlaceholderModule:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.append(PlaceholderFinder())


class NoRuntime:
    """A stand-in for CUDA's runtime. It reports that it has locked pages without doing so, which only a GPU needs."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("cudaHostRegister", "cudaHostUnregister"):
            raise AttributeError(name)
        return lambda *_: 0


if os.environ.get("SGLANG_CPU_LOCKS_NO_PAGES") == "1":
    import torch

    torch.cuda.cudart = NoRuntime
