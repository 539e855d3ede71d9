"""Tests on a machine of their own: systemd, logins, boots and the Debian package. `make vm` runs them twice.

First systemd runs in namespaces on this machine's kernel, in minutes (`FENKA_VM=namespaces`). Then qemu
emulates a virtual machine, with a kernel and cgroup v2 of its own. It needs no /dev/kvm, and Python is seven
times slower. Last, such a machine is a node of a cluster (e2e/virtual_node.py).
"""
