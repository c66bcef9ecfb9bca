"""Addresses of this machine."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago. Another process may take it first: retry a failed bind."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def node_ip() -> str:
    """The address other machines reach this one by; 127.0.0.1 without a network. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
