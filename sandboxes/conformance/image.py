"""The image's files: code may remove, rename and recreate folders of the image as on any disk.

Only folders of an image are touched: a provider without isolation has none.
"""

import tempfile

from sandboxes.conformance.expectations import expect, said
from sandboxes.contract import Sandbox, SandboxProvider

MOST = 4

FIND = r"""
shopt -s nullglob
for folder in /usr/share/*/; do
  folder=${folder%/}
  [[ -w $folder && ! -L $folder ]] || continue
  for file in "$folder"/[a-z]*/[a-z]*; do
    [[ -f $file && ! -L $file && -w ${file%/*} && ! -L ${file%/*} ]] && echo "$folder" && continue 2
  done
done
"""
"""Prints folders with a subfolder that holds a file, where code may change all three."""

REMOVE = r"""
set -eu -o pipefail
folder=$1
cd "$folder"
for file in [a-z]*/*; do [[ ! -f $file ]] || break; done
sub=${file%/*}
rm "$file"
[[ ! -e $file ]]
rm -r "$sub"
mkdir "$sub"
[[ -z $(ls -A "$sub") ]]
echo new >"$file"
[[ $(ls -A "$sub") == "${file##*/}" && $(cat "$file") == new ]]
cd ..
rm -r "$folder"
[[ ! -e $folder ]]
mkdir "$folder"
[[ -z $(ls -A "$folder") ]]
mkdir "$folder/$sub"
[[ -z $(ls -A "$folder/$sub") ]]
rmdir "$folder/$sub" "$folder"
"""

RENAME = r"""
set -eu -o pipefail
folder=$1 away=$2
content() { (cd "$1" && ls -AR && cat -- */[a-z]* 2>/dev/null | cksum) || true; }
before=$(content "$folder")
mv "$folder" "$folder.renamed"
[[ ! -e $folder && $(content "$folder.renamed") == "$before" ]]
mkdir "$folder"
[[ -z $(ls -A "$folder") ]]
mv "$folder.renamed" "$folder/deeper"
[[ ! -e $folder.renamed && $(content "$folder/deeper") == "$before" ]]
mv "$folder/deeper" "$away"
[[ -z $(ls -A "$folder") && $(content "$away") == "$before" ]]
rmdir "$folder"
mv "$away" "$folder"
[[ ! -e $away && $(content "$folder") == "$before" ]]
rm -r "$folder"
[[ ! -e $folder ]]
"""


async def image_folders_removed(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Folders of the image that code may write, and files in them, can be removed; one made again is empty."""
    for folder in await _folders(sandbox, provider):
        await _succeeds(sandbox, REMOVE, folder)


async def image_folders_renamed(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Folders of the image that code may write can be renamed and moved, and keep their files."""
    for number, folder in enumerate(await _folders(sandbox, provider)):
        await _succeeds(sandbox, RENAME, folder, f"{sandbox.workdir}/away{number}")


async def _folders(sandbox: Sandbox, provider: SandboxProvider) -> list[str]:
    """Return folders of the image that code may write.

    There are none if the image's files belong to another user than the code's, as with Docker.

    Raises:
        ConformanceError: The folders could be the host's.
    """
    if not provider.isolates:
        return []
    await _require_own_files(sandbox)
    return (await said(sandbox, FIND)).splitlines()[:MOST]


async def _require_own_files(sandbox: Sandbox) -> None:
    """Require that the sandbox does not see the host's files, before any are removed."""
    with tempfile.NamedTemporaryFile(prefix="rollout-host-", dir="/tmp") as file:
        result = await sandbox.exec(["test", "-e", file.name])
        expect(result.exit_code == 1, "the host's files are visible inside, so nothing was removed")


async def _succeeds(sandbox: Sandbox, script: str, *arguments: str) -> None:
    result = await sandbox.exec(["bash", "-xc", script, "-", *arguments], timeout=60)
    expect(result.exit_code == 0, (arguments, result.stderr.decode(errors="replace")[-500:]))
