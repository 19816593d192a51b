"""Live sessions: served traffic that becomes training data where its users agree."""
