"""An author's mistakes get a message that names the file, the line or the key, and a hint that says what to do."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app

TOML = """\
name = "sums"
image = "base"
prompt = "What is {{ instance.question }}?"

[evaluate]
command = "/environment/grade.sh"

[dataset]
path = "tasks.jsonl"
"""
DECLARED = {
    "environment.toml": TOML,
    "tasks.jsonl": '{"question": "1 + 1"}\n',
    "grade.sh": "#!/bin/bash\necho '{\"reward\": 1}' >/result/result.json\n",
}
CODE = """\
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.episodes import Score

class Sums(Environment):
    spec = EnvironmentSpec(name="sums")
    async def run(self, episode): ...
    async def evaluate(self, episode): return Score(1.0)
"""
TASK = {
    "task.toml": 'schema_version = "1.4"\n[environment]\ndocker_image = "base"\n',
    "instruction.md": "Add the numbers.\n",
    "tests/test.sh": "#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n",
}


def declared(old: str, new: str) -> dict[str, str]:
    """Return the files of the declared environment, with one text of its TOML file replaced."""
    assert old in TOML
    return DECLARED | {"environment.toml": TOML.replace(old, new)}


def coded(old: str, new: str) -> dict[str, str]:
    """Return the file of the environment in Python, with one text replaced."""
    assert old in CODE
    return {"sums.py": CODE.replace(old, new)}


# A mistake: the files, and what `env check` names and advises, in parts.
MISTAKES = {
    "a quote is missing": (
        declared('"base"', '"base'),
        "{at}/environment.toml is not valid TOML | at line 2 | texts and dates need quotes at both ends",
    ),
    "a key is misspelled": (
        declared("prompt =", "promt ="),
        "{at}/environment.toml: there is no key promt; did you mean prompt? | The file takes dataset,",
    ),
    "a table is missing": (
        {"environment.toml": 'name = "sums"\nimage = "base"\n'},
        "{at}/environment.toml: the key evaluate is missing | [evaluate] and below it: command = ",
    ),
    "a number is a text": (
        declared("[evaluate]", '[limits]\nmax_turns = "many"\n[evaluate]'),
        "{at}/environment.toml: limits.max_turns: Input should be a valid integer | environment-toml.md says",
    ),
    "a key of a secret is misspelled": (
        declared('grade.sh"', 'grade.sh"\nsecrets = {TOKEN = {variabel = "T"}}'),
        "{at}/environment.toml: there is no key evaluate.secrets.TOKEN.variabel; did you mean variable?",
    ),
    "the source of a secret is no table": (
        declared('grade.sh"', 'grade.sh"\nsecrets = {TOKEN = "T"}'),
        '{at}/environment.toml: evaluate.secrets.TOKEN:  | name where the host has it: { variable = "NAME" }',
    ),
    "a grader with a secret works where the agent did": (
        declared('grade.sh"', 'grade.sh"\nsandbox = "same"\nsecrets = {TOKEN = {variable = "T"}}'),
        '{at}/environment.toml: evaluate:  | `secrets` need sandbox = "fresh" | start a server of its own',
    ),
    "the name has a space": (
        declared('"sums"', '"my sums"'),
        "{at}/environment.toml: name: String should match pattern | environment-toml.md says what each key takes",
    ),
    "a tool is misspelled": (
        declared("[evaluate]", 'tools = ["bsh"]\n[evaluate]'),
        "{at}/environment.toml: environment 'sums': there is no built-in tool 'bsh'; did you mean bash?",
    ),
    "the prompt uses an unknown variable": (
        declared("instance.question", "question"),
        "{at}/environment.toml: the prompt of 'sums' uses question | Write {{ instance.NAME }} for a field",
    ),
    "the prompt is not closed": (
        declared("question }}", "question"),
        "{at}/environment.toml: the prompt of 'sums', line 1 is not a valid template | close every {{ and {%",
    ),
    "an instance lacks a field of the prompt": (
        declared("instance.question", "instance.sum"),
        "data set, instance 1: instance.sum: is missing, and the prompt of 'sums' uses it",
    ),
    "the grader is elsewhere": (
        declared("grade.sh", "grades.sh"),
        "[evaluate] command: /environment/grades.sh does not exist: the folder has no file grades.sh",
    ),
    "the grader has Windows line endings": (
        DECLARED | {"grade.sh": "#!/bin/bash\r\ntrue\r\n"},
        "[evaluate] command: /environment/grade.sh has Windows line endings | convert them",
    ),
    "the init command is not there": (
        declared("[evaluate]", '[init]\ncommand = "/environment/init.sh"\n[evaluate]'),
        "{at}/environment.toml | the init command needs init.sh | correct `command` or `files` in [init]",
    ),
    "an artifact is relative": (
        declared("[dataset]", 'artifacts = ["workspace"]\n[dataset]'),
        "{at}/environment.toml | the artifact 'workspace' is not an absolute path | such as \"/workspace\"",
    ),
    "the image file is not there": (
        declared('"base"', '"own.sif"'),
        "{at}/environment.toml: there is no image {at}/own.sif | Build it with `rollout-service image build`",
    ),
    "the data set is elsewhere": (
        declared("tasks.jsonl", "task.jsonl"),
        "the data set {at}/task.jsonl cannot be read | Correct `path` or `splits` of [dataset]",
    ),
    "a line of the data set is cut off": (
        DECLARED | {"tasks.jsonl": '{"question": "1 + 1"}\n{"question":\n'},
        "{at}/tasks.jsonl:2: not JSON | Each line is one instance, a JSON object",
    ),
    "a line contradicts the split of its file": (
        declared('path = "tasks.jsonl"', 'splits = {train = "tasks.jsonl"}')
        | {"tasks.jsonl": '{"question": "1", "split": "test"}\n'},
        "{at}/tasks.jsonl:1 says that its split is 'test' | Leave the key `split` out of the line",
    ),
    "Python code has a syntax error": (
        {"sums.py": CODE + "def (\n"},
        "{at}/sums.py cannot be loaded: SyntaxError | (sums.py, line 8) | Correct the code at that line",
    ),
    "Python code imports what is not installed": (
        {"sums.py": "import nosuchpackage\n" + CODE},
        "No module named 'nosuchpackage' ({at}/sums.py, line 1) | Correct the name, or install nosuchpackage",
    ),
    "Python code ends the process": (
        {"sums.py": CODE + "raise SystemExit(0)\n"},
        "{at}/sums.py cannot be loaded: SystemExit: 0 ({at}/sums.py, line 8) | Correct the code at that line",
    ),
    "a method is misspelled": (
        coded("evaluate", "evalute"),
        "{at}/sums.py: its class Sums has no evaluate | Define it with `async def`",
    ),
    "a method is not a coroutine": (
        coded("async def evaluate", "def evaluate"),
        "{at}/sums.py, line 7: evaluate is not a coroutine; write `async def evaluate`",
    ),
    "there is no spec": (
        coded("spec =", "specs ="),
        "{at}/sums.py: Sums has no `spec` | Give the class one, such as `spec = EnvironmentSpec(",
    ),
    "the spec has an unknown field": (
        coded('"sums")', '"sums", tool=["bash"])'),
        "EnvironmentSpec: tool: unknown field; did you mean tools? ({at}/sums.py, line 5)",
    ),
    "the class takes arguments": (
        {"sums.py": CODE + "    def __init__(self, path): ...\n"},
        "{at}/sums.py cannot be loaded | argument: 'path' | an environment is made without arguments",
    ),
    "dataset() gives a number": (
        {"sums.py": CODE + "    def dataset(self): return [{}, 2]\n"},
        "sums: dataset(): instance 2 is 2 | Return a list of dicts",
    ),
    "check() fails": (
        {"sums.py": CODE + "    def dataset(self): return [{}]\n    def check(self, instance): instance['a']\n"},
        "data set, instance 1: check() failed with KeyError: 'a' ({at}/sums.py, line 9); raise InvalidFieldError",
    ),
    "a key of a task in Harbor's format is misspelled": (
        TASK | {"task.toml": TASK["task.toml"] + "memry_mb = 3\n"},
        "{at}/task.toml: environment.memry_mb: unknown field; did you mean memory_mb? | Harbor's task.toml",
    ),
    "an instruction is empty": (
        TASK | {"instruction.md": "\n"},
        "instruction.md: it is empty; write what the agent has to do",
    ),
    "a task has no image": (
        TASK | {"task.toml": 'schema_version = "1.4"\n'},
        "{at}: the task has neither environment/Dockerfile nor environment.docker_image | Write the Dockerfile",
    ),
}
# The same of other commands, which are written as they are typed.
MISTAKES_IN_COMMANDS = {
    "the named class is not there": (
        {"sums.py": CODE},
        "env check {at}/sums.py:Sum",
        "{at}/sums.py:Sum: it defines no Sum; did you mean Sums? | Name an environment of the file",
    ),
    "the named file is not there": (
        {"sums.py": CODE},
        "env check {at}/sum.py:Sums",
        "{at}/sum.py:Sums: there is no such file | Correct its name",
    ),
    "dataset() fails": (
        {"sums.py": CODE + "    def dataset(self): return open('/nowhere')\n"},
        "env audit {at}/sums.py",
        "sums: dataset() failed: FileNotFoundError | ({at}/sums.py, line 8) | Correct the code at that line",
    ),
    "the instance is not JSON": (
        DECLARED,
        "env run {at} --instance question=1",
        '--instance is not valid JSON | For example: --instance \'{"question": "1+1"}\'',
    ),
    "a turn of the script is not JSON": (
        DECLARED,
        "env run {at} --script {at}/grade.sh",
        '{at}/grade.sh, line 1: not valid JSON | Write one turn per line, such as {"content": "42"}',
    ),
    "the script is not there": (
        DECLARED,
        "env run {at} --script {at}/solution.jsonl",
        "{at}/solution.jsonl cannot be read: No such file | Correct the path",
    ),
    "an attack is misspelled": (
        DECLARED,
        "env attack {at} --only fork-bom",
        "there is no attack 'fork-bom'; did you mean fork-bomb? | Leave --only out to run all",
    ),
    "a shell is opened without a terminal": (
        DECLARED,
        "env shell {at}",
        "the standard input and output must be a terminal | Run it in a terminal",
    ),
}


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        path.chmod(0o755)


@pytest.mark.parametrize("mistake", [*MISTAKES, *MISTAKES_IN_COMMANDS])
def test_a_mistake_is_named_with_its_place_and_what_to_do(mistake, tmp_path):
    if mistake in MISTAKES:
        files, said = MISTAKES[mistake]
        command = "env check {at}/sums.py" if "sums.py" in files else "env check {at}"
    else:
        files, command, said = MISTAKES_IN_COMMANDS[mistake]
    write(files, tmp_path)
    result = CliRunner().invoke(app, [part.replace("{at}", str(tmp_path)) for part in shlex.split(command)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    for text in said.split(" | "):
        assert text.replace("{at}", str(tmp_path)) in result.output


@pytest.mark.parametrize("files", [DECLARED, {"sums.py": CODE}, TASK], ids=["declared", "coded", "harbor"])
def test_the_files_without_a_mistake_have_no_finding(files, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(tmp_path))
    (tmp_path / "base.sif").touch()
    write(files, tmp_path / "sums")
    place = tmp_path / "sums" / ("sums.py" if "sums.py" in files else "")
    report = json.loads(CliRunner().invoke(app, ["env", "check", str(place), "--json"]).stdout)
    assert [finding for finding in report["findings"] if not finding.startswith("image: ")] == []
