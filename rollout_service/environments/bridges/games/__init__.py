"""Games of libraries: each is played in the sandbox of its agent, turn by turn."""
