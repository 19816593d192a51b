"""Inference engines: their contract and kinds, pools of them, and the policies that they serve to agents."""
