"""Stands in for flash-attn's package of this name."""
