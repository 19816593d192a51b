"""The wire models of the HTTP API, as strict pydantic models.

Guarantees: the package imports nothing else of the project, so a trainer can use it without the server. Every model
refuses unknown fields: a misspelled field is an error and is never silently ignored.
"""
