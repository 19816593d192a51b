"""Serve an agent of NeMo Gym; this is its `app.py`. The service's address is ROLLOUT_URL."""

from rollout_client.adapters.nemo_gym import agent_class

if __name__ == "__main__":
    agent_class().run_webserver()
