"""Programs that are mounted into pods: single files that import nothing of fenka."""
