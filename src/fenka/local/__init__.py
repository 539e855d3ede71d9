"""The programs, trainings, services and notebooks of a workstation's users, as clients of the daemon."""
