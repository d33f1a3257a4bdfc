"""``cliquetta sessions``: what a service keeps, for its operator."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import Bounds, Common
from cliquetta.cli.console import count
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.serve.store import StoredSession

LIST_EXAMPLES = """
cliquetta sessions list
cliquetta sessions list --state-dir /var/lib/cliquetta --json
"""
DELETE_EXAMPLES = """
cliquetta sessions delete 0f3a9c17b2d45e6688aa01b2c3d4e5f6
cliquetta sessions delete --unused-days 30 --state-dir /var/lib/cliquetta
"""

StateDir = Annotated[str, "Directory of the sessions, or a URL (see serve)."]


def list_all(common: Common, state_dir: StateDir = "sessions") -> None:
    """List all sessions, also those of a running server."""
    stored = _scan(state_dir)
    columns = ("id", "owner", "model", "method", "classes", "batches", "images", "used", "KiB")
    rows = [
        (
            *(one.info.id, one.owner, one.info.model, one.info.method),
            *(len(one.info.classes), one.info.sequence, one.info.images),
            datetime.fromtimestamp(one.used).isoformat(" ", "minutes"),
            round(one.bytes / 1024),
        )
        for one in stored
    ]
    shown = [[str(cell) for cell in row] for row in rows]
    common.terminal.table(columns, shown, right=("classes", "batches", "images", "KiB"))
    common.terminal.say(f"{count(len(stored), 'session')} in {state_dir}")
    common.terminal.document([dict(zip(columns, row, strict=True)) for row in rows])


def delete(
    common: Common,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of sessions.")] = None,
    unused_days: Annotated[
        float | None, Bounds(0), "Delete all sessions unused for N days."
    ] = None,
    state_dir: StateDir = "sessions",
) -> None:
    """Delete sessions, also those of a running server."""
    from cliquetta.serve.store import Store

    if not ids and unused_days is None:
        raise UserError("no sessions given: name their ids, or use --unused-days")
    known = {one.info.id: one for one in _scan(state_dir)}
    missing = [id for id in ids or () if id not in known]
    if missing:
        raise UserError(f"no session {missing[0]!r} in {state_dir}: see `cliquetta sessions list`")
    oldest = None if unused_days is None else time.time() - 86400 * unused_days
    unused = [id for id, one in known.items() if oldest is not None and one.used < oldest]
    chosen = list(dict.fromkeys([*(ids or ()), *unused]))
    store = Store(state_dir)
    for id in chosen:
        store.delete(id)
    common.terminal.say(f"{count(len(chosen), 'session')} deleted")
    common.terminal.document({"sessions": chosen})


def _scan(where: str) -> "list[StoredSession]":
    from cliquetta.data.remote import is_url

    if not is_url(where) and not Path(where).is_dir():
        raise UserError(f"no directory {where}: pass --state-dir as for `cliquetta serve`")

    from cliquetta.serve.store import Store

    return Store(where).scan()
