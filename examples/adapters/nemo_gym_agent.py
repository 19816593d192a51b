"""For NeMo Gym: the `app.py` of an agent of its own, with the service's address in ROLLOUT_URL."""

from rollout_client.adapters.nemo_gym import agent_class

if __name__ == "__main__":
    agent_class().run_webserver()
