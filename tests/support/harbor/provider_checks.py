"""Drives `RolloutEnvironment` in Harbor's own Python environment, and prints what it saw as JSON.

.venv-harbor/bin/python -m tests.support.harbor.provider_checks FOLDER BASE
"""

import asyncio
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from sandboxes import harbor_settings
from sandboxes.errors import SandboxConfigError, SandboxError
from sandboxes.harbor import RolloutEnvironment

BASE = "base"
HOSTILE = """
mkdir -p /out/deep && cd /out && echo kept >deep/file && ln -s deep/file inside && ln deep/file hard
ln -s /etc/passwd outside && ln -s ../../../../escaped up && mkfifo pipe
"""


def environment(folder: Path, name: str, image: str, network: NetworkMode, **more: Any) -> RolloutEnvironment:
    """Return an environment that has not been started, of a task with this image."""
    definition = folder / name / "environment"
    definition.mkdir(parents=True, exist_ok=True)
    paths = TrialPaths(trial_dir=folder / name / "trial")
    paths.mkdir()
    config = EnvironmentConfig(
        docker_image=image, workdir="/work", env={"FROM_TASK": "yes"}, memory_mb=512, storage_mb=64, cpus=1
    )
    return RolloutEnvironment(
        environment_dir=definition,
        environment_name=name,
        session_id=f"{name}__env",
        trial_paths=paths,
        task_env_config=config,
        network_policy=NetworkPolicy(network_mode=network),
        logger=logging.getLogger(name),
        **{"state_dir": str(folder / "state"), "images_dir": str(folder / "images"), **more},
    )


def live() -> list[str]:
    """Return the labels of the sandboxes that are alive, of all providers of this process."""
    return [info.label for shared in harbor_settings._shared.values() for info in shared._provider.live()]


async def commands(env: RolloutEnvironment) -> dict[str, Any]:
    """Run commands, and say what came back."""
    seen: dict[str, Any] = {}
    said = await env.exec('echo "$PWD $FROM_TASK $EXTRA"; echo oh >&2; exit 3', env={"EXTRA": "more"})
    seen["exec"] = [said.stdout, said.stderr, said.return_code]
    seen["cwd"] = (await env.exec("pwd", cwd="/tmp")).stdout
    seen["network"] = (await env.exec("ls /sys/class/net 2>/dev/null; cat /proc/net/dev | wc -l")).stdout
    seen["user"] = (await env.exec("id -u", user="somebody")).return_code
    try:
        await env.exec("sleep 60", timeout_sec=1)
    except RuntimeError as error:
        seen["timeout"] = str(error)
    return seen


async def files(env: RolloutEnvironment, folder: Path) -> dict[str, Any]:
    """Copy files up and down, with links that lead out of a hostile folder."""
    up, down = folder / "up", folder / "down"
    (up / "below").mkdir(parents=True)
    (up / "run.sh").write_text("#!/bin/bash\necho ran\n")
    (up / "run.sh").chmod(0o755)
    (up / "below/data").write_bytes(bytes(range(256)) * 4096)
    (up / "link").symlink_to("below/data")
    await env.upload_dir(up, "/got")
    await env.upload_file(up / "run.sh", "/elsewhere/other name.sh")
    listed = "/got/run.sh && '/elsewhere/other name.sh' && cd /got && readlink link && wc -c <link"
    seen: dict[str, Any] = {"up": (await env.exec(listed)).stdout}
    await env.download_file("/got/below/data", folder / "made/data")
    seen["same"] = (folder / "made/data").read_bytes() == (up / "below/data").read_bytes()
    for call, target in ((env.download_file, folder / "no"), (env.download_dir, folder / "nodir")):
        try:
            await call("/missing", target)
        except FileNotFoundError as error:
            seen[call.__name__] = [str(error), target.exists()]
    await env.exec(HOSTILE)
    await env.download_dir("/out", down)
    seen["down"] = sorted(str(path.relative_to(down)) for path in down.rglob("*"))
    seen["hard"] = (down / "hard").read_text()
    seen["escaped"] = (folder.parent / "escaped").exists() or (folder / "escaped").exists()
    seen["mode"] = stat.S_IMODE((await asyncio.to_thread(os.stat, down / "deep/file")).st_mode) & 0o111
    return seen


async def ends(folder: Path) -> dict[str, Any]:
    """End environments in all ways, and say what is alive then."""
    env = environment(folder, "ends", BASE, NetworkMode.NO_NETWORK)
    try:
        async with asyncio.timeout(0.05):
            await env.start(force_build=False)
    except TimeoutError:
        pass
    seen: dict[str, Any] = {"cancelled": [live(), len(harbor_settings._shared)]}
    await env.stop(delete=True)  # as Harbor does after a start that failed
    seen["images"] = []
    for image in ("no/such/image.sif", "/", "../images/base.sif"):
        try:
            await environment(folder, "hostile", image, NetworkMode.NO_NETWORK).start(force_build=False)
        except SandboxError as error:
            seen["images"].append(type(error).__name__)
    one, two = (environment(folder, name, BASE, NetworkMode.NO_NETWORK) for name in ("one", "two"))
    await one.start(force_build=False)
    await two.start(force_build=False)
    seen["shared"] = [sorted(live()), len(harbor_settings._shared)]
    command = asyncio.ensure_future(one.exec("touch /tmp/begun; sleep 60"))
    await one.exec("until [ -e /tmp/begun ]; do sleep 0.05; done", timeout_sec=30)
    await one.stop(delete=False)
    seen["under_way"] = type((await asyncio.gather(command, return_exceptions=True))[0]).__name__
    await one.stop(delete=True)
    seen["one_left"] = live()
    await two.stop(delete=True)
    seen["none_left"] = [live(), len(harbor_settings._shared)]
    try:
        await one.exec("true")
    except RuntimeError as error:
        seen["stopped"] = str(error)
    return seen


async def users(folder: Path) -> dict[str, Any]:
    """Run commands as other users of a sandbox that has a root."""
    env = environment(folder, "users", BASE, NetworkMode.NO_NETWORK, sandbox={"fakeroot": True})
    await env.start(force_build=False)
    try:
        env.default_user = "nobody"
        found = {str(user): await env.exec("id -un; id -gn", user=user) for user in (None, "root", 65534, "none")}
    finally:
        await env.stop(delete=True)
    return {user: said.stdout.split() or said.stderr for user, said in found.items()}


def refusals(folder: Path) -> list[str]:
    """Return what is said about arguments that cannot be used."""
    said = []
    for more in (
        {"public_network": "some"},
        {"sandbox": {"fakerot": True}},
        {"mounts": [{"type": "bind", "source": "/tmp", "target": "/host"}]},
    ):
        try:
            environment(folder, "refused", BASE, NetworkMode.PUBLIC, **more)
        except (SandboxConfigError, ValueError) as error:
            said.append(str(error))
    return said


async def main(folder: Path, base: Path) -> dict[str, Any]:
    """Check everything; `base` is the file of the image BASE."""
    (folder / "images").mkdir()
    (folder / "images" / f"{BASE}.sif").symlink_to(base)
    env = environment(folder, "task", BASE, NetworkMode.PUBLIC)
    await env.start(force_build=False)
    try:
        seen = {"commands": await commands(env), "files": await files(env, folder)}
    finally:
        await env.stop(delete=True)
    seen |= {"ends": await ends(folder), "users": await users(folder)}
    return {**seen, "refusals": refusals(folder)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))))
