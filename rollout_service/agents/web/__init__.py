"""Tools that reach out: pages through the sandbox's own network, and searches through a configured service."""
