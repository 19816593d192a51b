"""The image store: sources, builds, facts, and eviction."""
