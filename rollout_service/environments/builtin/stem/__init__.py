"""Questions of science and engineering, scored by rules first and by a judge for the rest."""
