"""The lists of the Redis store: rollouts, the groups of a run, and its history."""
