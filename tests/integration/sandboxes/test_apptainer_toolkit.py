"""The Python tool works in images without Python, with a broken one, or without the kernel: it brings its own."""

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandboxes import Sandbox, SandboxSpec, make_provider
from sandboxes.config import ApptainerConfig
from sandboxes.errors import SandboxStartError
from sandboxes.images.sources import packaged
from sandboxes.images.store import ImageStore
from sandboxes.images.toolkit import INSIDE, PYTHON
from sandboxes.providers.apptainer.provider import ApptainerProvider
from tests.support.scripts import write_script

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(600)]  # base may have to be built
Start = Callable[..., Awaitable[Sandbox]]
LOADER = re.compile(rb"/lib64/ld-")


@pytest.fixture(scope="module")
def base() -> Path:
    """Return the folder of the unpacked base image."""
    store = ImageStore()
    store.provide(packaged("base"), "base")
    provider = make_provider(ApptainerConfig())
    assert isinstance(provider, ApptainerProvider)
    return provider.prepared_images.unpacked.provide(store.resolve("base")).folder


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(image: Path, python: str = "auto", **spec: object) -> Sandbox:
            config = ApptainerConfig.model_validate({"python": python})
            provider = make_provider(config, tmp_path / "state")
            stack.push_async_callback(provider.close)
            sandbox = await provider.start(SandboxSpec(image=str(image), **spec))  # type: ignore[arg-type]
            return await stack.enter_async_context(sandbox)

        yield begin


@pytest.fixture
def bare(base: Path, tmp_path: Path) -> Path:
    """Create an image with bash, the core utilities and a C library in places that only their own loader knows.

    Other programs find neither the loader that they name nor, without it, any library.
    """
    root = tmp_path / "bare"
    for folder in ("bin", "dev", "etc", "odd64", "proc", "run", "sys", "usr/bin", "usr/lib"):
        (root / folder).mkdir(parents=True)
    for folder in ("root", "tmp", "workspace"):
        (root / folder).mkdir()
        (root / folder).chmod(0o1777)
    for name in ("bash", "sh", "cat", "dirname", "env", "head", "ls", "mkdir", "readlink", "stat", "rm"):
        data = (base / "usr/bin" / name).resolve().read_bytes()
        target = root / "bin" / name
        target.write_bytes(LOADER.sub(b"/odd64/ld-", data))
        target.chmod(0o755)
    libraries = next(base.glob("usr/lib/*-linux-gnu"))
    for name in ("libc.so.6", "libtinfo.so.6", "libselinux.so.1", "libpcre2-8.so.0"):
        shutil.copy(libraries / name, root / "usr" / "lib" / name)
    shutil.copy(libraries / "ld-linux-x86-64.so.2", root / "odd64")
    if os.geteuid() == 0:  # files that sandboxes may write belong to their user
        nobody = pwd.getpwnam("nobody")
        for path in (root, *root.rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    return root


async def value(sandbox: Sandbox, code: str) -> str:
    result = await (await sandbox.python()).execute(code)
    assert result.error is None, result.error
    return (result.output + (result.result or "")).strip()


async def test_an_image_without_python_and_with_a_c_library_of_its_own(start, bare):
    sandbox = await start(bare)
    assert await value(sandbox, "import sys; sys.executable") == repr(PYTHON)
    code = "import re; print(*sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}))"
    loaded = (await value(sandbox, code)).split()
    assert loaded
    assert all(path.startswith(INSIDE) for path in loaded), "nothing of the image's is loaded"
    assert (await (await sandbox.bash()).run("type python3")).exit_code == 1, "bash sees the image's own"


@pytest.fixture
def plain(base: Path, tmp_path: Path) -> Path:
    """Create a copy of the base image without its Python packages."""
    root = tmp_path / "plain"
    subprocess.run(["cp", "--archive", "--link", base, root], check=True)
    shutil.rmtree(next((root / "usr/local/lib").glob("python3*")))
    return root


async def test_a_python_without_the_kernel(start, plain):
    sandbox = await start(plain)
    assert await value(sandbox, "import sys; sys.prefix") == repr(INSIDE)
    bash = await sandbox.bash()
    assert (await bash.run("python3 -c 'import sys; print(sys.prefix)'")).output == "/usr\n"
    inner = "import subprocess; subprocess.run(['python3', '-c', 'import sys; print(sys.prefix)'], check=True, "
    inner += "capture_output=True, text=True).stdout"
    assert await value(sandbox, inner) == repr("/usr\n")


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "no program at all", ""])
async def test_a_python3_that_is_not_python_is_not_used(start, bare, text):
    write_script(bare / "bin" / "python3", interpreter="", text=text)
    assert await value(await start(bare), "6 * 7") == "42"


async def test_the_image_is_used_where_it_has_the_kernel(start, base):
    assert await value(await start(base), "import sys; sys.executable") == repr("/usr/bin/python3")


async def test_either_can_be_forced(start, base, bare):
    assert await value(await start(base, "toolkit"), "import sys; sys.executable") == repr(PYTHON)
    forced = await start(bare, "image")
    with pytest.raises(SandboxStartError):
        await forced.python()
    assert (await (await forced.bash()).run("echo alive")).output == "alive\n"


async def test_child_processes_of_code_do_not_see_the_toolkit(start, bare):
    sandbox = await start(bare, env={"MINE": "here", "PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere"})
    code = "import subprocess; print(subprocess.run(['env'], capture_output=True, text=True).stdout)"
    variables = dict(line.split("=", 1) for line in (await value(sandbox, code)).splitlines() if "=" in line)
    assert (variables["MINE"], variables["PYTHONPATH"]) == ("here", "/nowhere"), "what was given is handed on"
    assert not [name for name in variables if name.startswith("LD_")]
    assert INSIDE not in variables["PATH"]
    assert await value(sandbox, "!ls /odd64") == "ld-linux-x86-64.so.2"


async def test_it_is_a_whole_python(start, bare):
    sandbox = await start(bare)
    modules = "bz2, ctypes, curses, decimal, hashlib, lzma, multiprocessing, readline, sqlite3, ssl, uuid, zlib, zmq"
    assert await value(sandbox, f"import {modules}; ssl.create_default_context(); 'é'") == "'é'"
    pool = "import multiprocessing as mp\nwith mp.get_context({!r}).Pool(2) as pool: print(pool.map(abs, [-1, 2]))"
    for method in ("fork", "spawn"):
        assert await value(sandbox, pool.format(method)) == "[1, 2]"
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import IPython; print(1)'], check=True, "
    assert await value(sandbox, inner + "capture_output=True).stdout") == r"b'1\n'"
    module = "open('mine.py', 'w').write('x = 5')\nimport mine\nmine.x"
    assert await value(sandbox, module) == "5"


async def test_nothing_inside_changes_it(start, bare):
    sandbox = await start(bare)
    for path in (f"{INSIDE}/mine", PYTHON, f"{INSIDE}/lib/python3.11/os.py"):
        code = f"import os\ntry: open({path!r}, 'w')\nexcept OSError as error: print(os.strerror(error.errno))"
        assert await value(sandbox, code) == "Read-only file system"
