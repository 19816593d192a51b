"""The record of what rollouts did and waited for: kept in the store, and written for the tools that show timelines."""
