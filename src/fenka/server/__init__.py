"""What all programs of fenka need to serve: listeners, certificates and an orderly life."""
