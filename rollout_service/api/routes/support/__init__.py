"""What the routes share."""
