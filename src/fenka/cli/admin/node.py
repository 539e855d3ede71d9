"""`fenka node`: the program on every GPU node of a cluster."""

from fenka.cli.admin import node_process
from fenka.node.config import Config


def node(config: Config) -> None:
    """Serve the kubelet until SIGTERM or SIGINT."""
    node_process.start(config)
