"""The scheduler extender: kube-scheduler asks where pods that share cards may go, and has them bound."""
