"""The commands: `fenka …`."""
