"""Steps of rollouts as a trace that Perfetto opens: rollouts, engines and sandboxes on one time line."""

from rollout_service.tracing.perfetto.trace import RolloutTrace as RolloutTrace
