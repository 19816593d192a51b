"""Rows of NeMo Gym, answered and verified by its resources servers."""
