"""Sessions in the database: every change is one transaction.

A row of ``sessions`` has a version. A replica that has read version 12 writes version
13 only if it is still 12, together with the pieces of memory that changed and the
response. A server that is killed leaves each session before or after a batch.
"""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import Connection, Row, func, select
from sqlalchemy.dialects.postgresql import insert as insert_postgresql
from sqlalchemy.dialects.sqlite import insert as insert_sqlite
from sqlalchemy.exc import IntegrityError
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.serve.database import (
    Database,
    pieces,
    responses,
    schema_version,
    sessions,
)
from cliquetta.serve.pieces import DamagedError, Piece, SavedMemory
from cliquetta.serve.schema import SessionInfo
from cliquetta.tensor_file import pack, unpack

FORMAT = "cliquetta-session-1"
"""Of exported sessions."""
LARGEST = 5
"""Number of the largest sessions that are measured."""
_SEALED = (
    "id",
    "version",
    "owner",
    "info",
    "sequence",
    "images",
    "imported",
    "adapter",
    "layout",
    "bytes",
    "root",
)
"""Columns under the seal of a session's row."""
_MEMORY = "memory."
_RESPONSE = "response."
_log = logging.getLogger(__name__)


class OvertakenError(Exception):
    """Another process has changed the session since it was read; nothing of this one counts."""


class ExistsError(Exception):
    """There is a session with this id already."""


@dataclass(frozen=True)
class StoredSession:
    """A session without the memory of its method."""

    info: SessionInfo
    owner: str
    adapter: str
    """What the memory belongs to, as JSON: the method, its config, the model."""
    imported: bool = False
    """Whether its memory came from a client and not from its own batches."""
    used: float = 0.0
    """Time of the last change, in seconds since 1970."""
    bytes: int = 0
    version: int = 0


@dataclass(frozen=True)
class StoredResponse:
    """A response that was sent, and the hash of its request."""

    sequence: int
    digest: str
    packed: bytes

    @classmethod
    def of(cls, sequence: int, digest: str, body: bytes) -> "StoredResponse":
        """The response ``body`` to the request with ``digest``."""
        return cls(sequence, digest, zlib.compress(body, 1))

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return zlib.decompress(self.packed)

    def checksum(self, session: str) -> bytes:
        """Hash of all of it and of the session that it belongs to."""
        head = f"{session} {self.sequence} {self.digest} ".encode()
        return hashlib.sha256(head + self.packed).digest()


@dataclass(frozen=True)
class StoreSize:
    """Size of a database and of what is in it."""

    sessions: int
    bytes: int
    largest: tuple[int, ...]
    """Bytes of the largest sessions, the largest first."""


class SessionStore:
    """Reads and writes sessions; safe for threads and for other processes on the database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    @contextmanager
    def open(
        cls, where: Path | str, *, create: bool = True
    ) -> Iterator["SessionStore"]:
        """The sessions in a folder or at the URL of a database, until the block ends."""
        database = Database(where, create=create)
        try:
            yield cls(database)
        finally:
            database.close()

    # --- reading ------------------------------------------------------------------------------

    def owner_of(self, id: str) -> str | None:
        """The owner of a session; ``None`` if there is no such session."""
        with self.database.reading() as connection:
            return connection.scalar(
                select(sessions.c.owner).where(sessions.c.id == id)
            )

    def version_of(self, id: str) -> int:
        """The version of a session, which no earlier or later one shares; 0 if there is none."""
        with self.database.reading() as connection:
            found = connection.scalar(
                select(sessions.c.version).where(sessions.c.id == id)
            )
        return found or 0

    def find(self, id: str) -> StoredSession | None:
        """A session as it is now, or :class:`DamagedError`."""
        with self.database.reading() as connection:
            row = _read_row(connection, id)
        return None if row is None else _parse_row(row)

    def find_all(self, owner: str | None = None) -> list[StoredSession]:
        """All sessions, or those of an owner, oldest first."""
        query = select(sessions)
        if owner is not None:
            query = query.where(sessions.c.owner == owner)
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        found = []
        for row in rows:
            try:
                found.append(_parse_row(row))
            except (DamagedError, ValueError) as error:
                _log.warning("session %s is not listed: %s", row.id, error)
        return sorted(found, key=lambda one: (one.info.created, one.info.id))

    def unused_since(self, moment: float) -> list[tuple[str, str]]:
        """Owner and id of sessions that have not changed since a time."""
        query = select(sessions.c.owner, sessions.c.id).where(sessions.c.used < moment)
        with self.database.reading() as connection:
            return [(row.owner, row.id) for row in connection.execute(query)]

    def load(self, id: str) -> tuple[StoredSession, SavedMemory] | None:
        """A session and its memory as of one moment, or :class:`DamagedError`."""
        with self.database.reading() as connection:
            row = _read_row(connection, id)
            if row is None:
                return None
            stored = _parse_row(row)
            return stored, _read_memory(connection, row)

    def response(self, id: str, sequence: int) -> StoredResponse | None:
        """The stored response to a batch, or :class:`DamagedError`."""
        query = select(responses).where(
            responses.c.session == id, responses.c.sequence == sequence
        )
        with self.database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _parse_response(row)

    def size(self) -> StoreSize:
        """Number of sessions, size of the database and of its largest sessions."""
        largest = (
            select(sessions.c.bytes).order_by(sessions.c.bytes.desc()).limit(LARGEST)
        )
        with self.database.reading() as connection:
            number = connection.scalar(select(func.count()).select_from(sessions)) or 0
            sizes = tuple(connection.scalars(largest))
        return StoreSize(sessions=number, bytes=self.database.size(), largest=sizes)

    # --- writing ------------------------------------------------------------------------------

    def insert(
        self,
        stored: StoredSession,
        saved: SavedMemory,
        changed: Sequence[Piece],
        *,
        kept: Sequence[StoredResponse] = (),
        check_room: Callable[[int, int], None] = lambda all, owned: None,
    ) -> StoredSession:
        """Write a new session; ``check_room`` refuses by the sessions in all and of its owner.

        Raises:
            ExistsError: There is one with its id already.

        """
        # Versions begin with the time, so that an id that is deleted and made again has
        # new ones.
        new = _touched(stored, saved, version=time.time_ns() // 1000)
        try:
            with self.database.writing() as connection:
                # whoever makes another session waits here, so that all are counted
                made = schema_version.c.sessions_made + 1
                connection.execute(schema_version.update().values(sessions_made=made))
                everybody, owned = _count(connection, stored.owner)
                check_room(everybody, owned)
                row = _as_row(new, saved)
                connection.execute(sessions.insert().values(row))
                _write_pieces(connection, new.info.id, changed)
                _write_responses(connection, new.info.id, kept)
        except IntegrityError as error:
            raise ExistsError from error
        return new

    def update(
        self,
        stored: StoredSession,
        saved: SavedMemory,
        changed: Sequence[Piece],
        *,
        response: StoredResponse | None = None,
        replay: int = 0,
        complete: bool = False,
    ) -> StoredSession:
        """Write the next version of a session; on return it is on disk.

        Args:
            stored: The session as it shall be, with the version that was read.
            saved: Its memory as it shall be.
            changed: The pieces of the memory that differ, or all if ``complete``.
            response: The response to its last batch; the last ``replay`` are kept.
            replay: Number of responses to keep.
            complete: Whether all earlier pieces go.

        Returns:
            The session as it was written.

        Raises:
            OvertakenError: Another process was first; nothing was written.

        """
        id = stored.info.id
        new = _touched(stored, saved, version=stored.version + 1)
        values = _as_row(new, saved)
        unchanged = (sessions.c.id == id) & (sessions.c.version == stored.version)
        if not complete:  # these are not written again with every batch
            for name in ("id", "owner", "info", "adapter", "layout"):
                del values[name]
        statement = sessions.update().where(unchanged).values(values)
        with self.database.writing() as connection:
            if connection.execute(statement).rowcount == 0:
                raise OvertakenError
            if complete:
                connection.execute(pieces.delete().where(pieces.c.session == id))
            _write_pieces(connection, id, changed)
            if response is not None:
                _write_responses(connection, id, [response])
                old = responses.c.sequence <= response.sequence - replay
                connection.execute(
                    responses.delete().where(responses.c.session == id, old)
                )
        return new

    def delete(self, id: str, *, unused_since: float | None = None) -> bool:
        """Delete a session, if it was not used since a time; whether there was one."""
        chosen = sessions.c.id == id
        if unused_since is not None:
            chosen &= sessions.c.used < unused_since
        with self.database.writing() as connection:
            return connection.execute(sessions.delete().where(chosen)).rowcount > 0

    # --- moving -------------------------------------------------------------------------------

    def export(self, id: str) -> bytes:
        """A session, its memory and its responses as a file for :meth:`import_file`."""
        with self.database.reading() as connection:
            row = _read_row(connection, id)
            if row is None:
                raise UserError(f"no session {id!r}")
            stored = _parse_row(row)
            memory = _read_memory(connection, row).tensors
            query = select(responses).where(responses.c.session == id)
            kept = [_parse_response(one) for one in connection.execute(query)]
        tensors = {_MEMORY + name: value for name, value in memory.items()}
        for one in kept:
            packed = torch.frombuffer(bytearray(one.packed), dtype=torch.uint8)
            tensors[f"{_RESPONSE}{one.sequence}"] = packed
        session = {
            "info": stored.info.model_dump(),
            "owner": stored.owner,
            "adapter": stored.adapter,
            "imported": stored.imported,
            "digests": {str(one.sequence): one.digest for one in kept},
        }
        saved, _ = SavedMemory.of(id, _named(tensors, _MEMORY))
        checksum = _checksum_of_file(session, saved, kept)
        return pack(
            tensors, {"format": FORMAT, "session": session, "checksum": checksum}
        )

    def import_file(self, data: bytes, source: str) -> StoredSession:
        """Write a session of :meth:`export` as a new one with the same id.

        Raises:
            UserError: The file is none of an exported session, or its session is here
                already.

        """
        tensors, header = unpack(data, source=source, kind="exported session")
        if header.get("format") != FORMAT:
            raise UserError(f"{source} was not written by `cliquetta sessions export`")
        damaged = DamagedError(f"{source} is damaged: its checksum differs")
        try:
            session = header["session"]
            checksum = header["checksum"]
            stored, kept = _parse_export(session, _named(tensors, _RESPONSE))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged from error
        id = stored.info.id
        saved, changed = SavedMemory.of(id, _named(tensors, _MEMORY))
        if _checksum_of_file(session, saved, kept) != checksum:
            raise damaged
        try:
            return self.insert(stored, saved, changed, kept=kept)
        except ExistsError:
            raise UserError(
                f"session {id} is in {self.database.name} already: delete it there first"
            ) from None


def _count(connection: Connection, owner: str) -> tuple[int, int]:
    """Number of sessions, in all and of an owner."""
    owned = func.count().filter(sessions.c.owner == owner)
    query = select(func.count(), owned).select_from(sessions)
    everybody, of_owner = connection.execute(query).one()
    return everybody, of_owner


def _read_row(connection: Connection, id: str) -> Row[Any] | None:
    return connection.execute(select(sessions).where(sessions.c.id == id)).one_or_none()


def _read_memory(connection: Connection, row: Row[Any]) -> SavedMemory:
    """The memory of a session of which the row was read on the same connection."""
    query = select(pieces).where(pieces.c.session == row.id)
    found = connection.execute(query)
    stored = (Piece(one.tensor, one.number, one.data, one.checksum) for one in found)
    try:
        saved = SavedMemory.read(row.id, row.layout, stored)
    except (KeyError, IndexError) as error:
        raise DamagedError(
            "a piece of the session belongs to another memory"
        ) from error
    if saved.root != row.root:
        raise DamagedError("a piece of the session is gone, or of another moment")
    return saved


def _as_row(stored: StoredSession, saved: SavedMemory) -> dict[str, Any]:
    """The columns of a session, with their seal."""
    made = stored.info.model_dump(exclude={"sequence", "images"})
    values: dict[str, Any] = {
        "id": stored.info.id,
        "version": stored.version,
        "owner": stored.owner,
        "info": json.dumps(made),
        "sequence": stored.info.sequence,
        "images": stored.info.images,
        "imported": stored.imported,
        "used": stored.used,
        "adapter": stored.adapter,
        "layout": saved.layout_text,
        "bytes": stored.bytes,
        "root": saved.root,
    }
    return {**values, "seal": _seal(values)}


def _parse_row(row: Row[Any]) -> StoredSession:
    """The session of a row, which must be as it was written."""
    values = row._asdict()
    if _seal(values) != row.seal:
        raise DamagedError("the session's row is damaged: its checksum differs")
    info = SessionInfo(**json.loads(row.info), sequence=row.sequence, images=row.images)
    return StoredSession(
        info=info,
        owner=row.owner,
        adapter=row.adapter,
        imported=row.imported,
        used=row.used,
        bytes=row.bytes,
        version=row.version,
    )


def _seal(values: Mapping[str, Any]) -> bytes:
    """Hash of a session's row."""
    text = repr([values[name] for name in _SEALED])
    return hashlib.sha256(text.encode()).digest()


def _touched(
    stored: StoredSession, saved: SavedMemory, *, version: int
) -> StoredSession:
    """The session at its next version, used now."""
    return replace(stored, version=version, used=time.time(), bytes=saved.stored_bytes)


def _write_pieces(connection: Connection, id: str, changed: Sequence[Piece]) -> None:
    """Insert pieces, or replace those that are there."""
    if not changed:
        return
    insert = insert_sqlite if connection.dialect.name == "sqlite" else insert_postgresql
    statement = insert(pieces)
    statement = statement.on_conflict_do_update(
        index_elements=[pieces.c.session, pieces.c.tensor, pieces.c.number],
        set_={"data": statement.excluded.data, "checksum": statement.excluded.checksum},
    )
    rows = [
        {
            "session": id,
            "tensor": piece.tensor,
            "number": piece.number,
            "data": piece.data,
            "checksum": piece.checksum,
        }
        for piece in changed
    ]
    connection.execute(statement, rows)


def _write_responses(
    connection: Connection, id: str, given: Sequence[StoredResponse]
) -> None:
    rows = [
        {
            "session": id,
            "sequence": one.sequence,
            "digest": one.digest,
            "body": one.packed,
            "checksum": one.checksum(id),
        }
        for one in given
    ]
    if rows:
        connection.execute(responses.insert(), rows)


def _parse_response(row: Row[Any]) -> StoredResponse:
    """The response of a row, which must be as it was written."""
    response = StoredResponse(row.sequence, row.digest, row.body)
    if response.checksum(row.session) != row.checksum:
        raise DamagedError("a stored response is damaged: its checksum differs")
    return response


def _parse_export(
    session: Mapping[str, Any], packed: Mapping[str, Tensor]
) -> tuple[StoredSession, list[StoredResponse]]:
    """The session in the header of an exported file, and its responses."""
    stored = StoredSession(
        info=SessionInfo(**session["info"]),
        owner=session["owner"],
        adapter=session["adapter"],
        imported=session["imported"],
    )
    kept = [
        StoredResponse(int(number), digest, packed[number].numpy().tobytes())
        for number, digest in session["digests"].items()
    ]
    return stored, kept


def _checksum_of_file(
    session: Mapping[str, Any], saved: SavedMemory, kept: Sequence[StoredResponse]
) -> str:
    """Hash of all that an exported session holds."""
    digest = hashlib.sha256(json.dumps(session, sort_keys=True).encode())
    digest.update(saved.root)
    for one in kept:
        digest.update(one.checksum(saved.session))
    return digest.hexdigest()


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it, by name."""
    names = sorted(name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in names}
