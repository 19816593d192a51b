"""A request while it is served: its body, and its client."""
