"""Small modules that every other package may import: errors, ids, signals, safe texts and files."""
