"""Adapters that plug into a trainer's own hook, to get its rollouts from the service. The trainer is unchanged.

With each, ids, log-probabilities and versions reach the trainer as the engine returned them; a token that the policy
did not sample has mask 0; a rollout without a reward is never trained on, and never gets a made-up reward. Importing an
adapter requires neither the trainer nor torch.

| module | the trainer's own hook |
|---|---|
| `trl` | `rollout_func` of GRPOTrainer |
| `verl` | an agent loop |
| `slime` | a custom generate function |
| `skyrl` | a generator |
| `areal` | a rollout workflow |
| `openrlhf` | an agent executor |
| `nemo_gym` | an agent server of NeMo Gym, which is how NeMo-RL gets rollouts |
| `tinker` | groups and a strategy of the Tinker cookbook |
| `verifiers` | an environment and a taskset of verifiers, which is how prime-rl gets rollouts |
| `swift` | the routes of ms-swift's `swift rollout` |
"""
