"""The site of the documentation: the pages of `docs/`, with generated ones for commands, HTTP routes and Python."""
