"""Which host runs what."""
