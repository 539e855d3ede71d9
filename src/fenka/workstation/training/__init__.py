"""Trainings on this machine: gangs of processes with leases, supervised and recorded."""
