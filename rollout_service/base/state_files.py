"""The files that a service keeps in its state folder, by their treatment in a backup.

Guarantee: whatever else is in a state folder matters only to the process that wrote it, or only on that machine.
"""

from __future__ import annotations

STORE = "rollouts.sqlite3"
"""Rollouts, runs and events of a service that shares them with nobody."""
LIVE_STORE = "live.sqlite3"
"""Live sessions."""
USERS_SALT = "live-users.salt"
"""The salt of users' hashes. Without it, the sessions of a user cannot be found any more."""
CANARIES = "live-canaries.json"
"""The pools that try candidates in live sessions."""
BACKENDS = "backends.json"
"""The engines that were registered."""

DATABASES = (STORE, LIVE_STORE)
"""Files that are copied by SQLite, since a plain copy of one that is written is torn."""
DOCUMENTS = (USERS_SALT, CANARIES, BACKENDS)
"""Files that are replaced as a whole, and so are whole at any time."""
