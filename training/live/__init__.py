"""The third task: to answer the short questions of a user, in a session of a few turns."""
