"""What the sub-agents of an episode run on: slots, engines of frozen pools, and sandboxes."""
