"""What every sandbox is made of: its control shell, pipes, programs, and files."""
