"""Amazon: Auto Scaling groups and EC2 fleets. docs/do/autoscale-aws.md has the rights and settings needed."""
