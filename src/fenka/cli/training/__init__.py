"""Commands about training jobs, of a cluster or of this machine."""
