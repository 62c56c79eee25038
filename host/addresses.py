"""Addresses to listen on: which of them only this machine reaches."""

from __future__ import annotations


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    import ipaddress  # `tepal server status` does not need it

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
