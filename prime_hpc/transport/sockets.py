"""ZMQ sockets of a run: CURVE on every one, no high-water mark, nothing lingers."""

import zmq

from prime_hpc.cluster.secrets import RunSecrets


def router(context: zmq.Context, keys: RunSecrets, host: str) -> tuple[zmq.Socket, int]:
    """A bound ROUTER of the orchestrator and the port the system gave it."""
    socket = _plain(context, zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.curve_public, keys.curve_secret
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes its identity over at once
    return socket, socket.bind_to_random_port(f"tcp://{host}")


def dealer(context: zmq.Context, keys: RunSecrets, address: str, identity: str) -> zmq.Socket:
    """A DEALER connected to the orchestrator's ROUTER at `address`; `identity` is the process name."""
    socket = _plain(context, zmq.DEALER)
    socket.curve_serverkey = keys.curve_public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(address)
    return socket


def _plain(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
