"""Agent executor for OpenRLHF: `--train.agent_func_path examples/adapters/openrlhf_agent.py`.

The service's address is ROLLOUT_URL.
"""

from rollout_client.adapters.openrlhf import agent_executor

AgentExecutor = agent_executor()
