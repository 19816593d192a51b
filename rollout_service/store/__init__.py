"""The durable store: rollouts, results, events, and the queue."""
