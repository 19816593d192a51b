"""From served turns to training data: parts of sessions, and their delivery to runs."""
