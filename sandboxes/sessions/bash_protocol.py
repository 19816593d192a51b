"""What is said to a session's bash on its standard input: a command, and a request to report its end.

Guarantees:
- A report comes once nothing of its command runs any more, also after an interrupt, which does not skip it.
- It leaves `$?` as the command did, and holds with options that end the shell at errors.
- What an interrupt leaves of a report that it meets half read is harmless.

The session gives the shell descriptor 8 for the output of commands, and 9 for reports.
"""

import shlex

REPORT, CODE = "__rollout_report", "__rollout_code"
INTERRUPTED = 128 + 2
# Descriptor 10 is bash's own copy of 7.
TERMINAL = "\\exec 7<>/dev/ptmx && \\exec 255>&- && { \\exec 255<&10; } 7<&-; \\exec 7<&-; (:); "
"""Give the shell a terminal to reset, which an interactive bash does on descriptor 255 whenever a signal ends a job.

Without one it writes `tcsetattr: Inappropriate ioctl for device` into the output of `yes | head -1`. Nothing else uses
the terminal. Commands do not inherit it: bash marks its copies of descriptors close-on-exec, and a duplicate keeps the
mark. The subshell has bash read the state that it will restore. A shell that gets no terminal works as well.
"""
SETUP = (
    f"{TERMINAL}set +o history +H; unset HISTFILE PS1 PS2; shopt -u checkwinsize; "
    f'{REPORT}() {{ \\builtin printf \'%s %s\\n\' "$1" "${{{CODE}-{INTERRUPTED}}}" >&9; \\builtin jobs -p >&9; '
    f'\\builtin set -- "${{{CODE}-{INTERRUPTED}}}"; \\builtin unset {CODE}; \\builtin return "$1"; }}\n'
).encode()
"""The report: the code, and then, while the host goes on, the jobs. It leaves `$?` as the command left it."""


def frame_command(command: str, nonce: str) -> bytes:
    """The command with none of the session's own pipes, and then a report that an interrupt does not skip.

    The shell's own output is /dev/null, open for both ways: to open it again takes longer than all the rest of this.
    """
    line = f"eval {shlex.quote(command)} <&1 >&8 2>&8 8>&- 9>&-\n"
    return line.encode("utf-8", "surrogatepass") + frame_report(nonce)


def frame_report(nonce: str) -> bytes:
    """Two lines: at the end of the first the shell waits for what an interrupt made it leave alone.

    Without quotes: an interrupt while they are read leaves the end of one, which must not open what nothing closes.
    `&&:` keeps a shell that ends at errors from taking the code that is reported for one.
    """
    return f"{CODE}=$?\n{REPORT} {nonce}&&:\n".encode()
