"""How live sessions are served: their requests, limits, and engines."""
