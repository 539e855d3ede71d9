"""What a process must be given to hold a slice, and the reader of what it uses."""
