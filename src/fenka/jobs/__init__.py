"""What people run: programs and notebooks, rendered to local processes."""
