"""Containers on one machine: the daemon's side of their hook."""
