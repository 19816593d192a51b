"""The rollouts that programs drive: their keys, their conversations, and the answers being sampled."""
