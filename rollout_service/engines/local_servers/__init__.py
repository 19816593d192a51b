"""Engine servers that run on this machine, as child processes."""
