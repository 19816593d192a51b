"""Routers, which decide which backend of a pool serves a request, behind a small protocol."""
