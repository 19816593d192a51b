"""Games of GEM."""
