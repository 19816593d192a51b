"""Run a command on a pseudo-terminal of this sandbox, and carry bytes between it and standard input and output.

The program is given to the sandbox's Python as text, so it uses nothing newer than Python 3.6. On standard input it
takes frames: the lines and columns of the window, 0 if they are as before, then the length of the keys, and the keys.
It ends with the command, and the command ends with its input.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios

FRAME = struct.Struct("!HHI")
READY = b"\0"
"""Written first, once there is a terminal."""
READ_SIZE = 65536
MOST_PENDING = 65536
"""No more keys are read while so many wait for the command."""
NOT_FOUND = 127


def main() -> None:
    lines, columns, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ended = watch_children()
    child, master = pty.fork()
    if child == 0:
        set_size(0, lines, columns)
        try:
            os.execvp(command[0], command)  # noqa: S606  there is no shell
        except OSError as error:
            os.write(2, ("%s: %s\r\n" % (command[0], error.strerror)).encode())  # noqa: UP031
            os._exit(NOT_FOUND)
    os.set_blocking(master, False)
    write_all(1, READY)
    relay(master, ended)
    os.close(master)
    status = os.waitpid(child, 0)[1]
    sys.exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def watch_children() -> int:
    """Return a descriptor that is readable once a child has ended.

    The terminal alone does not tell: background processes of the command may still have it open.
    """
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told)
    return ended


def relay(master: int, ended: int) -> None:
    """Carry bytes until the command or the input ends."""
    frames = keys = b""
    while True:
        sources = [master, ended, 0] if len(keys) < MOST_PENDING else [master, ended]
        readable, writable, _ = select.select(sources, [master] if keys else [], [])
        if master in readable:
            try:
                shown = os.read(master, READ_SIZE)
            except OSError:  # EIO: the command has ended
                return
            write_all(1, shown)
        elif ended in readable:
            return
        if master in writable:
            keys = keys[os.write(master, keys) :]
        if 0 in readable:
            data = os.read(0, READ_SIZE)
            if not data:
                return
            typed, frames = take_frames(frames + data, master)
            keys += typed


def take_frames(data: bytes, master: int) -> "tuple[bytes, bytes]":
    """Obey whole frames; return their keys, and the data after them."""
    keys = b""
    while len(data) >= FRAME.size:
        lines, columns, length = FRAME.unpack_from(data)
        end = FRAME.size + length
        if len(data) < end:
            break
        if lines or columns:
            set_size(master, lines, columns)
        keys += data[FRAME.size : end]
        data = data[end:]
    return keys, data


def set_size(terminal: int, lines: int, columns: int) -> None:
    """Set the size of a terminal's window; its programs get a SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    main()
