"""The image of an Apptainer sandbox can be changed like any disk, also by rename(2) if the service runs as root."""

import os

import pytest

from sandboxes import ApptainerConfig, SandboxSpec, make_provider

pytestmark = pytest.mark.apptainer

CHANGE = """
set -eu
rm -r /usr/share/doc
test ! -e /usr/share/doc
mkdir /usr/share/doc
test -z "$(ls -A /usr/share/doc)"
mv /usr/share/perl5 /workspace/perl5
test ! -e /usr/share/perl5
ls /workspace/perl5/Debconf
"""
RENAME = "import os; os.rename('/usr/share/bash-completion', '/usr/share/renamed')"


async def test_folders_of_the_image_are_removed_and_renamed(tmp_path):
    provider = make_provider(ApptainerConfig(), tmp_path)
    try:
        assert provider.known_failures == {}
        async with await provider.start(SandboxSpec()) as sandbox:
            changed = await sandbox.exec(["bash", "-c", CHANGE])
            assert changed.exit_code == 0, changed.stderr
            renamed = await sandbox.exec(["python3", "-c", RENAME])
            expected = b"" if os.geteuid() == 0 else b"Invalid cross-device link"
            assert expected in renamed.stderr
            assert renamed.exit_code == (0 if os.geteuid() == 0 else 1)
        async with await provider.start(SandboxSpec()) as sandbox:
            untouched = await sandbox.exec(["ls", "/usr/share/doc", "/usr/share/perl5/Debconf"])
            assert untouched.exit_code == 0, "the next sandbox has the image as it was"
    finally:
        await provider.close()
