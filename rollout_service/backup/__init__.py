"""All that a service would miss, as files in one folder, and back: for one node, for many, and for a job of Slurm."""
