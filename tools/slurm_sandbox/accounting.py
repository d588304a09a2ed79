"""The database behind `sacct`: slurmdbd before a MariaDB of the sandbox's own, reached by its socket only."""

import os
import socket
from pathlib import Path

from prime_hpc.errors import InfrastructureFailure
from tools.slurm_sandbox import daemons
from tools.slurm_sandbox.layout import Layout

SYSTEM_TABLES = ("/usr/share/mysql/mysql_system_tables.sql", "/usr/share/mariadb/mysql_system_tables.sql")


def start(layout: Layout) -> None:
    """Start the database, empty, and slurmdbd, which makes its own tables."""
    folder = layout.database_socket.parent
    (folder / "data").mkdir(mode=0o700)
    (folder / "init.sql").write_text(f"CREATE DATABASE mysql;\nUSE mysql;\n{_system_tables()}")
    daemons.start(layout, "mariadbd", command(layout))
    daemons.wait_until(layout, "mariadbd", "its socket", layout.database_socket.exists)
    # MariaDB's client library takes the socket's path from here; slurmdbd has no option for it.
    daemons.start(layout, "slurmdbd", ["slurmdbd", "-D"], {"MYSQL_UNIX_PORT": str(layout.database_socket)})
    daemons.wait_until(layout, "slurmdbd", "its port", lambda: _listens(layout.database_port))


def command(layout: Layout) -> list[str]:
    """No password guards the database: its folder, and so its socket, is open to its owner only. Nothing is flushed to
    disk, since it lives as long as the sandbox."""
    folder = layout.database_socket.parent
    # Run by root, the server insists on being told so.
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    return ["mariadbd", "--no-defaults", *as_root, "--skip-networking", "--skip-grant-tables", "--skip-log-bin",
            f"--datadir={folder}/data", f"--socket={layout.database_socket}", f"--init-file={folder}/init.sql",
            f"--pid-file={folder}/mariadbd.pid", f"--log-error={layout.log('mariadbd')}", "--innodb-use-native-aio=0",
            "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-flush-method=nosync",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]  # fmt: skip


def _system_tables() -> str:
    """The server's own tables: slurmdbd stores procedures in them."""
    for path in map(Path, SYSTEM_TABLES):
        if path.exists():
            return path.read_text()
    raise InfrastructureFailure(f"mariadb-server-core brought none of {', '.join(SYSTEM_TABLES)}; reinstall it")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
