"""Screens of all that runs: `fenka ps`, `fenka top` and its live form."""
