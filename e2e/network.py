"""Connect the machines of a cluster by a bridge in the control plane's machine."""

from collections.abc import Mapping
from ipaddress import IPv4Address, ip_interface

from e2e.configuration import SERVICES
from e2e.machine import Machine, run


def make_bridge(control_plane: Machine) -> None:
    """Create the bridge, and let the control plane forward packets to Services."""
    run_ip_batch(
        control_plane,
        "link add lan type bridge",
        f"address add {control_plane.address}/24 dev lan",
        "link set lan up",
        # Any outgoing route will do: kube-proxy redirects the packet to a pod before it leaves.
        f"route add {SERVICES} dev lan",
    )
    # The control plane does not forward packets, but its kube-proxy also answers on 127.0.0.1.
    set_sysctl(control_plane, "net.ipv4.ip_forward", "1")


def connect(control_plane: Machine, node: Machine, link: str, subnets: Mapping[str, str]) -> None:
    """Connect a node to the bridge, and add the routes to all pods on it and on the control plane.

    Args:
        control_plane: the machine with the bridge.
        node: the node.
        link: a name for the node's port of the bridge.
        subnets: the pod subnet of each node, also of those that may come later, by the node's address.
    """
    made = f"link add {link} type veth peer name eth0 netns {node.first_process}"
    add_port(control_plane, made, link, node, subnets)
    run_ip_batch(
        node,
        # A later machine may get the address of one that has ended, and its neighbours remember this.
        f"link set eth0 address {hardware_address(node)}",
        *routes("eth0", control_plane, node, subnets),
    )
    set_sysctl(node, "net.ipv4.ip_forward", "1")


def add_port(
    control_plane: Machine, made: str, link: str, node: Machine, subnets: Mapping[str, str]
) -> None:
    """Add a port to the bridge, and the route to the pods of the node behind it.

    made: what `ip` is told to make a device with the name `link`.
    """
    run_ip_batch(
        control_plane,
        made,
        f"link set {link} master lan",
        f"link set {link} up",
        f"route replace {subnets[node.address]} via {node.address} onlink dev lan",
    )


def routes(
    device: str, control_plane: Machine, node: Machine, subnets: Mapping[str, str]
) -> list[str]:
    """Return what `ip` is told on a node to give its device an address and routes to all pods."""
    others = {address: subnet for address, subnet in subnets.items() if address != node.address}
    return [
        f"address add {ip_interface(node.address + '/24')} dev {device}",
        f"link set {device} up",
        f"route replace default via {control_plane.address}",
        *(f"route add {subnet} via {address}" for address, subnet in others.items()),
    ]


def hardware_address(node: Machine) -> str:
    """Return the hardware address that belongs to a node's address."""
    return f"02:00:{IPv4Address(node.address).packed.hex(':')}"


def run_ip_batch(machine: Machine, *lines: str) -> None:
    """Run ip commands in a machine's network. Process IDs in them are those of this machine."""
    command = machine.network_command("ip", "-batch", "-")
    run(command, machine.environment(), "\n".join(lines))


def set_sysctl(machine: Machine, name: str, value: str) -> None:
    """Set a sysctl of the machine's own network namespace."""
    run(machine.network_command("sysctl", "-qw", f"{name}={value}"), machine.environment())
