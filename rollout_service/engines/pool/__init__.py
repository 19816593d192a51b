"""Pools of backends: admission, dispatch, health, and weights."""
