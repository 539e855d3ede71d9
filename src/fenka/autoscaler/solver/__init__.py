"""Plans by integer programming: patterns, node counts and cuts (docs/autoscaling.md)."""
