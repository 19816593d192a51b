"""The store of live sessions in one SQLite file."""
