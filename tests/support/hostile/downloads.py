"""Downloaded tasks, instances and Dockerfiles that name paths of the host, as checks that any runner can call.

A check takes an empty folder, and raises if what it has put there would bring a file of the host into a sandbox or an
image. Nothing is started and nothing is pulled.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.registry import load_path
from rollout_service.environments.swe.environment import SweDeclaration, SweEnvironment
from sandboxes.images.dockerfile.context import BuildContext

Check = Callable[[Path], None]
DOWNLOADS: dict[str, Check] = {}
PATHS = (
    *("/", "/etc", "//etc", "../../../../../../etc", "~/", "~/.ssh/x.sif", "$HOME/x.sif", "/etc/passwd.sif", "x.sif"),
    *("file:///etc", "file:/etc", "localimage:/etc", "dir:/etc", "oci:/etc", "oci-archive:/etc/passwd"),
    *("docker-archive:/etc/passwd", "docker-daemon:x:1", "sandbox:/etc", "instance://x", "a/../../etc"),
)
INSTANCE = {
    "instance_id": "a__b-1",
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["test_it"],
    "log_parser": "parse_log_pytest",
    "eval_script": "true",
}


def check(function: Check) -> Check:
    """Register a check."""
    DOWNLOADS[function.__name__] = function
    return function


def refused(error: type[Exception], call: Callable[[], object], said: str = "") -> None:
    """Raise unless the call raises such an error, with this in its message."""
    try:
        made = call()
    except error as caught:
        message = str(caught)
    else:
        raise AssertionError(f"it was taken: {made}")
    assert said in message, message


def make_task(folder: Path, toml: str) -> Path:
    """Make a task in Harbor's format."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "tests/test.sh").write_text("#!/bin/bash\n")
    return folder


@check
def dockerfile_context(folder: Path) -> None:
    """Links and `..` in the context of a Dockerfile lead to nothing outside it."""
    (folder / "context/etc").mkdir(parents=True)
    (folder / "context/etc/hostname").write_text("of the context")
    (folder / "context/link").symlink_to("/etc/hostname")
    (folder / "context/up").symlink_to("../../../../../..")
    context = BuildContext(folder / "context")
    for source in ("link", "/etc/hostname", "../../../../etc/hostname", "up/etc/hostname"):
        (file,) = context.select([source])
        assert file.path == folder / "context/etc/hostname", source


@check
def images_of_harbor_tasks(folder: Path) -> None:
    """`docker_image` of a task, or of its verifier, takes no file or folder outside the task's own."""
    (folder / "other.sif").touch()
    for number, path in enumerate([*PATHS, "../other.sif", str(folder / "other.sif")]):
        named = f'docker_image = "{path}"\n'
        agents = make_task(folder / f"agent-{number}", f"[environment]\n{named}")
        refused(ConfigurationError, partial(load_path, agents), "environment.docker_image")
        graders = f'[environment]\ndocker_image = "base"\n[verifier.environment]\n{named}'
        grader = make_task(folder / f"grader-{number}", graders)
        refused(ConfigurationError, partial(load_path, grader), "verifier.environment.docker_image")


@check
def links_of_harbor_tasks(folder: Path) -> None:
    """A task with a link out of its folder is not taken, whatever the link is for."""
    for name in ("tests/key", "solution", "environment", "own.sif", "steps", "tests/up"):
        task = make_task(folder / name.replace("/", "-"), '[environment]\ndocker_image = "own.sif"\n')
        (task / name).symlink_to("../../.." if name == "tests/up" else "/etc")
        refused(ConfigurationError, partial(load_path, task), "leads out")


@check
def images_of_swe_instances(folder: Path) -> None:
    """No field of an instance, and nothing that a template makes of one, is a path of the host."""
    _ = folder  # all of it is data in memory
    published = SweEnvironment(SweDeclaration())
    templates = (
        "{{ instance.own }}",
        "/{{ instance.own }}",
        "oci:{{ instance.own }}",
        "/i/{{ instance.own }}/..",
    )
    for path in PATHS:
        for field in ("image", "docker_image", "image_name"):
            call = partial(published.for_instance, {**INSTANCE, field: path})
            refused(InvalidFieldError, call, f"instance.{field}")
        for template in templates:
            named = SweEnvironment(SweDeclaration(name="mine", image=template))
            call = partial(named.for_instance, {**INSTANCE, "own": path})
            refused(InvalidFieldError, call, "no instance may name")


@check
def environment_in_an_image(folder: Path) -> None:
    """The `environment.toml` in an image makes the service read no file outside the image, and ask no address."""
    (folder / "inside").mkdir()
    (folder / "outside.jsonl").write_text('{"question": "secret"}\n')
    (folder / "inside/link.jsonl").symlink_to("../outside.jsonl")
    minimal = 'name = "e"\nprompt = "?"\n[evaluate]\ncommand = "true"\n'
    for text in (
        f'[dataset]\npath = "{folder}/outside.jsonl"\n',
        '[dataset]\npath = "../outside.jsonl"\n',
        '[dataset.splits]\ntrain = "link.jsonl"\n',
        '[search]\nurl = "http://127.0.0.1:8000/v1/rollouts"\n',
    ):
        (folder / "inside/environment.toml").write_text(minimal + text)
        call = partial(load_folder, folder / "inside", image=folder / "any.sif")
        refused(ConfigurationError, call, "any.sif:/environment/environment.toml")
