"""Services of this machine: replicas in leases, with a gateway as their address."""
