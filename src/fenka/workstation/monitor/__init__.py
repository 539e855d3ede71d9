"""The daemon's metrics."""
