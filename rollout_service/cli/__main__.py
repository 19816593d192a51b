"""`python -m rollout_service.cli` is `rollout-service`."""

from rollout_service.cli import app

app(prog_name="rollout-service")
