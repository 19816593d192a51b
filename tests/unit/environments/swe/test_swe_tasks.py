"""Instances of each set are read with the set's own conventions, and bad ones are rejected by the path of a field."""

import json
import os
import subprocess

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.swe.environment import SweDeclaration, SweEnvironment, environment
from rollout_service.environments.swe.grading import judge_log
from rollout_service.environments.swe.patches import changed_paths, separate_forbidden, split_patch
from rollout_service.environments.swe.scripts import END, START, make_script, plant_canary
from rollout_service.environments.swe.tasks import SweFamily, read_task

BASE = "0123456789abcdef0123456789abcdef01234567"
TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n"
    "@@ -1 +1 @@\n-a\n+b\n"
    "diff --git a/tests/data.json b/tests/data.json\nnew file mode 100644\n--- /dev/null\n+++ b/tests/data.json\n"
    "@@ -0,0 +1 @@\n+{}\n"
)
VERIFIED = {
    "instance_id": "django__django-11099",
    "repo": "django/django",
    "version": "3.0",
    "base_commit": BASE,
    "problem_statement": "It fails.",
    "patch": "diff --git a/x.py b/x.py\n",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["test_one (a.B)"]',
    "PASS_TO_PASS": "[]",
    "eval_script": f"#!/bin/bash\n: '{START}'\n./tests/runtests.py a\n: '{END}'\n",
    "log_parser": "parse_log_django",
}
R2E = {
    "repo_name": "pandas",
    "commit_hash": BASE,
    "docker_image": "namanjain12/pandas_final:abc",
    "problem_statement": "It fails.",
    "expected_output_json": json.dumps({"TestA.test_b - note": "PASSED"}),
}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "It fails.",
    "patch": "diff --git a/x.py b/x.py\n",
    "FAIL_TO_PASS": ["tests/test_x.py::test_a"],
    "PASS_TO_PASS": ["tests/test_y.py::test_b"],
}
REBENCH = VERIFIED | {
    "instance_id": "owner__name-7",
    "eval_script": None,
    "log_parser": None,
    "install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "python": "3.9"},
}


def test_swe_bench():
    task = read_task(VERIFIED)
    assert task.family is SweFamily.SWE_BENCH
    assert task.image == "docker://swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert task.fail_to_pass == ("test_one (a.B)",)
    assert task.pass_to_pass == ()
    assert task.tests == {"tests/test_a.py", "tests/data.json"}
    assert task.script == VERIFIED["eval_script"]
    assert (task.base_commit, task.reverse_gold) == (BASE, False)


def test_swe_gym_differs_in_its_images():
    task = read_task(VERIFIED, SweFamily.SWE_GYM)
    assert task.image == "docker://xingyaoww/sweb.eval.x86_64.django_s_django-11099:latest"


def test_swe_rebench_brings_its_command():
    task = read_task(REBENCH)
    assert (task.family, task.log_parser) == (SweFamily.SWE_REBENCH, "parse_log_pytest")
    assert task.image == "docker://swerebench/sweb.eval.x86_64.owner_1776_name-7:latest"
    lines = task.script.splitlines()
    assert "pytest -rA tests/test_a.py" in lines  # without the data file
    assert lines.count(f"git checkout {BASE} tests/test_a.py") == 2  # the new file is not in the base commit
    assert read_task(REBENCH) == task  # a task is proven once, so its script must not change


def test_swe_smith_has_the_bug_as_its_patch():
    task = read_task(SMITH)
    assert (task.family, task.reverse_gold, task.branch) == (SweFamily.SWE_SMITH, True, SMITH["instance_id"])
    assert task.bug == task.gold == SMITH["patch"].encode()
    assert task.image == "docker://swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"
    assert task.tests == {"tests/test_x.py", "tests/test_y.py"}


def test_r2e_gym_compares_every_status():
    task = read_task(R2E)
    assert task.family is SweFamily.R2E_GYM
    assert task.expected == {"TestA.test_b": "PASSED"}
    assert task.image == "docker://namanjain12/pandas_final:abc"
    assert "/testbed/run_tests.sh" in task.hidden


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"instance_id": ""}, "instance.instance_id"),
        ({"FAIL_TO_PASS": "[]"}, "instance.FAIL_TO_PASS"),
        ({"log_parser": ""}, "instance.log_parser"),
        ({"eval_script": ""}, "instance.eval_script"),
        ({"base_commit": "main; rm -rf /"}, "instance.base_commit"),
        ({"repo_folder": "/testbed; true"}, "instance.repo_folder"),
        ({"FAIL_TO_PASS": "[broken"}, "instance.FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "instance.FAIL_TO_PASS"),
        ({"problem_statement": None}, "instance.problem_statement"),
        ({"image": "/etc/passwd"}, "instance.image"),
        ({"image": "images/../../x.sif"}, "instance.image"),
        ({"docker_image": "oci-archive:/etc/x"}, "instance.docker_image"),
        ({"image_name": "~/x"}, "instance.image_name"),
        ({"instance_id": "../../etc"}, "instance.instance_id"),
    ],
)
def test_a_bad_field_is_named(changes, path):
    with pytest.raises(InvalidFieldError) as caught:
        environment().check(VERIFIED | changes)
    assert path in [field.path for field in caught.value.fields]


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ instance.own }}", "/"),
        ("{{ instance.own }}", "/etc"),
        ("{{ instance.own }}", "~/"),
        ("{{ instance.own }}", "x.sif"),
        ("{{ instance.own }}", "oci-archive:/etc/x.tar"),
        ("{{ instance.own }}/x", "/etc"),
        ("/{{ instance.own }}", "etc"),
        ("oci:{{ instance.own }}", "/etc"),
        ("{# here #}/{{ instance.own }}", "etc"),
        ("/images/{{ instance.own }}", "../etc"),
        ("/images/swe-{{ instance.own }}.sif", "/../../etc/x"),
    ],
)
def test_no_value_of_an_instance_makes_a_template_a_path_of_the_host(template, value):
    instance = VERIFIED | {"own": value}
    mine = SweEnvironment(SweDeclaration(name="mine", image=template))
    for call in (mine.check, mine.for_instance):
        with pytest.raises(InvalidFieldError, match="that no instance may name") as caught:
            call(instance)
        assert [field.path for field in caught.value.fields] == ["instance"]
        assert "only what an administrator writes may name paths" in caught.value.hint


@pytest.mark.parametrize(
    ("template", "image"),
    [
        ("swe-{{ instance.version }}", "swe-1.0"),
        ("/images/{{ instance.version }}.sif", "/images/1.0.sif"),
        ("/images/one.sif", "/images/one.sif"),
        ("me/swe:{{ instance.version }}", "docker://me/swe:1.0"),
        ("docker://me/swe:{{ instance.version }}", "docker://me/swe:1.0"),
    ],
)
def test_a_template_names_images_of_names_registries_and_its_own_folder(template, image):
    mine = SweEnvironment(SweDeclaration(name="mine", image=template))
    # An id that could not be part of a published image does not matter then.
    instance = VERIFIED | {"version": "1.0", "instance_id": "one of ours"}
    mine.check(instance)
    assert mine.for_instance(instance).spec.image == image


def test_each_task_has_its_own_image():
    general = environment()
    assert general.spec.image is None
    assert [tool["function"]["name"] for tool in general.tool_definitions()] == [
        *("bash", "python", "str_replace_editor", "finish")
    ]
    specific = general.for_instance(VERIFIED | {"image": "swe-local"})
    assert specific.spec.image == "swe-local"
    assert "It fails." in specific.messages(VERIFIED)[-1].content


def test_tests_of_r2e_gym_are_linked_into_the_repository_before_the_canary_is_there():
    r2e = task({"test_a": "PASSED"})
    lines = plant_canary(r2e.script, r2e.tests, r2e.folder).text.splitlines()
    linked = lines.index("[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests")
    [planted] = [number for number, line in enumerate(lines) if line.startswith("mkdir -p /testbed/r2e_tests")]
    assert lines.index("cd /testbed") < linked < planted < lines.index("bash run_tests.sh")


def test_the_script_of_r2e_gym_runs_its_canary_with_the_tests():
    r2e = task({"test_a": "PASSED"})
    made = plant_canary(r2e.script, r2e.tests, r2e.folder)
    assert made.text == made.control
    assert f"/testbed/r2e_tests/test_{made.canary}.py" in made.text


EXPECTED = {"TestA.test_b": "PASSED", "test_c[x - y]": "FAILED"}
LOG = """\
PASSED earlier/than.py::the_summary
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::TestA::test_b
FAILED r2e_tests/test_2.py::test_c[x - y] - assert 1 == 2
FAILED r2e_tests/test_abc123.py::test_abc123 - assert 3 == 4
"""


def task(expected):
    fields = {"docker_image": "a/b:c", "problem_statement": "p", "expected_output_json": json.dumps(expected)}
    return read_task({"instance_id": "i", **fields})


async def test_all_statuses_must_be_as_expected():
    verdict = await judge_log(task(EXPECTED), LOG, "abc123")
    assert (verdict.resolved, verdict.ran, verdict.fail_to_pass) == (True, True, 1.0)
    assert [status for name, status in verdict.statuses.items() if "abc123" in name] == ["FAILED"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("SKIPPED [1] r2e_tests/test_1.py:20: needs a display", EXPECTED),
        ("XFAIL r2e_tests/test_1.py::test_d - known", EXPECTED),
        ("XPASS r2e_tests/test_1.py::test_d", EXPECTED),
        ("ERROR r2e_tests/test_3.py - ImportError", EXPECTED | {"": "ERROR"}),
        ("PASSED r2e_tests/test_1.py::\x1b[1mtest_d\x1b[0m", EXPECTED | {"\x1b[1mtest_d\x1b[0m": "PASSED"}),
    ],
)
async def test_statuses_are_those_that_r2e_gym_notes(more, expected):
    assert (await judge_log(task(expected), f"{LOG}{more}\n", "abc123")).resolved


@pytest.mark.parametrize(
    ("log", "share"),
    [
        (LOG.replace("FAILED r2e_tests/test_2", "PASSED r2e_tests/test_2"), 0.5),
        (LOG + "PASSED r2e_tests/test_3.py::test_more\n", 1.0),
        (LOG + "ERROR r2e_tests/test_3.py - ImportError\n", 1.0),
        (LOG.replace("FAILED r2e_tests/test_2.py", "x"), 0.5),
        ("PASSED r2e_tests/test_1.py::TestA::test_b\n", 0.0),
        ("", 0.0),
    ],
)
async def test_another_status_a_missing_test_and_one_too_many_are_wrong(log, share):
    verdict = await judge_log(task(EXPECTED), log, "abc123")
    assert (verdict.resolved, verdict.fail_to_pass) == (False, share)


async def test_a_long_log_does_not_hold_up_the_event_loop():
    log = "short test summary info\n" + "".join(f"PASSED a::{number}\n" for number in range(50_000))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        verdict = await judge_log(task(EXPECTED), log)
        tasks.cancel_scope.cancel()
    assert len(verdict.statuses) == 50_000
    assert turns > 3


TESTS = {"tests/test_a.py", "tests/sub/test_b.py"}


def script(command):
    return f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\n{command}\n: '{END}'\ngit checkout x\n"


def command(text, word):
    return next(line for line in text.splitlines() if word in line and "printf" not in line)


@pytest.mark.parametrize(
    ("line", "planted", "alone"),
    [
        ("pytest -rA tests/test_a.py", "pytest -rA tests/test_a.py {}", "pytest -rA {}"),
        (
            "python -m pytest -rA tests/test_a.py::test_x",
            "python -m pytest -rA tests/test_a.py::test_x {}",
            "python -m pytest -rA {}",
        ),
        ("pytest tests/test_a.py | tee log", "pytest tests/test_a.py {} | tee log", "pytest {} | tee log"),
        ("tox -epy39 -v -- tests/test_a.py", "tox -epy39 -v -- tests/test_a.py {}", "tox -epy39 -v -- {}"),
        ("cd /testbed && pytest -rA", "cd /testbed && pytest -rA {}", "cd /testbed && pytest -rA {}"),
    ],
)
def test_the_canary_is_an_argument(line, planted, alone):
    made = plant_canary(script(line), TESTS, "/testbed")
    path = f"tests/sub/test_{made.canary}.py"
    assert command(made.text, "pytest" if "tox" not in line else "tox") == planted.format(path)
    assert command(made.control, "pytest" if "tox" not in line else "tox") == alone.format(path)


def test_django_gets_a_module():
    made = plant_canary(script("./tests/runtests.py --parallel 1 auth_tests.test_x admin"), TESTS, "/testbed")
    assert (
        command(made.text, "runtests") == f"./tests/runtests.py --parallel 1 auth_tests.test_x admin case_{made.canary}"
    )
    assert command(made.control, "runtests") == f"./tests/runtests.py --parallel 1 case_{made.canary}"


def test_an_unknown_runner_has_no_canary_but_an_exit_code():
    made = plant_canary(script("mocha test/"), TESTS, "/testbed")
    assert made.canary == ""
    assert "SWEBENCH_TEST_EXIT_CODE=$?" in made.text
    assert made.status({"a": "FAILED"}) is None


def test_no_two_canaries_have_the_same_name():
    assert len({plant_canary(script("pytest"), TESTS, "/testbed").canary for _ in range(50)}) == 50


def test_a_planted_script_writes_a_test_that_fails(tmp_path):
    made = plant_canary(script("pytest -rA"), {"test_a.py"}, str(tmp_path))
    subprocess.run(["bash", "-c", made.text.split(f": '{START}'")[0] + "exit 0"], check=True, capture_output=True)
    source = (tmp_path / f"test_{made.canary}.py").read_text()
    with pytest.raises(AssertionError):
        exec(f"{source}\ntest_{made.canary}()", {})


def test_text_of_a_test_patch_cannot_end_its_own_document(tmp_path):
    made = make_script("/testbed", "pytest", [], base="a" * 40, test_patch="diff --git a/t b/t\n+EOF\n+$(touch x)\n")
    checked = subprocess.run(["bash", "-n"], input=made.encode(), capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert "git apply -v - <<'EOF_" in made


ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def change(path, *, new=False):
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n--- /dev/null\n" if new else f"--- a/{path}\n")
    return f"{head}+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode()


def git(folder, *words):
    done = subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, env=ENVIRONMENT)
    return done.stdout


@given(st.lists(st.sampled_from([b"a.py", b"b/c.py", b"d e.txt"])), st.binary(max_size=50))
def test_the_parts_of_a_patch_are_the_patch(paths, tail):
    patch = b"".join(change(path.decode()) for path in paths)
    if paths:
        patch += b"+" + tail.replace(b"\n", b" ") + b"\n"
    assert b"".join(part.data for part in split_patch(patch)) == patch
    assert changed_paths(patch) == {path.decode() for path in paths}


def test_text_without_a_header_has_no_parts():
    assert split_patch(b"nonsense\n") == []
    assert split_patch(b"") == []


def test_paths_that_git_itself_writes(tmp_path):
    git(tmp_path, "init", "--quiet")
    names = ["plain.py", "with space.py", "ümlaut.py", 'quote".py', "tab\there.py", "a b/b c.py", "x b/x b"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0binary" if name == "plain.py" else b"text\n")
    git(tmp_path, "add", "--all")
    patch = git(tmp_path, "diff", "--cached", "--binary", "4b825dc642cb6eb9a060e54bf8d69288fbee4904")
    assert changed_paths(patch) == set(names)
    assert all(part.adds and part.is_plain and not part.deletes for part in split_patch(patch))
    assert separate_forbidden(patch, (), b"") == (patch, [])


def test_a_renamed_file_has_both_its_paths(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "old name.py").write_text("line\n" * 20)
    git(tmp_path, "add", "--all")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m")
    (tmp_path / "old name.py").rename(tmp_path / "conftest.py")
    git(tmp_path, "add", "--all")
    patch = git(tmp_path, "diff", "--cached", "--find-renames", "HEAD")
    assert changed_paths(patch) == {"old name.py", "conftest.py"}
    assert separate_forbidden(patch, (), b"") == (b"", ["conftest.py"])


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "deep/er/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("sitecustomize.py", "src/usercustomize.py", "hook.pth", "package.egg-info/entry_points.txt"),
        *("p.dist-info/entry_points.txt", "tests/test_it.py", ".gitattributes", "sub/.git/config"),
        *(
            "tests//test_it.py",
            "./tests/test_it.py",
            "tests/./test_it.py",
            "/tests/test_it.py",
            "a/../tests/test_it.py",
        ),
        *("sitecustomize.pyc", "src/usercustomize.cpython-311-x86_64-linux-gnu.so"),
    ],
)
def test_what_could_falsify_a_report_is_left_out(path):
    good = change("package/module.py")
    assert separate_forbidden(change(path) + good, {"tests/test_it.py"}, b"") == (good, [path])


@pytest.mark.parametrize("path", ["r2e_tests/test_1.py", "r2e_tests/deep/data.json", "run_tests.sh"])
def test_files_below_a_folder_of_tests_are_tests(path):
    tests = task(EXPECTED).tests
    assert separate_forbidden(change(path), tests, change(path)) == (b"", [path])
    assert separate_forbidden(change(f"x/{path}.py"), tests, b"")[1] == []


@pytest.mark.parametrize(
    "path", ["pytest.py", "pytest/__init__.py", "_pytest/x.py", "src/pluggy.py", "unittest.pyc", "pytest.abi3.so"]
)
def test_a_new_module_in_the_place_of_a_test_runner_is_left_out(path):
    assert separate_forbidden(change(path, new=True), (), b"") == (b"", [path])
    assert separate_forbidden(change(path), (), b"") == (
        change(path),
        [],
    )  # the repository is that runner's own


def test_what_the_reference_repair_changes_may_be_changed_but_for_tests():
    gold = change("setup.cfg") + change("tests/test_it.py")
    patch = change("setup.cfg") + change("tests/test_it.py") + change("conftest.py")
    kept, left_out = separate_forbidden(patch, {"tests/test_it.py"}, gold)
    assert (kept, left_out) == (change("setup.cfg"), ["tests/test_it.py", "conftest.py"])


def test_changes_of_every_kind_that_git_writes_are_kept(tmp_path):
    git(tmp_path, "init", "--quiet")
    names = ["changed.py", "emptied.py", "executable.py", "unended.py", "deleted.py", "renamed.py", "binary.py"]
    for name in names:
        (tmp_path / name).write_text(f"-- {name}\n\n" + "++ line\n" * 20)
    git(tmp_path, "add", "--all")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m")
    (tmp_path / "changed.py").write_text("new\n\n" + "++ line\n" * 9 + "-- a/conftest.py\n" + "++ line\n" * 9)
    (tmp_path / "emptied.py").write_text("")
    (tmp_path / "executable.py").chmod(0o755)
    (tmp_path / "unended.py").write_text("no end")
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "renamed.py").rename(tmp_path / "other.py")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "new.py").touch()
    (tmp_path / "link.py").symlink_to("new.py")
    git(tmp_path, "add", "--all")
    for renames in ("--find-renames", "--no-renames"):
        patch = git(tmp_path, "diff", "--cached", "--binary", "--full-index", renames, "HEAD")
        assert separate_forbidden(patch, (), b"") == (patch, [])


@pytest.mark.parametrize(
    "tail",
    [
        "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n",
        "@@ -0,0 +1 @@\n+x\n--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n-x\n+y\n",
        "Index: conftest.py\n0a\nx\n.\n",
        "*** a/conftest.py\n--- b/conftest.py\n",
        "@@ -1,2 +1 @@\n-x\n",
    ],
)
def test_a_part_with_another_files_header_is_left_out(tail):
    good = change("package/module.py")
    assert separate_forbidden(good + tail.encode() + good, (), b"") == (good, ["package/module.py"])


@pytest.mark.parametrize(
    "head",
    [
        "old mode 100644\nnew mode 100644\n" * 3 + "rename from a.py\nrename to conftest.py\n",
        "rename from a.py\n",
        "--- a/a.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n",
        "Binary files differ\n",
        "GIT binary patch\nliteral 0\nHcmV?d00001\n\n--- a/conftest.py\n",
    ],
)
def test_a_header_that_git_does_not_write_is_left_out(head):
    kept, left_out = separate_forbidden(f"diff --git a/a.py b/a.py\n{head}".encode(), (), b"")
    assert (kept, len(left_out)) == (b"", 1)


@pytest.mark.parametrize("path", ["pytest_plugin/x.py", "src/package/pytest.py", "docs/conf.py", "python.py"])
def test_ordinary_files_are_kept(path):
    assert separate_forbidden(change(path, new=True), (), b"")[1] == []
