"""The code that made the shipped tiny policies. It needs torch, which the service itself does not."""
