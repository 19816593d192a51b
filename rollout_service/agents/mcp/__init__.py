"""Servers of the Model Context Protocol, whose tools the built-in agent offers to the policy.

The package `mcp` is not used: its releases change their interface, trainers and environments in the same Python pin
different ones, and every read of a hostile server in a sandbox has to be bounded here anyway.
"""
