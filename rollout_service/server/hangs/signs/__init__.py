"""The signs of life of engines, sandboxes and the store, and the causes that hold waits back."""
