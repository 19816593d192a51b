"""Tasks of reasoning-gym."""
