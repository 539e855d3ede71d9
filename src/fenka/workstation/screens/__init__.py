"""Answers to those who look at this machine: its state, and what would help pending requests."""
