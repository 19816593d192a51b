"""The parts of every sandbox: its control shell, pipes, programs, and files."""
