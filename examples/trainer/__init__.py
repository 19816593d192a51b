"""The parts of the reference trainer: plain PyTorch, short enough to read, and made to be changed."""
