"""Agents that are programs: how each is started in a sandbox, and pointed to the gateway."""
