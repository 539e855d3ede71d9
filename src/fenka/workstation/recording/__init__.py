"""Records what the daemon's jobs and cards do over time."""
