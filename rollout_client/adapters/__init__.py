"""Adapters: what a trainer plugs in so that its rollouts come from the service, with no change in the trainer.

Guarantees of each: ids, log-probabilities and versions reach the trainer as the engine gave them; a token that the
policy did not sample has mask 0; a rollout without a reward is never trained on, nor given one that nobody earned.
Importing one needs what the client needs (httpx, pydantic, anyio) and neither the trainer, torch, nor the server.

| module | the trainer's own hook |
|---|---|
| `trl` | `rollout_func` of GRPOTrainer |
| `verl` | an agent loop |
| `slime` | a custom generate function |
| `skyrl` | a generator |
| `areal` | a rollout workflow |
| `openrlhf` | an agent executor |
| `nemo_gym` | an agent server of NeMo Gym, which is how NeMo-RL gets rollouts |
"""
