"""The state of a bash session as a script that gives it to another one.

It has the working folder, the folder stack, umask, variables with their attributes, functions, aliases, traps, options,
positional parameters, soft limits, SECONDS, and `$?`. It lacks `$!`, `$_`, the history, PIPESTATUS and RANDOM's seed.
The script is as hostile as the shell that wrote it, and is run only by a shell of the same kind.
"""

import re
import tarfile
from pathlib import Path
from secrets import token_hex

from sandboxes.errors import SandboxUnsavedError

MEMBER = "bash"
MAX_BYTES = 1 << 20
"""A shell reads its input byte by byte, so a longer script would take it a second."""
MORE_BYTES = 4096
"""A script is longer than what its shell has printed, by its limits."""
DUMP_SECONDS = 10.0

# Only builtins: what programs the image has, and what PATH finds, does not matter. No subshell per variable, and no
# process substitution, which would change `$!`.
_OWN = (
    "BASH|BASHOPTS|BASHPID|BASH_*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OLDPWD|OPTIND|PIPESTATUS|"
    "PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|__rollout_*"
)
_OPTIONS = (
    "allexport braceexpand errexit errtrace functrace hashall histexpand ignoreeof interactive-comments keyword "
    "noclobber noglob nolog notify nounset physical pipefail posix verbose xtrace"
)
"""Those of `set -o`. Turning off `emacs` or `vi` would make bash read its commands from the redirected input."""
_DUMP = rf"""__rollout_was=$? __rollout_set=:$SHELLOPTS: __rollout_traps=$(\builtin trap -p)
\builtin trap - DEBUG ERR RETURN; \builtin set +efuvx
\builtin mapfile -t __rollout_names <<<"$(\builtin compgen -v)"
{{ [[ . -ef $PWD ]] && \builtin printf 'begin %s\n' NONCE
\builtin printf 'for __rollout_name in $(compgen -e); do case " '; \builtin printf '%s ' "${{__rollout_names[@]}}"
\builtin printf '" in *" $__rollout_name "*) ;; *) unset -v "$__rollout_name";; esac; done; unset __rollout_name\n'
\builtin shopt -p; \builtin umask -p
for __rollout_name in "${{__rollout_names[@]}}"; do
  case $__rollout_name in {_OWN}) ;; *) \builtin declare -p -- "$__rollout_name" ;; esac
done
\builtin declare -f; \builtin declare -Fx; \builtin declare -Fr
\builtin printf 'cd -- %q && OLDPWD=%q\n' "$PWD" "${{OLDPWD-}}"
for ((__rollout_name = ${{#DIRSTACK[@]}} - 1; __rollout_name > 0; __rollout_name--)); do
  \builtin printf 'pushd -n -- %q\n' "${{DIRSTACK[__rollout_name]/#\~/$HOME}}"
done
\builtin printf 'SECONDS=%s; OPTIND=%s; set --' "$SECONDS" "${{OPTIND-1}}"
(($#)) && \builtin printf ' %q' "$@"
\builtin printf '\n%s\n' "$__rollout_traps"
\builtin alias -p
for __rollout_name in {_OPTIONS}; do
  case $__rollout_set in *:$__rollout_name:*) \builtin printf '\\builtin set -o %s\n' "$__rollout_name" ;;
    *) \builtin printf '\\builtin set +o %s\n' "$__rollout_name" ;; esac
done
\builtin printf '[[ $- == *e* ]] || (exit %s)\n' "$__rollout_was"
\builtin printf 'limits %s\n' NONCE; \builtin ulimit -Sa; \builtin printf 'end %s\n' NONCE; }} 2>/dev/null
\builtin eval "$__rollout_traps"; __rollout_names=("$__rollout_was" "$__rollout_set")
\builtin unset __rollout_was __rollout_set __rollout_traps __rollout_name
for __rollout_name in errexit noglob nounset verbose xtrace; do
  case ${{__rollout_names[1]}} in *:$__rollout_name:*) \builtin set -o "$__rollout_name" ;; esac
done 2>/dev/null
[[ $- == *e* ]] || (exit "${{__rollout_names[0]}}")"""
_LIMIT = re.compile(r"\((?:[^()\n]*, )?-([a-zA-Z])\) +(\d+|unlimited)$", re.MULTILINE)
"""The text is the sandbox's: each character is looked at a bounded number of times, however many parentheses it has."""
_FIXED = frozenset("p")
"""Limits that cannot be set."""


def make_dump() -> tuple[str, str]:
    """Return a command that describes its shell, and the nonce for `parse_dump`."""
    nonce = token_hex(8)
    return _DUMP.replace("NONCE", nonce), nonce


def parse_dump(output: str, nonce: str) -> bytes:
    """
    Raises:
        SandboxUnsavedError: The shell has something that no script gives to another.
    """
    _, found, text = output.partition(f"begin {nonce}\n")
    script, limited, text = text.partition(f"limits {nonce}\n")
    limits, ended, _ = text.partition(f"end {nonce}\n")
    if not (found and limited and ended) or "\ufffd" in script:
        raise SandboxUnsavedError("the shell did not describe its state")
    soft = "".join(f"ulimit -S -{flag} {value}\n" for flag, value in _LIMIT.findall(limits) if flag not in _FIXED)
    return (soft + script).encode("utf-8", "surrogateescape")


def archive_state(script: bytes) -> bytes:
    member = tarfile.TarInfo(MEMBER)
    member.size = len(script)
    return member.tobuf() + script + bytes(-len(script) % tarfile.BLOCKSIZE)


def read_state(archive: Path) -> bytes:
    """
    Raises:
        OSError: The archive cannot be read.
    """
    try:
        with tarfile.open(archive, "r:") as members:
            member = members.next()
            content = members.extractfile(member) if member is not None and member.name == MEMBER else None
            if content is not None:
                return content.read(MAX_BYTES + MORE_BYTES)
    except tarfile.TarError as error:
        raise OSError(f"{archive} is damaged: {error}") from error
    raise OSError(f"{archive} does not begin with the state of a shell")
