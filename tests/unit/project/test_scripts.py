"""The scripts explain themselves, say how to install whatever is missing, and pass pip's settings to uv."""

import fcntl
import importlib.util
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.support.scripts import write_script

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[3] / "scripts"
LIB = shlex.quote(str(SCRIPTS / "lib.sh"))


def bash(code: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code after `lib.sh`, with its log in the given folder."""
    prelude = f"set -euo pipefail; source {LIB}; cache={folder}; setup_log={folder}/setup.log\n"
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder)} | environ
    return subprocess.run(
        ["bash", "-c", prelude + code], capture_output=True, text=True, env=variables, cwd=folder, check=False
    )


IMPORTING = {"train", "live-demo"}
"""Those whose help has every flag of a program that imports torch."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[pytest.mark.torch] if path.name in IMPORTING else [])
        for path in sorted(SCRIPTS.iterdir())
        if path.is_file() and os.access(path, os.X_OK)
    ],
)
def test_every_script_has_help(name):
    result = subprocess.run([SCRIPTS / name, "--help"], capture_output=True, text=True, check=True)
    assert f"scripts/{name}" in result.stdout


def test_every_module_that_a_script_names_is_there():
    pattern = r"\b(?:rollout_service|rollout_client|sandboxes)\.(?!(?:py|toml|json)\b)\w[\w.]*\w"
    texts = [script.read_text() for script in SCRIPTS.iterdir() if script.is_file()]
    named = {name for text in texts for name in re.findall(pattern, text)}
    assert len(named) > 3
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def test_the_markers_of_the_chosen_tests_decide_what_is_installed():
    chosen = ["tests/conformance/engines/test_engine_kv.py", "-k", "embedded or vllm"]
    done = subprocess.run([SCRIPTS / "test", "--dry-run", *chosen], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["trainer", "systemd", "vllm"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "needs_admin Apptainer scripts/install-apptainer",
            "an administrator installs it with: sudo scripts/install-apptainer",
        ),
        (
            "PATH=/nowhere; ensure_browser",
            "sudo apt-get install chromium-headless-shell fonts-dejavu-core",
        ),
        ("ROLLOUT_PYTHON=/bin/false find_python", "no Python 3.11 or newer"),
        ("ROLLOUT_PYTHON=/bin/false find_python", "apt-get install python3"),
    ],
)
def test_an_ordinary_user_sees_what_to_install(tmp_path, code, says):
    result = bash(f"id() {{ echo 1000; }}\n{code}; echo not reached", tmp_path)
    assert result.returncode == 1
    assert says in result.stderr
    assert "not reached" not in result.stdout


def test_a_step_that_fails_shows_the_end_of_its_output_and_ends_the_script(tmp_path):
    result = bash("broken() { echo first; echo the reason >&2; return 3; }; step 'do it' broken; echo on", tmp_path)
    assert result.returncode == 1
    assert "==> do it ... failed" in result.stderr
    assert "the reason" in result.stderr
    assert "on" not in result.stdout.split()


def test_an_existing_base_image_is_not_built_again_by_another_checkout(tmp_path):
    (tmp_path / "base.sif").touch()
    code = "ensure_uv() { fail 'it would be built'; }; ensure_base_image; echo ready"
    result = bash(code, tmp_path, ROLLOUT_IMAGES_DIR=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "ready\n"), result.stderr


def test_the_first_step_in_a_new_clone_makes_the_folder_of_its_log(tmp_path):
    result = bash("cache=$cache/new setup_log=$cache/setup.log; step 'do it' echo noise", tmp_path)
    assert (result.returncode, (tmp_path / "new" / "setup.log").read_text()) == (0, "noise\n"), result.stderr


@pytest.mark.parametrize("part", ["openenv", "valkey"])
def test_an_install_that_fails_on_the_way_fails_and_begins_anew(tmp_path, part):
    uv = write_script(tmp_path / "uv", 'mkdir -p "$made"; [ "$1" != pip ]\n')
    code = f"export made=$cache/{part}; ensure_uv() {{ uv={uv} python=python3; }}; ensure_{part}"
    result = bash(code, tmp_path)
    assert result.returncode == 1, result.stderr
    assert not (tmp_path / part / ".installed").exists()


@pytest.mark.parametrize(
    ("activate", "python", "was_cut_off", "is_made"),
    [
        ("{venv}", sys.executable, False, False),
        ("/another/.venv", sys.executable, False, True),
        ("{venv}", "/gone/python", False, True),
        ("{venv}", sys.executable, True, True),
    ],
    ids=["here", "copied", "without-python", "unfinished"],
)
def test_an_environment_that_is_not_whole_is_made_anew(tmp_path, activate, python, was_cut_off, is_made):
    venv = tmp_path / "of me" / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(python)
    (venv / "bin" / "activate").write_text(f"VIRTUAL_ENV='{activate.format(venv=venv)}'\n")
    uv = write_script(tmp_path / "uv", f'echo "$1 $3" >>{tmp_path}/log; [ -z "$FULL" ] || [ "$1" != pip ]\n')
    code = f"venv='{venv}'; ensure_uv() {{ uv={uv} python=python3; }}; ensure_venv"
    if was_cut_off:
        assert bash(code, tmp_path, FULL="yes").returncode == 1
        (tmp_path / "log").unlink()
    result = bash(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert ("venv --clear" in (tmp_path / "log").read_text()) == is_made
    (tmp_path / "log").unlink()
    (venv / ".installed").unlink()  # as when the locks have changed
    assert bash(code, tmp_path).returncode == 0
    assert ("venv --clear" in (tmp_path / "log").read_text()) == (is_made and not was_cut_off)


@pytest.mark.parametrize("is_whole", [True, False])
def test_packages_of_an_install_that_was_cut_off_are_not_taken_for_whole(tmp_path, is_whole):
    venv.create(tmp_path / "venv", symlinks=True)
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    about = packages / "torch-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: torch\nVersion: 2.0\n")
    if is_whole:
        (about / "INSTALLER").write_text("uv\n")
        (tmp_path / "venv" / ".installed").touch()
    code = "venv=$cache/venv; ! trainer_is_ready || echo ready; begin_anew $venv"
    assert bash(code, tmp_path).stdout == ("ready\n" if is_whole else "")
    assert about.exists() == is_whole
    assert not (tmp_path / "venv" / ".installed").exists()


def test_a_service_without_a_home_finds_the_images_of_its_user(tmp_path):
    inside = f"set -eu; source {LIB}; images_folder"
    code = f"env -u HOME bash -c {shlex.quote(inside)}"
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert bash(code, tmp_path).stdout == f"{home}/.cache/rollout-service/images\n"


def test_uv_is_installed_once_however_many_scripts_begin(tmp_path):
    python = write_script(
        tmp_path / "python",
        f"""echo "$2" >>{tmp_path}/log
[ "$2" != venv ] || {{ sleep 0.3; mkdir -p {tmp_path}/bootstrap/bin; }}
[ "$2" != pip ] || cp "$0" {tmp_path}/bootstrap/bin/uv
""",
    )
    prelude = f"set -euo pipefail; source {LIB}; cache={tmp_path} setup_log={tmp_path}/$i.log\n"
    code = f"{prelude}find_python() {{ echo {python}; }}; has_pip() {{ :; }}; ensure_bootstrap"
    running = [
        subprocess.Popen(["bash", "-c", code], stderr=subprocess.DEVNULL, env=os.environ | {"i": str(number)})
        for number in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split() == ["venv", "pip"]


def test_apts_lists_are_fetched_before_the_first_package_on_ubuntu(tmp_path):
    for name in ("apt-get", "add-apt-repository"):
        write_script(tmp_path / "bin" / name, f'echo "{name} $*" >>{tmp_path}/log\n')
    functions = "/^apt_install()/,/^}/p;/^install_with_ppa()/,/^}/p"
    script = shlex.quote(str(SCRIPTS / "install-apptainer"))
    code = f"source <(sed -n '{functions}' {script}); debian_tools=(); install_with_ppa"
    assert bash(code, tmp_path, PATH=f"{tmp_path}/bin:/usr/bin:/bin").returncode == 0
    assert (tmp_path / "log").read_text().splitlines()[0].endswith("update")


def test_redis_is_unpacked_into_a_folder_of_any_name(tmp_path):
    redis = "#!/bin/sh\necho Redis server v=7.0.15"
    write_script(tmp_path / "bin" / "apt-get", "touch one.deb\n")
    write_script(
        tmp_path / "bin" / "dpkg",
        f'mkdir -p "$3/usr/bin"; printf \'%s\n\' "{redis}" >"$3/usr/bin/redis-server"; chmod +x "$3"/usr/bin/*\n',
    )
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    folder = tmp_path / "o'brien's" / "redis"
    done = subprocess.run(
        [SCRIPTS / "install-redis", folder], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{folder}/bin/redis-server\n"), done.stderr
    assert {one.name for one in folder.parent.iterdir()} == {"redis", "redis.lock"}


def test_a_trial_of_slurm_is_set_up_in_a_checkout_of_any_name(tmp_path):
    root = tmp_path / "of me"
    (root / "scripts").mkdir(parents=True)
    for name in ("trial-slurm", "lib.sh", "parts.sh"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    write_script(root / ".venv" / "bin" / "rollout-service", "")
    write_script(root / "scripts" / "install-slurm", 'mkdir -p "$1/usr/lib/x/slurm-wlm"\n')
    write_script(tmp_path / "bin" / "unshare", 'cat "$SLURM_CONF"\n')
    environ = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([root / "scripts" / "trial-slurm"], env=environ, capture_output=True, text=True, check=True)
    [plugins] = re.findall("^PluginDir=(.*)$", done.stdout, re.MULTILINE)
    assert " " not in plugins


def test_an_image_that_is_missing_is_named_with_its_command(tmp_path):
    environ = os.environ | {"ROLLOUT_IMAGES_DIR": str(tmp_path / "none")}
    done = subprocess.run([SCRIPTS / "docker-image"], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "rollout-service image build base" in done.stderr) == (1, True)


def test_a_python_is_named_by_any_path(tmp_path):
    python = tmp_path / "of me" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert bash("find_python", tmp_path, ROLLOUT_PYTHON=str(python)).stdout == f"{python}\n"


def test_a_step_says_how_long_it_took_and_keeps_its_output_to_itself(tmp_path):
    result = bash("step 'do it' echo noise", tmp_path)
    assert result.returncode == 0
    assert result.stderr.startswith("==> do it ... ")
    assert result.stderr.endswith(" s\n")
    assert result.stdout == ""


def test_the_python_that_has_pip_is_found_again_after_uv(tmp_path):
    programs = tmp_path / "bootstrap" / "bin"
    programs.mkdir(parents=True)
    (programs / "python3").symlink_to(sys.executable)
    (programs / "uv").touch(0o755)
    lock = SCRIPTS / "bootstrap.lock"
    (tmp_path / "bootstrap" / "installed.lock").write_bytes(lock.read_bytes())
    code = "ensure_uv; first=$pip_python; ensure_uv; echo $first $pip_python"
    result = bash(code, tmp_path, PATH=os.environ["PATH"])
    first, second = result.stdout.split()
    assert first == second != str(programs / "python3"), result.stderr


def test_pips_settings_are_found_from_an_activated_environment_without_pip(tmp_path):
    base = write_script(tmp_path / "base", '[ "$2" != pip ] || echo "global.index-url=\'https://one.test\'"\n')
    python = write_script(tmp_path / "python", f'case "$*" in *_base_executable*) echo {base};; *pip*) exit 1;; esac\n')
    code = f"ensure_bootstrap() {{ python={python} uv=; }}; ensure_uv; echo $pip_python $UV_DEFAULT_INDEX"
    assert bash(code, tmp_path).stdout.split() == [str(base), "https://one.test"]


def test_pips_settings_reach_uv(tmp_path):
    pip = tmp_path / "python"
    pip.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "-m pip config list" ] || exit 1\n'
        "cat <<END\n"
        ":env:.disable-pip-version-check='1'\n"
        "global.index-url='https://one.test/simple'\n"
        "install.extra-index-url='\\\\nhttps://two.test/simple\\\\nhttps://three.test/simple'\n"
        "END\n"
    )
    pip.chmod(0o755)
    code = f'configure_uv {pip}; echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS|$UV_SYSTEM_CERTS"'
    result = bash(code, tmp_path, PIP_FIND_LINKS="/a /b")
    assert result.stdout.strip() == (
        "https://one.test/simple|https://two.test/simple https://three.test/simple|/a,/b|1"
    ), result.stderr


def test_two_setups_at_once_wait_for_each_other(tmp_path):
    code = "lock; echo begin >>log; sleep 0.3; echo end >>log; unlock"
    prelude = f"set -euo pipefail; source {LIB}; cache={tmp_path}; cd {tmp_path}\n"
    running = [subprocess.Popen(["bash", "-c", prelude + code], stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 3


SIDE_BY_SIDE = """
lock
after=([last]="first second")
ensure_first() { step 'make the first' sleep 0.4; }
ensure_second() { step 'make the second' ${SECOND:-sleep 0.4}; }
ensure_last() { echo "the last" >>order; step 'make the last' true; }
start_installs last
unlock
await_parts first; echo "the first is there" >>order
await_parts last
"""


def test_parts_are_installed_side_by_side_and_after_those_that_they_need(tmp_path):
    result = bash(SIDE_BY_SIDE, tmp_path)
    assert result.returncode == 0, result.stderr
    said = [line.rpartition(" ... ")[0] for line in result.stderr.splitlines()]
    assert sorted(said[:2]) == ["==> make the first", "==> make the second"]
    assert said[2:] == ["==> make the last"]
    assert sorted((tmp_path / "order").read_text().splitlines()) == ["the first is there", "the last"]


def test_a_part_that_fails_shows_the_end_of_its_output_and_ends_the_others(tmp_path):
    broken = write_script(tmp_path / "broken", "echo the reason\nexit 3\n")
    code = SIDE_BY_SIDE.replace("sleep 0.4", f"sh -c 'echo $$ >{tmp_path}/first; exec sleep 60'", 1)
    result = bash(code, tmp_path, SECOND=f"sh -c {broken}")
    assert result.returncode == 1
    assert "==> make the second ... failed\nthe reason\n" in result.stderr
    while Path("/proc", (tmp_path / "first").read_text().strip()).exists():
        time.sleep(0.01)  # the signal has been sent, not yet received
    assert not (tmp_path / "order").exists()


def test_what_apt_installs_is_whole_even_if_another_part_fails(tmp_path):
    packages = "echo begun >begun; until [ -e go ]; do sleep 0.01; done; echo whole >packages"
    code = SIDE_BY_SIDE.replace("sleep 0.4", f"with_apt sh -c '{packages}'", 1)
    second = write_script(tmp_path / "second", "until [ -e begun ]; do sleep 0.01; done; exit 3\n")
    result = bash(f"exec >out 2>&1\n{code}", tmp_path, SECOND=str(second))  # a pipe would stay open until apt has ended
    (tmp_path / "go").touch()
    assert result.returncode == 1
    with (tmp_path / "apt.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until apt has ended
    assert (tmp_path / "packages").exists()


def test_another_process_with_the_number_of_ended_installs_is_not_ended(tmp_path):
    code = f"{SIDE_BY_SIDE}wait $installer; installer=12345; kill() {{ echo $* >>killed; }}"
    assert bash(code, tmp_path).returncode == 0
    assert not (tmp_path / "killed").exists()


def test_a_part_that_fails_is_a_failure_however_late_it_is(tmp_path):
    code = SIDE_BY_SIDE.replace("await_parts first;", "while kill -0 $installer; do sleep 0.01; done 2>/dev/null;")
    result = bash(f"give_up_at=1\n{code}", tmp_path, SECOND="false")
    assert (result.returncode, "failed" in result.stderr) == (1, True)


INSTALLED = """
lock() { :; }
unlock() { :; }
start_installs() { installer=$$; }
await_parts() { :; }
renice() { :; }
"""
DEFECT = """
echo "$*" >>log
case "$*" in
    *"--tier 1 tests/unit"*) mkdir -p .pytest_cache/v/cache
        echo '{"tests/unit/test_a.py::test_a": true}' >.pytest_cache/v/cache/lastfailed
        exit 1 ;;
    *"-n 0 --hypothesis-profile=deep"*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout that installs nothing, whose pytest is still to be written."""
    (tmp_path / "scripts").mkdir()
    for name in ("test", "lib.sh", "parts.sh"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    with (tmp_path / "scripts" / "lib.sh").open("a") as lib:
        lib.write(INSTALLED)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_nothing_is_installed_for_a_test_that_does_not_exist(checkout):
    pytest_here = 'echo "$*" >>log; echo "file not found" >&2; exit 4\n'
    write_script(checkout / ".venv" / "bin" / "pytest", pytest_here)
    command = [checkout / "scripts" / "test", "tests/unit/typo.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "file not found" in done.stderr) == (4, True)
    assert (checkout / "log").read_text() == "--collect-only --quiet tests/unit/typo.py\n"


def test_a_failure_of_a_thorough_run_is_tried_again_as_thoroughly(checkout):
    write_script(checkout / ".venv" / "bin" / "pytest", DEFECT)
    done = subprocess.run([checkout / "scripts" / "test", "--all", "--retry"], capture_output=True, check=False)
    assert "--tier 2" in (checkout / "log").read_text()
    assert (done.returncode, b"flaky" in done.stdout) == (1, False), done.stderr


FAILING = """
import pytest

@pytest.mark.xdist_group("a group")
@pytest.mark.parametrize("address", ["a@b", "c"])
def test_grouped(address):
    assert address == "c"

@pytest.mark.parametrize("address", ["a@b"])
def test_alone(address):
    assert not address
"""


def test_tests_that_failed_can_be_run_again_with_or_without_a_group(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    pytest_here = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "xdist"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    first = subprocess.run([*pytest_here, "-n", "1", "--dist", "loadgroup"], cwd=tmp_path, env=environ, check=False)
    assert first.returncode == 1
    failed = bash("last_failed", tmp_path).stdout.splitlines()
    assert sorted(failed) == ["test_failing.py::test_alone[a@b]", "test_failing.py::test_grouped[a@b]"]
    again = subprocess.run(
        [*pytest_here, "-n", "0", *failed],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed" in again.stdout
