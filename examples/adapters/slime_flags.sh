# Flags for slime: add them to its training script, and ROLLOUT_URL to the environment of its Ray job.
SERVICE_ARGS=(
    --custom-generate-function-path rollout_client.adapters.slime.generate
    --dynamic-sampling-filter-path rollout_client.adapters.slime.scored
    --custom-reward-post-process-path rollout_client.adapters.slime.normalized
    --metadata-key metadata # each row: {"prompt": ..., "metadata": {"environment": ..., "instance": {...}}}
)
