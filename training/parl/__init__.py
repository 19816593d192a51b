"""The second task of `training`: an orchestrator and its sub-agents, for the environments `pointers` and `split`."""
