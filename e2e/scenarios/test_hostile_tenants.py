"""A tenant with the role `edit` in one namespace: with the admission policies, and without."""
