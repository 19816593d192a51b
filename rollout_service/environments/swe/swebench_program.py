"""The program that reads a log of tests with swebench, in that package's own environment, without importing this
project.

A JSON object goes to standard input, and one comes from standard output. The verdict is that of swebench's own
functions.
"""

import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may become the answer
    json.dump(grade(request), answers)
    answers.close()


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Return statuses of tests, and swebench's report.

    The request has the fields of `swebench.types.TestSpec`, and `log`, the output of the evaluation.
    """
    _import_only_what_grades()
    from swebench.harness.grading import get_eval_report, get_logs_eval
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.types import TestSpec

    log = request.pop("log")
    if request["log_parser"] not in PARSER_REGISTRY:
        return {"unknown_parser": sorted(PARSER_REGISTRY)}
    spec = TestSpec(**request, image="", eval_script_list=[])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.txt")
        path.write_text(log, encoding="utf-8")
        prediction = {
            "instance_id": spec.instance_id,
            "model_patch": "a patch",
            "model_name_or_path": "agent",
        }
        report = get_eval_report(spec, prediction, str(path), include_tests_status=True)[spec.instance_id]
        statuses, found = get_logs_eval(spec, str(path))
    return {"statuses": statuses, "found": found, "report": report}


def _import_only_what_grades() -> None:
    """Keep the harness from importing docker, modal and datasets, which grading does not use."""
    found = importlib.util.find_spec("swebench")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("swebench is not installed here")
    harness = types.ModuleType("swebench.harness")
    harness.__path__ = [str(Path(found.origin).parent / "harness")]
    sys.modules["swebench.harness"] = harness


if __name__ == "__main__":
    main()
