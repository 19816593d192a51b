"""Start programs of the image, with the rights that Docker gives, and of the host, to read or fill an image."""

import os
import resource
import warnings  # noqa: F401 - os.execvp loads it when Python's own files may be out of reach, such as below /root

from sandboxes.host.kernel_calls import call, end_with_parent, keep_capabilities

from .accounts import ImageUser
from .mounts import APT_SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
"""The capabilities that Docker leaves to root: files, users, signals, low ports and chroot, but none of the host."""


def execute(job: "dict[str, Any]", *, single: bool) -> int:
    """Become a program of the image, with no other user if the namespace has a `single` id; return a status if that
    fails.
    """
    account = ImageUser(job["user"] or "0")
    env = {"HOME": account.home, **job["env"]}
    if single:
        env.setdefault("APT_CONFIG", APT_SETTINGS)
    os.makedirs(job["cwd"], exist_ok=True)
    os.chdir(job["cwd"])
    if job["max_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_bytes"], job["max_bytes"]))
    call("sethostname", b"build", 5)
    keep_capabilities(KEPT)
    if not single:
        os.setgroups(account.groups)
        os.setresgid(account.group, account.group, account.group)
        os.setresuid(account.user, account.user, account.user)
    end_with_parent()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.setsid()
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return _become(job["argv"], env)


def _become(argv: "list[str]", env: "dict[str, str]") -> int:
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127


def run_tool(argv: "list[str]") -> int:
    """Run a program of the host, which reads `ROOT` and writes `OUTPUT`."""
    child = os.fork()
    if child == 0:
        end_with_parent()
        try:
            os.execvp(argv[0], argv)  # noqa: S606
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
