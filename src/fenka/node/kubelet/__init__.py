"""The kubelet's side: its sockets, its checkpoint, and the device plugins."""
