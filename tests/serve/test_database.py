"""Databases that cannot be used: a sentence for operators, 503 for clients, nothing lost."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy

from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.database import (
    FILE,
    SCHEMA,
    Database,
    UnavailableError,
    shown_name,
)
from cliquetta.serve.session_store import SessionStore
from tests._helpers.postgres import PASSWORD, PostgreSQL
from tests._helpers.running import Run
from tests._helpers.serve_setup import (
    Alone,
    batch_of,
    change_row,
    local_service,
    refusal,
)


def test_sqlite_is_durable_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "sessions"
    database = Database(folder, create=True)
    with database.reading() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "auto_vacuum")
        }
    database.close()
    full = 2
    incremental = 2
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": full,
        "foreign_keys": 1,
        "auto_vacuum": incremental,
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600


def test_a_database_of_another_version_is_refused(where: str, run: Run) -> None:
    with SessionStore.open(where):
        pass
    change_row(where, "UPDATE schema_version SET version = 99")
    with pytest.raises(UserError, match=rf"version 99.*reads version {SCHEMA}"):
        Database(where, create=True)
    assert run("sessions", "list", "--sessions", where).refuses("version 99")


def test_sessions_of_the_old_form_are_refused_with_the_way_to_export_them(
    tmp_path: Path, run: Run
) -> None:
    (tmp_path / ("a" * 32)).mkdir()
    (tmp_path / ("a" * 32) / "0000000000000001.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"75069cc0.*/state"):
        Database(tmp_path, create=True)
    assert not (tmp_path / FILE).exists()
    assert run(
        "serve", "--model", "micro", "--sessions", "s3://bucket/sessions"
    ).refuses("75069cc0")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://host/x", "SQLite file, or postgresql"),
        ("ftp://host/x", "SQLite file, or postgresql"),
        ("postgresql://", "cannot be reached"),
    ],
)
def test_urls_of_no_database_that_is_known(url: str, words: str, run: Run) -> None:
    if url == "postgresql://":
        url = "postgresql+psycopg://nobody:hidden@127.0.0.1:1/x"
    result = run("serve", "--model", "micro", "--sessions", url, "--device", "cpu")
    assert result.refuses(words) and "hidden" not in result.text


def test_an_unknown_folder_is_not_made_by_a_look(tmp_path: Path, run: Run) -> None:
    for command in ("list", "export"):
        words = ("sessions", command, "--sessions", tmp_path / "none")
        assert run(*words).refuses("no sessions in")
    assert not (tmp_path / "none").exists()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"nothing that SQLite has written" * 100)
    with pytest.raises(UnavailableError, match="restore a backup"):
        Database(tmp_path, create=True)


def test_a_locked_file_is_waited_for_and_then_refused(
    tmp_path: Path, tiny_clip: CLIP, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.serve.database._LOCK_SECONDS", 0.3)
    with local_service(tmp_path, tiny_clip) as service:
        session = service.create()
        other = sqlite3.connect(
            tmp_path / FILE, isolation_level=None, check_same_thread=False
        )
        other.execute("BEGIN IMMEDIATE")
        refused = service.send(session, batch_of(0))
        assert refusal(refused) == (503, "storage")
        assert refused.headers["retry-after"] == "1"
        assert "locked" in refused.json()["message"]
        assert str(tmp_path) not in refused.text
        health = service.http.get("/healthz")
        assert (
            refusal(health) == (503, "storage") and "locked" in health.json()["message"]
        )
        threading.Timer(
            0.1, other.execute, ["ROLLBACK"]
        ).start()  # a short lock is waited for
        service.check(session, batch_of(1), alone)
        assert service.http.get("/healthz").status_code == 200
        other.close()


def test_a_full_disk_of_sqlite(tmp_path: Path, tiny_clip: CLIP, alone: Alone) -> None:
    """SQLite's own error: the file may have no more pages."""
    with local_service(tmp_path, tiny_clip) as service:
        session = service.create()
        service.check(session, batch_of(0), alone)
        engine = service.service.sessions._store.database._engine

        @sqlalchemy.event.listens_for(engine, "begin")
        def limit(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        pages = 1
        refused = service.post("domain_norm")
        assert (
            refusal(refused) == (503, "storage") and "full" in refused.json()["message"]
        )
        assert "retry-after" in refused.headers
        pages = 2**30
        service.check(session, batch_of(1), alone)
        assert service.ids() == [session]


def test_space_of_deleted_sessions_is_given_back(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    with local_service(tmp_path, tiny_clip) as service:
        database = service.service.sessions._store.database
        sessions = [service.create("tent") for _ in range(20)]
        for session in sessions:
            service.predict(session, batch_of(0))
        pages = "PRAGMA page_count"
        with database.reading() as connection:
            full = connection.exec_driver_sql(pages).scalar()
        for session in sessions:
            service.http.delete(f"/v1/sessions/{session}")
        service.service.sweep()
        with database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA freelist_count").scalar() == 0
            assert connection.exec_driver_sql(pages).scalar() < full / 4


def test_a_backup_by_sqlite_itself_beside_a_running_server(
    tmp_path: Path, tiny_clip: CLIP, alone: Alone
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    with local_service(tmp_path / "sessions", tiny_clip) as service:
        session = service.create()
        service.check(session, batch_of(0), alone)
        with (
            closing(sqlite3.connect(tmp_path / "sessions" / FILE)) as source,
            closing(sqlite3.connect(copy / FILE)) as target,
        ):
            source.backup(target)
        service.predict(session, batch_of(5))
    with local_service(copy, tiny_clip) as service:
        service.check(session, batch_of(1), alone)
        service.check_state(session, alone)


# --- PostgreSQL -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_password_and_an_unknown_database(
    postgresql: PostgreSQL, run: Run
) -> None:
    wrong = postgresql.url("postgres", password="wrong-and-secret")
    result = run("serve", "--model", "micro", "--sessions", wrong, "--device", "cpu")
    assert result.refuses("refuses the service's user or password")
    assert "wrong-and-secret" not in result.text
    assert run("sessions", "list", "--sessions", postgresql.url("none")).refuses(
        "does not exist"
    )


@pytest.mark.slow
def test_a_database_without_tables_is_not_changed_by_a_look(
    postgresql: PostgreSQL, run: Run
) -> None:
    url = postgresql.create_database()
    assert run("sessions", "list", "--sessions", url).refuses("no tables of sessions")


@pytest.mark.slow
def test_replicas_create_the_tables_once(postgresql: PostgreSQL) -> None:
    url = postgresql.create_database()
    errors = []

    def start() -> None:
        try:
            Database(url, create=True).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.slow
def test_a_server_whose_database_is_gone_comes_back_with_it(
    postgresql: PostgreSQL, tiny_clip: CLIP, alone: Alone
) -> None:
    with local_service(postgresql.create_database(), tiny_clip) as service:
        session = service.create()
        service.check(session, batch_of(0), alone, sequence=1)
        postgresql.kill()
        refused = service.send(session, batch_of(1), sequence=2)
        assert refusal(refused) == (503, "storage") and "retry-after" in refused.headers
        assert "127.0.0.1" not in refused.text
        health = service.http.get("/healthz")
        assert (
            refusal(health) == (503, "storage")
            and "reached" in health.json()["message"]
        )
        assert service.http.get("/metrics").status_code == 200
        postgresql.start()
        service.check(session, batch_of(1), alone, sequence=2)
        assert service.http.get("/healthz").status_code == 200
        service.check_state(session, alone)


@pytest.mark.slow
def test_a_locked_row_is_waited_for_and_then_refused(
    postgresql: PostgreSQL,
    tiny_clip: CLIP,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cliquetta.serve.database._LOCK_SECONDS", 1)
    url = postgresql.create_database()
    with local_service(url, tiny_clip) as service:
        session = service.create()
        with SessionStore.open(url) as other, other.database.writing() as connection:
            connection.execute(sqlalchemy.text("SELECT 1 FROM sessions FOR UPDATE"))
            refused = service.send(session, batch_of(0))
        assert refusal(refused) == (503, "storage")
        assert (refused.headers["retry-after"], "locked" in refused.text) == ("1", True)
        service.check(session, batch_of(1), alone)


@pytest.mark.slow
def test_a_password_that_changes_while_the_server_runs(
    postgresql: PostgreSQL, tiny_clip: CLIP, alone: Alone
) -> None:
    """Waiting does not help, so that no time is given; nothing is lost when it is right again."""
    url = postgresql.create_database()
    name = url.rpartition("/")[2]
    postgresql.execute("CREATE ROLE guest LOGIN PASSWORD 'first'")
    postgresql.execute(f"ALTER DATABASE {name} OWNER TO guest")
    url = url.replace(f"tests:{PASSWORD}@", "guest:first@")
    with local_service(url, tiny_clip) as service:
        session = service.create()
        service.check(session, batch_of(0), alone, sequence=1)
        postgresql.execute("ALTER ROLE guest PASSWORD 'second'")
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'guest'"
        postgresql.execute(end)
        refused = service.send(session, batch_of(1), sequence=2)
        assert (
            refusal(refused) == (503, "storage")
            and "retry-after" not in refused.headers
        )
        health = service.http.get("/healthz").json()["message"]
        assert "password" in health and "guest" not in health and "first" not in health
        postgresql.execute("ALTER ROLE guest PASSWORD 'first'")
        service.check(session, batch_of(1), alone, sequence=2)


@pytest.mark.slow
def test_commits_are_on_disk_whatever_the_server_is_set_to(
    postgresql: PostgreSQL,
) -> None:
    url = postgresql.create_database()
    name = url.rpartition("/")[2]
    postgresql.execute(f"ALTER DATABASE {name} SET synchronous_commit TO off")
    database = Database(url, create=True)
    with database.writing() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    database.close()


def test_the_name_of_a_database_never_shows_its_password() -> None:
    assert shown_name("postgresql://me:secret@host/clips") == (
        "postgresql+psycopg://me:***@host/clips"
    )
    assert shown_name("some/folder") == "some/folder"
