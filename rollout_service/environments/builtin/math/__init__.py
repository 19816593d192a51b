"""Mathematical questions with boxed answers."""
