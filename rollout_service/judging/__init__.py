"""Judges: models that score a text by a rubric."""
