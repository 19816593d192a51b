"""Training on live sessions: values of turns, and hints in hindsight, as advantages of single tokens."""
