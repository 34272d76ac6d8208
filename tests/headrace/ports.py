"""Ports for servers that cannot choose their own."""

import random
import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that are free, below those that the kernel gives to others meanwhile.

    A cluster node listens on its port + 10000 as well.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(11_000, 21_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind((HOST, port))
        except OSError:
            return False
    return True
