"""Judges: models that decide, by a rubric, how good a text is."""
