"""Monitoring: card health, usage, violations, metrics, and compute feedback."""
