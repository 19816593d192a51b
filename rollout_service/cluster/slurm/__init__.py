"""The service as jobs of Slurm: rendering, submitting and watching them, and what runs within them."""
