"""Tools that reach out: pages through the sandbox's network, and searches through a configured service."""
