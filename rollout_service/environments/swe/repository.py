"""A task's repository in a sandbox: made ready for the agent, compared with its start, and patched.

Guarantees:
- The agent finds no commit that came after the task's, and no reference, log or object that leads to one.
- What the agent changed is read with a git folder of our own: its settings, hooks, attributes and index take no part.
- If git fails before the agent, functions raise EnvironmentFailedError; after it, the agent's work counts as nothing.
- Leftovers of the agent, such as a core file or a folder of builds, do not make its repair too long to be graded.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.swe.tasks import SweTask
from sandboxes import ExecResult, Sandbox

GIT_SECONDS = 300.0
PATCH_BYTES = 8 * 1024 * 1024
"""A longer patch counts as none."""
NEW_BYTES = PATCH_BYTES // 2
"""The most bytes of new files in a patch that would be too long; the largest are left out. Binary files take a
quarter more as a patch, and changes of the repository's own files need room too."""
LEFT_OUT = "left out: "
"""Begins the line on new files that are not in a patch."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/miniconda3/bin"

PRELUDE = r"""
set -euo pipefail
repo=$1
place=$(mktemp -d /tmp/.rollout-XXXXXXXXXXXX)
trap 'rm -rf "$place"' EXIT
printf '[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n[maintenance]\n\tauto = false\n' >"$place/.gitconfig"
export HOME=$place
cd "$repo"
"""

START = (
    PRELUDE
    + r"""
base=$2 branch=$3
git() { command git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c advice.detachedHead=false "$@"; }
for name in "$branch" "origin/$branch"; do
    if [ -n "$branch" ] && git rev-parse --quiet --verify "$name^{commit}" >/dev/null; then
        git checkout --quiet --force --detach "$name"
        break
    fi
done
# Some images have one commit of their own on top of the base. Any other commit may be the repair itself.
if [ -n "$base" ] && [ "$(git rev-parse HEAD)" != "$(git rev-parse "$base^{commit}")" ]; then
    git merge-base --is-ancestor "$base" HEAD && [ "$(git rev-list --count "$base..HEAD")" = 1 ] ||
        git reset --quiet --hard "$base"
fi
if [ -s "$place/../$4" ]; then git apply --whitespace=nowarn "$place/../$4"; rm -f "$place/../$4"; fi
"""
)
"""Goes to the commit that the task starts from. Arguments: folder, base, branch, and a patch's name in /tmp."""

FORGET = r"""
if [ "$5" = squash ]; then  # the commits before the bug are its repair
    git add --all
    one=$(git -c user.name=task -c user.email=task@localhost commit-tree -m "Start of the task" "$(git write-tree)")
    git update-ref --no-deref HEAD "$one"
fi
# The agent would find the repair in whatever came later.
head=$(git rev-parse HEAD)
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git symbolic-ref HEAD refs/heads/task
git update-ref --no-deref refs/heads/task "$head"
for remote in $(git remote); do git remote remove "$remote"; done
folder=$(git rev-parse --absolute-git-dir)
rm -rf "$folder/logs" "$folder"/{ORIG_HEAD,FETCH_HEAD,MERGE_HEAD,CHERRY_PICK_HEAD,REVERT_HEAD,AUTO_MERGE} \
    "$folder"/{rebase-merge,rebase-apply,worktrees}
commits() { git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$' || true; }
objects() { git cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l; }
if [ "$(objects)" != "$(git rev-list --objects HEAD | wc -l)" ]; then
    git reflog expire --expire=now --all
    git gc --quiet --prune=now
fi
if [ "$(commits)" != "$(git rev-list --count HEAD)" ]; then
    echo "the repository still has commits from after the task's" >&2
    exit 3
fi
export GIT_INDEX_FILE=$place/index
git read-tree HEAD
git add --all
git write-tree
git rev-parse --path-format=absolute --git-path objects 2>/dev/null || echo "$folder/objects"
"""
"""Removes the future, and prints the tree of the files as they are, and where the objects are."""

ADD = r"""
git add --update --ignore-errors >/dev/null 2>&1 || true
new=() count=0
while IFS= read -r -d '' path; do
    case $path in */) ;; *) new[count]=$path count=$((count + 1)) ;; esac  # a folder is a repository of its own
done < <(git ls-files --others --exclude-standard -z)
if [ "$count" != 0 ]; then
    sizes=($(printf '%s\0' "${new[@]}" | xargs -0 stat -c %s -- 2>/dev/null || true))
    if [ "${#sizes[@]}" = "$count" ]; then
        total=0 left=0 largest=
        while read -r size index; do
            total=$((total + size + 256))  # an empty file is some lines of a patch too
            [ "$total" -gt "$most" ] || continue
            largest=${new[index]} left=$((left + 1))
            unset "new[index]"
        done < <(for index in "${!sizes[@]}"; do echo "${sizes[index]} $index"; done | sort -n)
        if [ "$left" != 0 ]; then
            printf 'left out: %s of %s new files, such as %q\n' "$left" "$count" "$largest" >&2
        fi
    fi
    printf '%s\0' ${new[@]+"${new[@]}"} |
        GIT_LITERAL_PATHSPECS=1 xargs -0 git add --ignore-errors -- >/dev/null 2>&1 || true
fi
"""
"""Adds the agent's changes to the index. If new files have more than $most bytes together, the largest are left out."""

DIFF = (
    PRELUDE
    + r"""
tree=$2 objects=$3 most=$4
git init --quiet --bare --template= "$place/git"
printf '%s\n' "$objects" >"$place/git/objects/info/alternates" 2>/dev/null ||
    { mkdir -p "$place/git/objects/info"; printf '%s\n' "$objects" >"$place/git/objects/info/alternates"; }
mkdir -p "$place/git/info"
printf '* -filter -ident -working-tree-encoding\n' >"$place/git/info/attributes"
export GIT_DIR=$place/git GIT_WORK_TREE=$repo GIT_ATTR_SOURCE=$tree
git config core.bare false
git read-tree "$tree"
"""
    + ADD
    + r"""
git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-renames --no-color \
    --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ "$tree"
"""
)

APPLY = (
    PRELUDE
    + r"""
patch_file=$2 reverse=$3
git apply --whitespace=nowarn $reverse "$patch_file" && exit
command -v patch >/dev/null && patch --batch --fuzz=5 -p1 --dry-run $reverse -i "$patch_file" &&
    patch --batch --fuzz=5 -p1 $reverse -i "$patch_file"
"""
)

SNAPSHOT = (
    PRELUDE
    + r"""
export GIT_INDEX_FILE=$place/index
git read-tree HEAD
git add --all
git write-tree
"""
)
RESTORE = (
    PRELUDE
    + r"""
export GIT_INDEX_FILE=$place/index
git read-tree "$2"
git checkout-index --force --all
git clean --quiet --force -d
"""
)

GIT_ENVIRONMENT = {
    "PATH": PATH,
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


@dataclass(frozen=True, slots=True)
class StartState:
    tree: str
    objects: str


async def make_ready(sandbox: Sandbox, task: SweTask) -> StartState:
    """Remove the repository's future, and files that the agent must not see."""
    result = await _start(sandbox, task, START + FORGET, hide=True)
    tree, objects = result.stdout.decode().split()[-2:]
    return StartState(tree, objects)


async def go_to_start(sandbox: Sandbox, task: SweTask) -> None:
    await _start(sandbox, task, START, hide=False)


async def take_snapshot(sandbox: Sandbox, task: SweTask) -> str:
    """Return a tree's id. Files that git ignores are left out."""
    result = await _run(sandbox, SNAPSHOT, task.folder)
    _require_success(result, f"the files of {task.instance_id} cannot be read")
    return result.stdout.decode().strip()


async def restore_snapshot(sandbox: Sandbox, task: SweTask, tree: str) -> None:
    """Restore the files of a tree; those that git ignores stay."""
    result = await _run(sandbox, RESTORE, task.folder, tree)
    _require_success(result, f"the files of {task.instance_id} cannot be put back")


async def _start(sandbox: Sandbox, task: SweTask, script: str, *, hide: bool) -> ExecResult:
    if hide and task.hidden:
        removed = await sandbox.exec(["rm", "-rf", "--", *task.hidden], cwd="/")
        _require_success(removed, f"the tests of {task.instance_id} cannot be hidden")
    name = f"rollout-{secrets.token_hex(8)}.diff"
    if task.bug and not await _has_branch(sandbox, task):
        await sandbox.write_file(f"/tmp/{name}", task.bug)  # noqa: S108
    squash = "squash" if task.bug else ""
    result = await _run(sandbox, script, task.folder, task.base_commit, task.branch, name, squash)
    _require_success(
        result,
        f"the repository {task.folder} of {task.instance_id} cannot be made ready",
        hint="Check the instance's image, `repo_folder` and `base_commit`. The image needs bash and git.",
    )
    return result


async def _has_branch(sandbox: Sandbox, task: SweTask) -> bool:
    find = "git rev-parse --quiet --verify"
    script = f'{PRELUDE}\n{find} "$2^{{commit}}" || {find} "origin/$2^{{commit}}"'
    return (await _run(sandbox, script, task.folder, task.branch)).exit_code == 0


async def read_changes(sandbox: Sandbox, task: SweTask, start: StartState) -> tuple[bytes, str]:
    """Return a patch of the agent's changes, and a note for people if not all of them count.

    Call it after the agent's processes have ended. A patch is in git's format, with binary files and modes.
    """
    arguments = (task.folder, start.tree, start.objects)
    result = await _run(sandbox, DIFF, *arguments, str(PATCH_BYTES), limit=PATCH_BYTES)
    if result.truncated:
        result = await _run(sandbox, DIFF, *arguments, str(NEW_BYTES), limit=PATCH_BYTES)
    if result.truncated:
        return b"", f"the changes are longer than {PATCH_BYTES} bytes, and count as none"
    if result.exit_code != 0:
        return b"", f"the changes could not be read, and count as none: {_said(result)}"
    lines = result.stderr.decode(errors="replace").splitlines()
    left_out = next((line for line in lines if line.startswith(LEFT_OUT)), "")
    return result.stdout, left_out and f"{left_out}, since the changes are longer than {PATCH_BYTES} bytes"


async def apply_patch(sandbox: Sandbox, task: SweTask, patch: bytes, *, reverse: bool = False) -> str:
    """Return "", or why the patch does not apply."""
    path = f"/tmp/.rollout-{secrets.token_hex(16)}"  # noqa: S108
    await sandbox.write_file(path, patch)
    result = await _run(sandbox, APPLY, task.folder, path, "--reverse" if reverse else "")
    await sandbox.exec(["rm", "-f", "--", path], cwd="/")
    return "" if result.exit_code == 0 else _said(result) or "git gave no reason"


async def _run(sandbox: Sandbox, script: str, *arguments: str, limit: int = 64 * 1024) -> ExecResult:
    return await sandbox.exec(
        ["bash", "--noprofile", "--norc", "-c", script, "bash", *arguments],
        cwd="/",
        env=GIT_ENVIRONMENT,
        timeout=GIT_SECONDS,
        output_limit=limit,
    )


def _require_success(result: ExecResult, problem: str, hint: str = "") -> None:
    if result.exit_code != 0:
        raise EnvironmentFailedError(f"{problem}: {_said(result)}", hint=hint)


def _said(result: ExecResult) -> str:
    if result.timed_out:
        return f"git did not end within {GIT_SECONDS:g} s"
    return (result.stderr + result.stdout).decode(errors="replace").strip()[-1_000:]
