"""Sums of values behind two look-ups each: work that divides into equal, independent parts."""
