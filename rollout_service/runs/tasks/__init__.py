"""Where the tasks of runs come from, and in which order they are taken."""
