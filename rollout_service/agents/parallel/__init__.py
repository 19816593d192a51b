"""An agent that hands work to frozen sub-agents, which run at the same time."""
