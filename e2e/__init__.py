"""Run a real Kubernetes on this machine, each node in its own namespaces, and test against it."""
