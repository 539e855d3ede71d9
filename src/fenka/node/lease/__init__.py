"""Leases: which pod holds which card, and the files that enforce it."""
