"""This host: its identity, its sandboxes, and how much it runs at once."""
