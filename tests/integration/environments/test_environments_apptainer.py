"""In real sandboxes, environments score honest agents correctly, and hostile agents gain nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_service.base.errors import ConfigurationError
from rollout_service.cli import app
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.declarative.from_image import extract_environment
from rollout_service.environments.registry import load_path
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes.images.sources import Definition
from sandboxes.images.store import ImageStore

pytestmark = pytest.mark.apptainer
WORDCOUNT = Path(__file__).parents[3] / "examples" / "environments" / "wordcount"


def bash(command):
    return turn("", call("bash", command=command))


def test_the_check_of_a_good_environment_has_no_findings(tmp_path):
    (tmp_path / "environment.toml").write_text(
        'name = "mine"\nimage = "base"\n[evaluate]\ncommand = "true"\n[dataset]\npath = "tasks.jsonl"\n'
    )
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n')
    result = CliRunner().invoke(app, ["env", "check", str(tmp_path)])
    assert result.stdout.endswith("1 instance\nnothing is wrong\n"), result.stdout
    assert result.exit_code == 0


def shop(folder):
    """Write the environment of the page on `environment.toml` that has a database, as it stands there."""
    page = (WORDCOUNT.parents[2] / "docs/how-to/write-an-environment.md").read_text()
    section = page.partition("## Start a database or a server")[2].partition("\n## ")[0]
    files = re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    for name, text in zip(("environment.toml", "start.sh", "database.py", "grade.py"), files, strict=True):
        (folder / name).write_text(text)
    (folder / "tasks.jsonl").write_text('{"order": 2}\n')
    return load_folder(folder)


CANCEL = """
import urllib.request
sql = b"UPDATE orders SET state = 'cancelled' WHERE id = 2"
urllib.request.urlopen("http://127.0.0.1:8123", data=sql)
"""


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (CANCEL, 1.0),
        (CANCEL.replace("= 2", "> 1"), 0.0),
        (CANCEL + "import os; os.system('pkill -f database.py')", 0.0),
    ],
    ids=["right", "wrong", "ends the database"],
)
async def test_a_database_that_init_started_lives_for_the_agent_and_the_grader(code, reward, sandboxes, tmp_path):
    (tmp_path / "shop").mkdir()
    policy = ScriptedPolicy([turn("", call("python", code=code)), "Done."])
    environment = shop(tmp_path / "shop")
    trial = await play(environment, environment.dataset()[0], policy, sandboxes)
    assert trial.score.reward == reward, policy.messages


async def test_code_that_fights_its_limits(sandboxes):
    program = "\n".join(
        [
            "import os, sys",
            "mode = sys.stdin.read()",
            "if mode == 'memory': x = bytearray(8 * 2**30)",
            "if mode == 'cpu':\n while True: pass",
            "if mode == 'forks':\n while True: os.fork()",
            "print('ok')",
        ]
    )
    tests = [{"input": mode, "output": "ok"} for mode in ("", "memory", "cpu", "forks", "again")]
    task = {"question": "?", "kind": "stdio", "tests": tests, "time_limit": 1}
    submit = turn("", call("write", path="solution.py", content=program))
    trial = await play(code.environment, task, ScriptedPolicy([submit, "Done."]), sandboxes)
    assert trial.score.reward == 0.0
    assert trial.score.parts["tests_passed"] <= 2 / 5


async def test_the_example_of_the_documentation(sandboxes):
    env = load_folder(WORDCOUNT)
    count = "grep -ow sea text.txt | wc -l > /workspace/count.txt; cat text.txt; ls -A /environment /tmp"
    policy = ScriptedPolicy([bash(count), turn("", call("finish"))])
    trial = await play(env, env.dataset()[0], policy, sandboxes)
    assert (trial.score.reward, trial.score.parts) == (1.0, {"answered": 1.0})
    assert policy.messages[3].content.endswith("/environment:\n\n/tmp:")  # both empty


async def test_no_process_of_the_agent_is_alive_while_the_grader_runs(tmp_path, sandboxes):
    (tmp_path / "environment.toml").write_text(
        'name = "e"\nimage = "base"\nprompt = "Do it."\ntools = ["bash", "python"]\n'
        '[evaluate]\ncommand = "bash /environment/evaluate"\nsandbox = "same"\n'
    )
    (tmp_path / "evaluate").write_text(
        """
        sleep 0.5
        test "$(cat /workspace/made)" = yes || exit 3
        test -e "$ROLLOUT_RESULT" && exit 4
        alive=$(grep -l LURKING /proc/[0-9]*/environ 2>/dev/null | wc -l)
        echo "{\\"reward\\": $alive}" > "$ROLLOUT_RESULT"
        """
    )
    forge = 'while :; do for f in /tmp/.rollout-*/; do echo "{\\"reward\\": 7}" > $f/result.json; done; done'
    script = [
        bash(f"export LURKING=1; setsid bash -c '{forge}' >/dev/null 2>&1 & echo yes > made; trap '' TERM"),
        turn("", call("python", code="import os, time\nif os.fork() == 0:\n os.setsid(); time.sleep(600)")),
        "Done.",
    ]
    env = load_folder(tmp_path)
    trial = await play(env, {}, ScriptedPolicy(script), sandboxes)
    assert trial.score.reward == 0.0


async def test_an_environment_that_its_image_holds_is_hidden(sandboxes):
    env = load_folder(WORDCOUNT, image=ImageStore().resolve("base").resolve())
    count = "grep -ow sea text.txt | wc -l > count.txt; ls -A /environment; touch /environment/evaluate"
    policy = ScriptedPolicy([bash(count), turn("", call("finish"))])
    trial = await play(env, env.dataset()[0], policy, sandboxes)
    assert trial.score.reward == 1.0
    assert policy.messages[3].content.startswith("touch: ")  # the folder shows nothing and is read-only


def test_an_environment_is_taken_out_of_its_image(tmp_path):
    image = tiny_image(tmp_path, WORDCOUNT)
    folder = extract_environment(image, tmp_path / "cache")
    env = load_folder(folder, image=image)
    assert (env.spec.name, env.spec.image) == ("wordcount", str(image))
    assert os.access(folder / "evaluate", os.X_OK)
    assert extract_environment(image, tmp_path / "cache") == folder


def test_an_image_without_an_environment_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="has no /environment"):
        extract_environment(tiny_image(tmp_path), tmp_path / "cache")


def test_errors_in_an_image_are_named_by_their_path_inside(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "environment.toml").write_text(
        'name = "e"\n[evaluate]\ncommand = "true"\n[dataset]\npath = "none.jsonl"\n'
    )
    image = tiny_image(tmp_path, broken)
    with pytest.raises(ConfigurationError) as caught:
        load_path(image)
    assert f"{image}:/environment/none.jsonl is not a file" in str(caught.value)
    assert str(tmp_path / "cache") not in str(caught.value)
    monkeypatch.undo()
    base = ImageStore().resolve("base").resolve()
    with pytest.raises(ConfigurationError, match=f"the image {base} has no /environment") as caught:
        load_path(base)
    assert caught.value.hint


def test_an_environment_of_an_unpacked_image_is_copied_without_special_files(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(WORDCOUNT, tree / "environment")
    (tree / "environment" / "again.toml").symlink_to("/environment/environment.toml")
    os.mkfifo(tree / "environment" / "pipe")
    folder = extract_environment(tree, tmp_path / "cache")
    assert (folder / "again.toml").read_bytes() == (WORDCOUNT / "environment.toml").read_bytes()
    assert not (folder / "pipe").exists()


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../etc/hostname", "missing", "."])
def test_a_link_out_of_an_environment_is_refused(tmp_path, target):
    tree = tmp_path / "tree"
    shutil.copytree(WORDCOUNT, tree / "environment")
    (tree / "environment" / "stolen").symlink_to(target)
    with pytest.raises(ConfigurationError, match="/environment/stolen is a link"):
        extract_environment(tree, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_invalid_image_is_named(tmp_path):
    (tmp_path / "fake.sif").write_text("not an image")
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        extract_environment(tmp_path / "fake.sif", tmp_path / "cache")
    assert caught.value.hint


def tiny_image(folder, environment=None):
    """Build an image with bash, tar and optionally an environment: 5 MB."""
    root = folder / "tree"
    programs = [Path(shutil.which(name)).resolve() for name in ("bash", "tar")]
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for source in {*map(str, programs), *re.findall(r"(/\S+) \(0x", linked)}:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (root / "bin").mkdir(exist_ok=True)
    for name, program in (("sh", programs[0]), ("bash", programs[0]), ("tar", programs[1])):
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to(program)
    if environment is not None:
        shutil.copytree(environment, root / "environment")
    definition = folder / "tiny.def"
    definition.write_text(
        'Bootstrap: scratch\n%setup\n    rm -f "$APPTAINER_ROOTFS/environment"\n'
        f'    cp -a "{root}/." "$APPTAINER_ROOTFS/"\n'
    )
    store = ImageStore(folder / "images")
    store.provide(Definition(definition), "tiny")
    return store.resolve("tiny").resolve()
