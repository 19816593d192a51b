"""Stand-ins for engines and models, for tests and benchmarks: a scripted engine, a random checkpoint."""
