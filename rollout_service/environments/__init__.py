"""What turns a task into an episode: environments, built-in and plugged in."""
