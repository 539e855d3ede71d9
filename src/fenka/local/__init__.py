"""What users run on a workstation: programs, trainings, services and notebooks, as clients of the daemon."""
