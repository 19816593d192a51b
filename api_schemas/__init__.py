"""What crosses the wire: strict pydantic models, importing nothing else of the project.

A trainer can install and import this package alone. Every model refuses unknown fields, so a misspelt
field is a clear error and never a silently ignored wish.
"""
