"""Weight updates, pauses, and aborts across a pool."""
