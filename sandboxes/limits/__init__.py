"""Resource limits: control groups, violations, and the watchdog."""
