"""The service as jobs of Slurm: rendering, submitting and watching them, and the programs that run within them."""
