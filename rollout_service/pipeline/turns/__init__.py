"""The turns that an interrupted rollout continues from: saved while it works, played when it begins again."""
