"""Trainings, services and notebooks on a cluster or on this machine, behind one interface."""
