"""Arithmetic with a Python tool."""
