"""Amazon: Auto Scaling groups and EC2 fleets. docs/autoscaling.md has the rights and settings needed."""
