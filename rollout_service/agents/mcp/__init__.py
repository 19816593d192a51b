"""Servers of the Model Context Protocol, whose tools the built-in agent offers to the policy.

The small part of the protocol that tools need is spoken here and not by the package `mcp`: its releases change their
interface and are pinned to different ones by the trainers and environments that this service is installed beside, and
the messages of a server in a sandbox are hostile, so every read has to be bounded here anyway.
"""
