"""Runs Jupyter in a container or a lease. The file is mounted in pods, so it imports nothing of fenka."""
