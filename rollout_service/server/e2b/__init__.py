"""E2B's API over the sandboxes of this node, for programs that use the package `e2b` unchanged.

One address serves both parts of E2B's protocol: the API for sandboxes (`control`), and what a daemon answers in each of
E2B's sandboxes (`commands`, `files`), which is told apart by the header `E2b-Sandbox-Id`. No daemon runs inside: it is
all done from the host.
"""
