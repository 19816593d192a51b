"""The client of the rollout service: what a trainer installs."""
