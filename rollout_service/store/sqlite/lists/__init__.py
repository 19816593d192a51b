"""The lists of the SQLite store: rollouts, the groups of a run, and its history."""
