"""The record of the steps of rollouts: kept in the store, and written for the tools that show timelines."""
