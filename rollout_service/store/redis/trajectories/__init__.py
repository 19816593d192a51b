"""Where the trajectories of a Redis store are: in Redis, or in segment files of a shared folder."""
