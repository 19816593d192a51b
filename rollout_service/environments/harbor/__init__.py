"""Tasks in Harbor's format, such as Terminal-Bench's, as environments."""

FILE_NAME = "task.toml"
"""The file that makes a folder a task."""
