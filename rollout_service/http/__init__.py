"""The HTTP server: connections, heads, hosts, keys, and TLS."""
