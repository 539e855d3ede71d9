"""Leases: the files and mounts that limit a process to its slice, and the reader of its usage."""
