"""The HTTP server: connections, request limits, allowed hosts, keys, and TLS."""
