"""Serves policies to agents."""
