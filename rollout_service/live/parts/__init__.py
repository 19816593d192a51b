"""From served turns to training data: what is usable, parts of sessions, and their delivery to runs."""
