"""Describes what people run, and starts it as local processes."""
