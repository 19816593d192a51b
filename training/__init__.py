"""How the shipped tiny policies were made; needs torch, which the service itself does not."""
