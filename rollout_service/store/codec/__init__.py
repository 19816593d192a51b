"""How records are stored as bytes."""
