"""The calls of the client, by purpose; `RolloutClient` has all of them."""
