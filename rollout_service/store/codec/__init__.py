"""How records become bytes and rows, for any store."""
