"""The lines written to a session's bash: a command, and a request to report its end.

Guarantees:
- A report comes once nothing of its command runs any more. An interrupt does not skip it.
- A report leaves `$?` as the command did, and works with options that end the shell at errors.
- If an interrupt arrives while a report is half read, the rest of the report is harmless.

The shell writes the output of commands to descriptor 8, and reports to descriptor 9.
"""

import shlex

REPORT, CODE = "__rollout_report", "__rollout_code"
INTERRUPTED = 128 + 2
# Descriptor 10 is bash's own copy of 7.
TERMINAL = "\\exec 7<>/dev/ptmx && \\exec 255>&- && { \\exec 255<&10; } 7<&-; \\exec 7<&-; (:); "
"""Give the shell a terminal to reset: an interactive bash resets descriptor 255 whenever a signal ends a job.

Without a terminal it writes `tcsetattr: Inappropriate ioctl for device` into the output of `yes | head -1`. Nothing
else uses the terminal. Commands do not inherit it: bash marks its copies of descriptors close-on-exec, and a duplicate
keeps the mark. The subshell makes bash read the state that it will restore. A shell that gets no terminal works too.
"""
SETUP = (
    f"{TERMINAL}set +o history +H; unset HISTFILE PS1 PS2; shopt -u checkwinsize; "
    f'{REPORT}() {{ \\builtin printf \'%s %s\\n\' "$1" "${{{CODE}-{INTERRUPTED}}}" >&9; \\builtin jobs -p >&9; '
    f'\\builtin set -- "${{{CODE}-{INTERRUPTED}}}"; \\builtin unset {CODE}; \\builtin return "$1"; }}\n'
).encode()
"""Define the report: the exit code, and then, while the host goes on, the jobs. It leaves `$?` unchanged."""


def frame_command(command: str, nonce: str) -> bytes:
    """Return the lines that run a command without the session's pipes, followed by a report.

    The shell's own output is /dev/null, opened for reading and writing, and serves as the command's input. Opening
    /dev/null again would take longer than all the rest.
    """
    line = f"eval {shlex.quote(command)} <&1 >&8 2>&8 8>&- 9>&-\n"
    return line.encode("utf-8", "surrogatepass") + frame_report(nonce)


def frame_report(nonce: str) -> bytes:
    """Return the two lines of a report; at the end of the first the shell waits for work that an interrupt left.

    They contain no quotes: an interrupt while they are read leaves only the end of one, which must not open a quote.
    `&&:` keeps a shell that ends at errors from mistaking the reported code for one.
    """
    return f"{CODE}=$?\n{REPORT} {nonce}&&:\n".encode()
