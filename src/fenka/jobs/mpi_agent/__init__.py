"""Files that MPI's pods are given: the launch agent, which imports nothing of fenka."""
