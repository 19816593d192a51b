"""The type of a prompt of ids."""

TokensPrompt = dict
