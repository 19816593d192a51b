"""The serving of live sessions: requests, limits, and engines."""
