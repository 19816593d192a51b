"""Names of pages for addresses."""


def slugify(title: str) -> str:
    """Return a title in lower case, with a dash between its words."""
    return title.lower().replace(" ", "-")
