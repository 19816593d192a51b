"""The former path of `rollout_client.adapters`; trainers' configuration files name its modules."""
