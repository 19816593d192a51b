"""The server: its lifecycle, the HTTP API, the page for people, and the events, views and hangs that they show."""
