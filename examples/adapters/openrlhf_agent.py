"""For OpenRLHF: `--train.agent_func_path examples/adapters/openrlhf_agent.py`, the service's address in ROLLOUT_URL."""

from rollout_client.adapters.openrlhf import agent_executor

AgentExecutor = agent_executor()
