"""From served turns to training data: usable turns, parts of sessions, and their delivery to runs."""
