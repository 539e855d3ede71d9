"""Commands that give containers of this machine slices."""
