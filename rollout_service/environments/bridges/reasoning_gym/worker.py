"""The program that runs reasoning-gym: makes tasks on the host, and scores answers in a sandbox.

It uses the standard library and reasoning-gym alone. Requests and replies are lines of JSON: `{"op": "generate",
"task", "seed", "size", "config"}` and `{"op": "score", ..., "index", "question", "answer"}`. A score is preceded by a
line `{"ready": true}`: a failure before it is the library's, one after it the answer's.

Guarantee: of an answer that the library would evaluate as Python, only literals and arithmetic are executed. Other code
could read the right answer, or claim a score; it scores like an answer that cannot be read.
"""

import ast
import importlib
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]

CALCULATED = {
    *("countdown", "puzzle24", "polynomial_multiplication"),
    *("simple_integration", "intermediate_integration"),
}
"""sympy's parser evaluates their answers."""
EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""The library evaluates their answers as Python, in the scope of its scorer."""
FUNCTIONS = {
    *("sqrt", "exp", "log", "ln", "abs", "Abs", "pi"),
    *(f"{prefix}{name}" for prefix in ("", "a", "arc") for name in ("sin", "cos", "tan", "sec", "csc", "cot")),
    *(f"{prefix}{name}" for prefix in ("", "a") for name in ("sinh", "cosh", "tanh")),
}
UNREADABLE = "?"
"""Scored in place of a refused answer."""
_CALCULATION = re.compile(r"[A-Za-z0-9\s+\-*/^().,_]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_WORD = re.compile(r"[A-Z_]+")
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that the library prints becomes a reply

    def send(reply: Reply) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    for line in sys.stdin:
        request = json.loads(line)
        try:
            send(generate(request) if request["op"] == "generate" else score(request, send))
        except Exception as error:  # noqa: BLE001 - whatever the library raises is reported
            send({"error": f"{type(error).__name__}: {error}"})


def generate(request: Request) -> Reply:
    """Return a task's entries and module; without a task, the names of all tasks."""
    factory = importlib.import_module("reasoning_gym").factory
    if "task" not in request:
        return {"tasks": sorted(name for name in factory.DATASETS if name != "composite")}
    dataset = make_dataset(factory, request)
    entries = [{"question": entry["question"], "answer": entry["answer"]} for entry in dataset]
    return {"entries": entries, "module": type(dataset).__module__}


def score(request: Request, send: Callable[[Reply], None]) -> Reply:
    import_alone(request["module"])
    dataset = make_dataset(sys.modules["reasoning_gym.factory"], request)
    # Made anew, since JSON changes an entry: its tuples become lists, and then some gold answers score nothing.
    entry = dataset[request["index"]]
    if entry["question"] != request["question"]:
        raise ValueError("the task was made by another version of the library, or was changed")
    if entry["answer"] is not None:
        check_number(dataset.score_answer(entry["answer"], entry))
    send({"ready": True})
    answer = request["answer"]
    refused = {} if is_harmless(request["task"], answer) else {"refused": True}
    try:
        return {
            "score": check_number(dataset.score_answer(UNREADABLE if refused else answer, entry)),
            **refused,
        }
    except Exception as error:  # noqa: BLE001 - the answer made the library raise it
        return {"score": 0.0, "raised": f"{type(error).__name__}: {error}"[:200]}


def make_dataset(factory: Any, request: Request) -> Any:
    options = {"seed": request["seed"], "size": request["size"], **request["config"]}
    return factory.create_dataset(request["task"], **options)


def import_alone(module: str) -> None:
    """Leave out the modules of other tasks, which takes seconds less."""
    names = module.split(".")
    if names[0] != "reasoning_gym" or not all(name.isidentifier() for name in names):
        raise ValueError(f"{module} is not a module of reasoning-gym")
    if names[0] not in sys.modules:
        folder = next(path for path in map(Path, sys.path) if (path / names[0]).is_dir())
        for depth in range(1, len(names)):
            package = types.ModuleType(".".join(names[:depth]))
            package.__path__ = [str(folder.joinpath(*names[:depth]))]
            sys.modules[package.__name__] = package
    try:
        importlib.import_module(module)
    except ImportError:  # it wants names of the packages themselves
        for name in [name for name in sys.modules if name.split(".")[0] == names[0]]:
            del sys.modules[name]
        importlib.import_module(names[0])
        importlib.import_module(module)


def check_number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the score is {number}")
    return number


def is_harmless(task: str, answer: str) -> bool:
    """Return whether the library would execute only literals and arithmetic."""
    if task in CALCULATED:
        names = _NAME.findall(answer)
        return bool(_CALCULATION.fullmatch(answer)) and all(len(name) == 1 or name in FUNCTIONS for name in names)
    if task in EVALUATED:
        try:
            tree = ast.parse(answer.lstrip(" \t"), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return True  # Python will not evaluate it either
        if isinstance(tree.body, ast.Name):
            return bool(_PLAIN_WORD.fullmatch(tree.body.id))
        return all(isinstance(node, _LITERAL) for node in ast.walk(tree))
    return True


def fix_hashes() -> None:
    """Start again with fixed hashes: some tasks depend on the order of sets too."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        # Isolation (-I) would ignore the variable; what remains of it is to see no user's and no folder's modules.
        arguments = ["-sP" if argument == "-I" else argument for argument in sys.orig_argv[1:]]
        os.execve(sys.executable, [sys.executable, *arguments], {**clean, "PYTHONHASHSEED": "0"})  # noqa: S606


if __name__ == "__main__":
    fix_hashes()
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
    main()
