"""This node among those that share its store: membership, leadership, placement, and how much it runs at once."""
