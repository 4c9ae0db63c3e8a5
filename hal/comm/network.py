"""Finds the network interface that routes to another machine, for gloo.

By default, gloo uses the address that the host name resolves to, which is often the loopback.
"""

from __future__ import annotations

import contextlib
import socket
import sys


def interface_to(address: str, port: int) -> str | None:
    """Name of the interface of the IPv4 route to `address`: the loopback for this machine itself.

    Sends nothing. None where it cannot be determined (no such route, not Linux).
    """
    if sys.platform != "linux":
        return None
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # of a datagram socket: selects the route, sends nothing
            source_address = probe.getsockname()[0]
        except OSError:
            return None
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(reply[20:24]) == source_address:
                    return name
    return None
