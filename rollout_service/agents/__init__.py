"""Agents: the loop that drives a policy with tools."""
