"""Environments of other libraries. Each library runs in a process, and from a virtual environment, of its own."""
