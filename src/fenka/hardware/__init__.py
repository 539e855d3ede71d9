"""Cards as the driver shows them, real or simulated."""
