"""Agents that are programs of their own: how each is started in a sandbox, and pointed to the gateway."""
