"""The OpenAPI document: what every route takes, what it answers, and how it refuses."""
