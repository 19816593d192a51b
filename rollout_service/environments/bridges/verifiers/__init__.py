"""Tasks of verifiers."""
