"""The judge of served turns: rules before it, its votes, and hints in hindsight."""
