"""A shell in a grader's place opens at its first program after its files were copied in."""

import pytest

from rollout_service.cli.env.shell import GradersSandbox
from sandboxes import LocalConfig, SandboxSpec, make_provider

pytestmark = pytest.mark.slow


async def test_the_first_program_after_the_files_were_copied_is_told_with_its_variables(tmp_path):
    begun = []

    async def begin(env):
        begun.append(env)

    provider = make_provider(LocalConfig(provider="local"), tmp_path)
    async with await provider.start(SandboxSpec(image="base")) as own:
        sandbox = GradersSandbox(own, begin)
        await sandbox.exec(["mkdir", "tests"])
        assert begun == []
        await sandbox.write_file("tests/test.sh", "exit 3")
        assert (await sandbox.exec(["bash", "tests/test.sh"], env={"RESULT": "here"})).exit_code == 3
        assert begun == [{"RESULT": "here"}]
        assert sandbox.workdir == own.workdir
    await provider.close()
