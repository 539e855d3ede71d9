"""Commands about services, of a cluster or of this machine."""
