"""``cliquetta sessions``: what a service keeps, for its operator."""

import time
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.atomic import create_atomically
from cliquetta.cli.command import Bounds, Common
from cliquetta.cli.console import count
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.serve.session_store import SessionStore

LIST_EXAMPLES = """
cliquetta sessions list
cliquetta sessions list --sessions /var/lib/cliquetta --json
"""
DELETE_EXAMPLES = """
cliquetta sessions delete 0f3a9c17b2d45e6688aa01b2c3d4e5f6
cliquetta sessions delete --unused-days 30 --sessions /var/lib/cliquetta
"""
EXPORT_EXAMPLES = """
cliquetta sessions export --out exported
cliquetta sessions export 0f3a9c17b2d45e6688aa01b2c3d4e5f6 --out exported
"""
IMPORT_EXAMPLES = """
cliquetta sessions import exported/*.session --sessions postgresql+psycopg://host/cliquetta
"""
SUFFIX = ".session"
_SECONDS_PER_DAY = 86400

Where = Annotated[
    str,
    typer.Option(
        "--sessions",
        envvar="CLIQUETTA_SESSIONS",
        help="Folder or database URL of the sessions (see serve).",
    ),
]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of sessions.")]
_COLUMNS = (
    "id",
    "owner",
    "model",
    "method",
    "classes",
    "batches",
    "images",
    "used",
    "KiB",
)
_NUMBERS = ("classes", "batches", "images", "KiB")


def list_all(common: Common, sessions: Where = "sessions") -> None:
    """List all sessions, the largest first, also those of a running server."""
    with _open(sessions) as store:
        stored = sorted(store.find_all(), key=lambda one: -one.bytes)
        size = store.size()
        name = store.database.name
    rows = [
        (
            one.info.id,
            one.owner,
            one.info.model,
            one.info.method,
            len(one.info.classes),
            one.info.sequence,
            one.info.images,
            datetime.fromtimestamp(one.used).isoformat(" ", "minutes"),
            round(one.bytes / 1024),
        )
        for one in stored
    ]
    shown = [[str(cell) for cell in row] for row in rows]
    common.terminal.table(_COLUMNS, shown, right=_NUMBERS)
    megabytes = size.bytes / 2**20
    common.terminal.say(
        f"{count(len(stored), 'session')} in {name}, {megabytes:.1f} MiB on disk"
    )
    common.terminal.document([dict(zip(_COLUMNS, row, strict=True)) for row in rows])


def delete(
    common: Common,
    ids: Ids = None,
    unused_days: Annotated[
        float | None, Bounds(0), "Delete all sessions unused for N days."
    ] = None,
    sessions: Where = "sessions",
) -> None:
    """Delete sessions, also those of a running server."""
    if not ids and unused_days is None:
        raise UserError("no sessions given: name their ids, or use --unused-days")
    with _open(sessions) as store:
        deleted = _check_ids(store, ids) if ids else []
        for id in deleted:
            store.delete(id)
        if unused_days is not None:
            oldest = time.time() - _SECONDS_PER_DAY * unused_days
            for _, id in store.unused_since(oldest):
                # One that was used in the meantime stays.
                if store.delete(id, unused_since=oldest):
                    deleted.append(id)
    common.terminal.say(f"{count(len(deleted), 'session')} deleted")
    common.terminal.document({"sessions": deleted})


def export(
    common: Common,
    ids: Ids = None,
    out: Annotated[Path, "Folder of the files, one per session."] = Path("exported"),
    sessions: Where = "sessions",
) -> None:
    """Export sessions with all that they learned, also those of a running server."""
    out.mkdir(parents=True, exist_ok=True)
    with _open(sessions) as store:
        if ids:
            chosen = _check_ids(store, ids)
        else:
            chosen = [one.info.id for one in store.find_all()]
        for id in chosen:
            try:
                create_atomically(out / f"{id}{SUFFIX}", store.export(id))
            except FileExistsError:
                raise UserError(
                    f"{out / id}{SUFFIX} exists: choose another --out"
                ) from None
    common.terminal.say(f"{count(len(chosen), 'session')} in {out}")
    common.terminal.document({"sessions": chosen})


def import_files(
    common: Common,
    files: Annotated[
        list[Path], typer.Argument(help="Files of `cliquetta sessions export`.")
    ],
    sessions: Where = "sessions",
) -> None:
    """Import sessions under their ids, also into the database of a running server."""
    imported = []
    with _open(sessions) as store:
        for file in files:
            imported.append(store.import_file(file.read_bytes(), str(file)).info.id)
    common.terminal.say(
        f"{count(len(imported), 'session')} imported into {store.database.name}"
    )
    common.terminal.document({"sessions": imported})


def _open(where: str) -> "AbstractContextManager[SessionStore]":
    """Open the database of a service, checked before anything large is imported."""
    if "://" not in where and not Path(where).is_dir():
        raise UserError(
            f"no sessions in {where}: pass --sessions as for `cliquetta serve`"
        )
    try:
        from cliquetta.serve.session_store import SessionStore
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[serve]'") from error
    return SessionStore.open(where, create=False)


def _check_ids(store: "SessionStore", ids: list[str]) -> list[str]:
    """Return the ids without repetitions, all of sessions that exist."""
    for id in ids:
        if store.owner_of(id) is None:
            raise UserError(
                f"no session {id!r} in {store.database.name}: see `cliquetta sessions list`"
            )
    return list(dict.fromkeys(ids))
