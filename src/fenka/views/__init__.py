"""Read models of the screens: values of a cluster or a workstation that all outputs show."""
