"""E2B's API over the sandboxes of this node, for programs that use the package `e2b` unchanged.

One address serves both parts of the protocol. `control` manages sandboxes; `commands` and `files` answer requests with
the header `E2b-Sandbox-Id`, which at E2B go to a daemon inside the sandbox. Here the host does the work.
"""
