"""Environments, which turn a task into an episode: built-in ones and plug-ins."""
