"""Where sandboxes run: Apptainer, Docker, or this host without isolation."""
