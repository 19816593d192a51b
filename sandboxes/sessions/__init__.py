"""Persistent bash and Python sessions."""
