"""The OpenAPI document: every route's parameters, responses, and errors."""
