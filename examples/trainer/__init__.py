"""The parts of the reference trainer: plain PyTorch, short enough to read, made to be changed."""
