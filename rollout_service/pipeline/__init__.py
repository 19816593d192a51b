"""The three stages that every rollout passes: init, rollout, evaluate."""
