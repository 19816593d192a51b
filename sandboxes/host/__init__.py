"""What this machine offers: users, processes, and facts about the kernel."""
