"""The built-in tool-calling agent."""
