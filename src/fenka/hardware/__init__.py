"""Cards as the driver shows them, and the simulated node that stands in for hardware."""
