"""The database of the sessions: SQLite in a folder, or PostgreSQL for several replicas.

SQLAlchemy speaks to both. What differs is here: how to connect, to begin and to
measure, and what an error of the database means to operators and clients.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    Text,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)

from cliquetta.data.remote import is_url
from cliquetta.errors import UserError, first_line
from cliquetta.version import installed_version

SCHEMA = 1
"""Version of the tables."""
FILE = "sessions.db"
OLD_FORM = "75069cc0"
"""The last commit whose sessions are files."""
_CONNECT_SECONDS = 3
_LOCK_SECONDS = 10
_CONNECTIONS = 16  # of one process at most
_WAL_PAGES = 8192  # after so many the log of SQLite is copied into its file: 32 MB
_VACUUMED_PAGES = 2048  # free pages given back to the file system at a time
_CREATION_LOCK = 0x0C119E77A  # of PostgreSQL, while tables are created
_log = logging.getLogger(__name__)

tables = sqlalchemy.MetaData()
schema_version = sqlalchemy.Table(
    "schema_version",
    tables,
    Column("version", Integer, nullable=False),
    # locked by whoever makes a session, so that limits count those of all replicas
    Column("sessions_made", BigInteger, nullable=False),
)
sessions = sqlalchemy.Table(
    "sessions",
    tables,
    Column("id", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),  # changes with every change
    Column("owner", Text, nullable=False, index=True),
    Column("info", Text, nullable=False),  # JSON: what the client asked for
    Column("sequence", BigInteger, nullable=False),
    Column("images", BigInteger, nullable=False),
    Column("imported", Boolean, nullable=False),  # its memory came from a client
    Column(
        "used", Float, nullable=False, index=True
    ),  # last change, in seconds since 1970
    Column(
        "adapter", Text, nullable=False
    ),  # JSON: model, method and config of the memory
    Column("layout", Text, nullable=False),  # JSON: tensors of the memory
    Column("bytes", BigInteger, nullable=False),  # of the stored pieces
    Column("root", LargeBinary, nullable=False),  # hash of the pieces' checksums
    Column("seal", LargeBinary, nullable=False),  # hash of this row without `used`
)


def _owned_by_session() -> Column[str]:
    reference = ForeignKey(sessions.c.id, ondelete="CASCADE")
    return Column("session", Text, reference, primary_key=True)


pieces = sqlalchemy.Table(
    "pieces",
    tables,
    _owned_by_session(),
    Column("tensor", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)
responses = sqlalchemy.Table(
    "responses",
    tables,
    _owned_by_session(),
    Column("sequence", BigInteger, primary_key=True),
    Column("digest", Text, nullable=False),  # hash of the request
    Column("body", LargeBinary, nullable=False),  # compressed
    Column("checksum", LargeBinary, nullable=False),
)


class UnavailableError(UserError):
    """The database cannot be used now.

    ``sentence`` is for clients and names neither hosts nor files; ``retry_after`` is
    given where waiting may help.
    """

    def __init__(
        self, sentence: str, details: str, retry_after: float | None = None
    ) -> None:
        self.sentence = sentence
        self.retry_after = retry_after
        super().__init__(f"{sentence}: {details}")


class Database:
    """Connections to the database of a service, and what an operator wants to know of it."""

    def __init__(self, where: str | Path, *, create: bool = False) -> None:
        """Open a folder with its SQLite file, or the URL of a PostgreSQL database.

        Args:
            where: The folder or URL.
            create: Whether to make the folder and the tables where there are none.

        Raises:
            UserError: It cannot be used; the message names the remedy.

        """
        self.file: Path | None = None
        if is_url(str(where)):
            url = _read_url(str(where))
            self.name = url.render_as_string(hide_password=True)
            self._engine = _connect_postgresql(url)
        else:
            folder = Path(where)
            _check_folder(folder, create=create)
            self.file = folder / FILE
            self.name = str(folder)
            self._engine = _connect_sqlite(self.file)
        if create:
            with self.writing() as connection:
                _create_tables(connection)
        self.ping()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees the database as of one moment."""
        with self._explained(), self._engine.connect() as connection:
            if self.file is None:
                connection = connection.execution_options(
                    isolation_level="REPEATABLE READ"
                )
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is on disk at the end of the block, or undone by an error."""
        engine = self._engine.execution_options(cliquetta_writes=True)
        with self._explained(), engine.begin() as connection:
            yield connection

    def check(self) -> None:
        """Raise :class:`UnavailableError` unless sessions can be read and written."""
        with self.writing() as connection:
            version = schema_version.update().values(version=schema_version.c.version)
            connection.execute(version)

    def ping(self) -> None:
        """Raise :class:`UnavailableError` unless the database responds."""
        with self.reading() as connection:
            _check_version(connection, self.name)

    def size(self) -> int:
        """Bytes on disk."""
        if self.file is not None:
            files = self.file.parent.glob(f"{FILE}*")
            return sum(file.stat().st_size for file in files)
        names = ", ".join(f"'{name}'" for name in tables.tables)
        query = (
            "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
            f"WHERE relname IN ({names}) AND pg_table_is_visible(oid)"
        )
        with self.reading() as connection:
            return int(connection.scalar(sqlalchemy.text(query)) or 0)

    def free_bytes(self) -> float:
        """Free space on the disk of a SQLite file; of a server it is not known here."""
        if self.file is None:
            return float("inf")
        return float(shutil.disk_usage(self.file.parent).free)

    def shrink(self) -> None:
        """Give some free pages of SQLite back; PostgreSQL does so by itself."""
        if self.file is None:
            return
        with (
            self._explained(),
            contextlib.closing(self._engine.raw_connection()) as connection,
        ):
            # only a script runs this pragma to its end
            script = f"PRAGMA incremental_vacuum({_VACUUMED_PAGES})"
            connection.driver_connection.executescript(script)  # type: ignore[union-attr]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the database as sentences; what they quote goes to the log only."""
        try:
            yield
        except IntegrityError:
            raise  # a row that is there already: for the caller
        except SQLAlchemyError as error:
            cause = first_line(getattr(error, "orig", error))
            _log.warning("database %s: %s", self.name, cause)
            raise explain(error, self.name) from error


@dataclass(frozen=True)
class _Meaning:
    """What some errors mean to an operator."""

    sentence: str
    remedy: str
    words: tuple[str, ...] = ()
    """Parts of messages of SQLite and libpq, in lower case."""
    states: tuple[str, ...] = ()
    """Beginnings of PostgreSQL's SQLSTATE."""
    retry_after: float | None = None
    """Seconds to wait, where waiting may help."""


_MEANINGS = (
    _Meaning(
        "the database refuses the service's user or password",
        "correct the URL, PGPASSWORD or ~/.pgpass",
        words=("password authentication failed", "no password supplied", 'role "'),
        states=("28",),
    ),
    _Meaning(
        "the disk of the database is full",
        "make room",
        words=("database or disk is full", "no space left"),
        states=("53100",),
        retry_after=10.0,
    ),
    _Meaning(
        "the database is locked by another program",
        "end that program, such as a backup or a shell with an open transaction",
        words=("database is locked", "database table is locked"),
        states=("55P03", "57014", "40"),
        retry_after=1.0,
    ),
    _Meaning(
        "the database is damaged",
        "restore a backup",
        words=("malformed", "not a database"),
        states=("XX001", "XX002"),
    ),
    _Meaning(
        "the database may not be written",
        "correct the permissions of its file or user",
        words=("readonly database", "unable to open"),
        states=("42501",),
    ),
    _Meaning(
        "the database has no tables of sessions",
        "start `cliquetta serve` on it once",
        words=("no such table", "no such column"),
        states=("42P01", "42703"),
    ),
    _Meaning(
        "the database does not exist",
        "create it with createdb, or correct the URL",
        words=("does not exist",),
        states=("3D000",),
    ),
    _Meaning(
        "the database has no free connections",
        "raise its max_connections, or use fewer replicas",
        words=("too many clients", "remaining connection slots", "queuepool limit"),
        states=("53300",),
        retry_after=5.0,
    ),
    _Meaning(
        "the database cannot be reached",
        "start it, or correct the URL",
        words=(
            "connection refused",
            "connection failed",
            "connection timeout",
            "failed to resolve",
            "could not translate",
            "closed the connection",
            "connection is lost",
        ),
        states=("08", "57P"),
        retry_after=5.0,
    ),
)
_UNKNOWN = _Meaning("the database cannot be used", "see the log", retry_after=10.0)


def explain(error: SQLAlchemyError, name: str) -> UnavailableError:
    """What an error of the database means, and whether waiting may help."""
    cause = getattr(error, "orig", None) or error
    text = str(cause).lower()
    state = getattr(cause, "sqlstate", None) or ""
    known = (
        one
        for one in _MEANINGS
        if any(word in text for word in one.words)
        or state.startswith(one.states or ("-",))
    )
    meaning = next(known, _UNKNOWN)
    return UnavailableError(
        meaning.sentence, f"{meaning.remedy} ({name})", meaning.retry_after
    )


def shown_name(where: str) -> str:
    """The folder or the URL without its password."""
    return (
        _read_url(where).render_as_string(hide_password=True)
        if is_url(where)
        else where
    )


def _read_url(where: str) -> URL:
    """The URL of a PostgreSQL database, or a refusal of any other."""
    example = "postgresql+psycopg://user@host/database"
    try:
        url = make_url(where)
    except ArgumentError:
        raise UserError(f"not a URL of a database, such as {example}") from None
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    remedy = f"use a folder, which gets a SQLite file, or {example}"
    if url.drivername in ("s3", "s3a", "gs", "gcs"):
        remedy += (
            f". Sessions that are in a bucket can be exported by commit {OLD_FORM}"
        )
    raise UserError(f"sessions cannot be at {url.drivername}://: {remedy}")


def _check_folder(folder: Path, *, create: bool) -> None:
    """Refuse a folder without a database, unless it is created, and one of the old form."""
    old = (path for path in folder.glob("*/*.safetensors") if _is_id(path.parent.name))
    if next(old, None) is not None:
        raise UserError(
            f"{folder} holds sessions in files, which this version does not read: check out "
            f"commit {OLD_FORM} of cliquetta, serve the folder with it, and take each session "
            "over with GET and PUT /v1/sessions/ID/state; or choose another folder"
        )
    file = folder / FILE
    if not create:
        if not file.exists():
            raise UserError(
                f"no sessions in {folder}: pass --sessions as for `cliquetta serve`"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    # class names and responses are the clients' own
    folder.chmod(0o700)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))


def _is_id(name: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", name) is not None


def _connect_sqlite(file: Path) -> Engine:
    engine = sqlalchemy.create_engine(
        URL.create("sqlite", database=str(file)),
        connect_args={"timeout": _LOCK_SECONDS},
        **_pool_options(),
    )

    @sqlalchemy.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        # transactions begin where SQLAlchemy says so, not where Python's driver guesses
        connection.isolation_level = None
        for pragma in (
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            f"wal_autocheckpoint = {_WAL_PAGES}",
            f"journal_size_limit = {4096 * _WAL_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # a writer waits for its turn now, while it has read nothing yet
        writes = connection.get_execution_options().get("cliquetta_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _connect_postgresql(url: URL) -> Engine:
    try:
        engine = sqlalchemy.create_engine(
            url,
            connect_args={
                "connect_timeout": _CONNECT_SECONDS,
                "tcp_user_timeout": 10_000,
            },
            # no request meets a connection that died with the database
            pool_pre_ping=True,
            **_pool_options(),
        )
    except (ImportError, NoSuchModuleError):
        raise UserError("no psycopg: pip install 'cliquetta[postgres]'") from None

    @sqlalchemy.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        # whatever the server's defaults are: a response is sent when its batch is on
        # disk
        settings = (
            "SET synchronous_commit TO on; "
            f"SET lock_timeout TO '{_LOCK_SECONDS}s'; "
            "SET statement_timeout TO '60s'"
        )
        connection.execute(settings)
        connection.commit()

    return engine


def _pool_options() -> dict[str, Any]:
    return {
        "pool_size": 4,
        "max_overflow": _CONNECTIONS - 4,
        "pool_timeout": _LOCK_SECONDS,
    }


def _create_tables(connection: Connection) -> None:
    """Create the tables where there are none; of several replicas one does."""
    on_server = connection.dialect.name == "postgresql"
    if on_server:
        connection.execute(
            sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_CREATION_LOCK))
        )
    if sqlalchemy.inspect(connection).has_table(schema_version.name):
        return
    tables.create_all(connection)
    connection.execute(schema_version.insert().values(version=SCHEMA, sessions_made=0))
    if on_server:  # numbers do not compress: do not try
        connection.exec_driver_sql(
            "ALTER TABLE pieces ALTER COLUMN data SET STORAGE EXTERNAL"
        )


def _check_version(connection: Connection, name: str) -> None:
    """Refuse a database that another version of the package has written."""
    found = connection.scalar(sqlalchemy.select(schema_version.c.version))
    if found != SCHEMA:
        raise UnavailableError(
            f"the database has tables of version {found}",
            f"cliquetta {installed_version()} reads version {SCHEMA}. Use the cliquetta that wrote "
            f"it, or export its sessions with that and import them into a new database ({name})",
        )
