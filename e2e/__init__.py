"""A real Kubernetes on this machine, each node in namespaces of its own, and tests against it."""
