"""The judge of served turns: its votes, rules that decide before it, and hints in hindsight."""
