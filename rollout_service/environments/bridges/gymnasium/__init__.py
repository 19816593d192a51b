"""Games of Gymnasium."""
