"""What is seen of the things that rollouts wait for: engines, sandboxes, the store, and what holds others back."""
