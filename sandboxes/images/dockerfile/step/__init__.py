"""Do one step of a build in namespaces of its own: run a program in an image, read or write its files, or pack it.

Its arguments are JOB and REPORT: JOB is a descriptor of a JSON document, and to the descriptor REPORT goes one line of
JSON with `exit`, or with `error` or `full`. `namespace.py` writes the job and reads the report.

The step is root in a user namespace without rights on the host, and in its mount namespace the layers of the image are
an overlay. A program of the image, and whatever reads or writes the image's files, runs below that as process 1 of a
process namespace, without the host's files and most capabilities. Everything ends with this process, and this process
with the one that started it.

It runs `alone`, so calls of the kernel go through ctypes. Each module imports others at the start: later, the files of
Python are gone.
"""


class StepError(Exception):
    """A step that cannot be done, for a reason that its author can change."""
