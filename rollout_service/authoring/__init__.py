"""Tools for authors of environments: reward hacks, audits of tasks, and a server for clients of OpenEnv."""
