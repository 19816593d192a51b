"""Names of pages for addresses."""

import re


def slugify(title: str) -> str:
    """Return a title in lower case, with a dash between its words."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))
