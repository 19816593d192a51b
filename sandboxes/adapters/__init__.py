"""Sandboxes behind the interfaces of other programs."""
