#!/usr/bin/env bash
# Train with ms-swift on rollouts of the service at ROLLOUT_URL. Usage: WEIGHTS=/shared/weights swift_grpo.sh MODEL ROWS
# The rows are JSON Lines of `rollout_client.adapters.swift.rows(tasks)`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
port=8000

python -m rollout_client.adapters.swift --port "$port" & # instead of `swift rollout`
trap 'kill %1' EXIT

swift rlhf --rlhf_type grpo --model "$1" --dataset "$2" --tuner_type full \
    --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$port" \
    --external_plugins "$here/swift_plugin.py" --template rollout_service --use_gym_env true \
    --rollout_importance_sampling_mode token_truncate \
    --num_generations 8 --per_device_train_batch_size 8 --max_completion_length 512 --beta 0
