"""A tenant with the ClusterRole `edit` in one namespace, and what it writes: with the admission policy and without."""
