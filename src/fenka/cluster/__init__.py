"""A cluster as values: objects, state, eligibility, pod groups, disruption budgets. No clock, no I/O."""
