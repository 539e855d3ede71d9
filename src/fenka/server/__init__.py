"""The server kit of all programs: listeners, certificates, probes, metrics and an orderly end."""
