"""Rollouts and events in Redis: `changes` has the part of the store that concerns them, `reading` what only reads."""
