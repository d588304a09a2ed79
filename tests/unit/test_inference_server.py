import socket
from contextlib import closing

from prime_hpc.inference.server import bind


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with closing(bind("127.0.0.1")) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
