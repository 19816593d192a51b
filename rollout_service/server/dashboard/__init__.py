"""The page for people: static files that read the API as any other client does."""
