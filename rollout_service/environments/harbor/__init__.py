"""Tasks in Harbor's format, such as Terminal-Bench's, as environments."""
