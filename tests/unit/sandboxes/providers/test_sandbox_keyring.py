"""A sandbox cannot find its service's keys, although processes inherit their parent's session keyring."""

import subprocess
import sys

import pytest

from sandboxes.providers.apptainer import launch

PRELUDE = "import ctypes, os, sys\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
SERVICE = f"""{PRELUDE}
keyctl, add_key, *launched = sys.argv[1:]
call(int(keyctl), 1, None)
if call(int(add_key), b"user", b"rollout-test", b"secret", 6, -3) < 0:
    sys.exit("a host without keys")
os.execv(sys.executable, [sys.executable, *launched])
"""
INSIDE = f"{PRELUDE}print(call(int(sys.argv[1]), 10, -3, b'user', b'rollout-test', 0) > 0)"


@pytest.mark.parametrize("through", ["the launcher", "nothing"])
def test_a_sandbox_finds_no_key_of_its_service(tmp_path, through):
    keyctl, add_key = str(launch.KEYCTL), str(launch.KEYCTL - 2)
    script = [launch.__file__, sys.executable] if through == "the launcher" else []
    command = [sys.executable, "-c", SERVICE, keyctl, add_key, *script, "-c", INSIDE, keyctl]
    done = subprocess.run(
        command,
        env={"LAUNCH_SPACE": str(tmp_path), "LAUNCH_BYTES": "1048576"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ("False\n" if script else "True\n"), done
