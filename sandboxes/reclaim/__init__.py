"""Removes what sandboxes leave behind, even after a crash. Standard library only."""
