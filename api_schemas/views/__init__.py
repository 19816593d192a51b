"""The views that pages and terminals show: an overview of the service, rollouts as rows, and hangs."""
