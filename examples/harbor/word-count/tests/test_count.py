"""Checks the count, and writes a report in the form of pytest-json-ctrf."""

import json
import pathlib
import sys

answer = pathlib.Path("/app/count.txt")
passed = answer.is_file() and answer.read_text(errors="replace").strip() == "5"
test = {"name": "test_count", "status": "passed" if passed else "failed"}
report = {"results": {"tests": [test]}}
pathlib.Path("/logs/verifier/ctrf.json").write_text(json.dumps(report))
sys.exit(not passed)
