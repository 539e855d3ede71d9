"""The autoscaler: which nodes pending requests need, exact at card level."""
