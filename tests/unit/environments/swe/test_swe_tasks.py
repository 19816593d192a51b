"""Instances of each set are read with the set's own conventions, and bad ones are rejected by the path of a field."""

import json

import pytest

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.swe.environment import SweDeclaration, SweEnvironment, environment
from rollout_service.environments.swe.scripts import END, START
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


def test_an_instance_names_an_image_of_this_machine():
    assert read_task(VERIFIED | {"image": "swe-local"}).image == "swe-local"


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
