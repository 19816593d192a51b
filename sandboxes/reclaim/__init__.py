"""Removes the remains of sandboxes, even after a crash. Standard library only."""
