"""The rollouts that programs drive: their keys, conversations and answers."""
