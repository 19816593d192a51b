"""Traces of rollouts for an OpenTelemetry collector; nothing of OpenTelemetry is imported unless they are asked for."""
