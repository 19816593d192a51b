"""Tasks of SWE-bench's family: repair a repository, scored by its hidden tests."""
