"""What pages and terminals show: the service at a glance, rollouts as rows, and what is stuck."""
