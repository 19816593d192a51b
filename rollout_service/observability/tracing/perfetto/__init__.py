"""Steps of rollouts as a trace that Perfetto opens: rollouts, engines and sandboxes on one time line."""

from rollout_service.observability.tracing.perfetto.trace import RolloutTrace as RolloutTrace
