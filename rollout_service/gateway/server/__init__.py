"""The HTTP server of the gateway, which has a listener and keys of its own."""
