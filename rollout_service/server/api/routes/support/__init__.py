"""Helpers that the routes share."""
