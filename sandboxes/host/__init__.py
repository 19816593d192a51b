"""This machine: its users, its processes, and facts about its kernel."""
