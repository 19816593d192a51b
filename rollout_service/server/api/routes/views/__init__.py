"""Routes that show the service and its rollouts to people: pages and terminals read them."""
