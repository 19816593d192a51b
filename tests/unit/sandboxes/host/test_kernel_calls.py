"""Programs that run alone load of this project only themselves and what they need, whatever lies around."""

import subprocess
from itertools import accumulate

import pytest

from sandboxes.host.kernel_calls import alone

LAUNCH = "sandboxes.providers.apptainer.launch"
CALLS = {"sandboxes.host", "sandboxes.host.kernel_calls"}
READER = {"sandboxes.runtime", "sandboxes.runtime.tree_reader"}


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("sandboxes.images.dockerfile.step.job", CALLS),
        (f"{LAUNCH}.steps", CALLS),
        (f"{LAUNCH}.saved_files", CALLS | READER),
        (f"{LAUNCH}.fork_server", CALLS),
    ],
)
def test_a_program_that_runs_alone_loads_nothing_else_of_the_project(module, needed, tmp_path):
    for name in ("json.py", "tarfile.py", "sandboxes.py"):
        (tmp_path / name).write_text("raise SystemExit('hidden')")
    *python, program = alone(module)
    program = f"{program.removesuffix('main()')}print(*sys.modules)"
    done = subprocess.run([*python, program], cwd=tmp_path, capture_output=True, text=True, check=True)
    package = module.rpartition(".")[0]
    above = set(accumulate(package.split("."), lambda path, name: f"{path}.{name}"))
    loaded = {name for name in done.stdout.split() if name.startswith("sandboxes")}
    assert {name for name in loaded if not name.startswith(f"{package}.")} == above | needed
