"""Between the widgets and a visitor's session: one method per button; errors become messages."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.app import pages
from cliquetta.app.session import AppSession
from cliquetta.serve.errors import ServiceError, as_refusal, invalid
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.settings import Settings

_log = logging.getLogger(__name__)

STREAM = "Bundled stream"
FILES = "My images"
NO_SHIFT = "none"
_OTHER_CLASSES = (
    "The class list changed: what was learned about the images is kept; what was remembered per "
    "class and the score start again."
)


@dataclass(frozen=True)
class Form:
    """Values of the widgets, in their order, when a button is pressed."""

    model: str
    method: str
    classes: str
    source: str = STREAM
    shift: str = "motion_blur"
    severity: float = 4
    batch_size: float = 16
    files: Sequence[str] | None = None


@dataclass(frozen=True)
class Pages:
    """Content of the tabs afterwards, in the order of the widgets."""

    notice: str
    predictions: str = pages.NOTHING_YET
    cliques: str = pages.NOTHING_YET
    pictures: list[tuple[pages.Picture, str]] = field(default_factory=list)
    """To choose from for the attention maps, with captions."""
    attention: str = pages.NOTHING_YET
    memory: str = pages.NOTHING_YET


class Controller:
    """Serves all visitors; what belongs to one is in the session that is passed in and out."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Put files for download below ``folder``."""
        self.settings = settings
        self.folder = folder

    def next_batch(
        self, session: AppSession | None, form: Form, kind: str
    ) -> tuple[AppSession | None, Pages]:
        """Run one batch; another model or method begins a new session, other classes do not."""

        def run() -> tuple[AppSession, str]:
            current, opening = self._session(session, form)
            batch_size = max(1, int(form.batch_size))
            if form.source == FILES:
                files = [Path(name) for name in form.files or ()]
                shown = current.next_of_files(files, batch_size)
            else:
                dataset = "bundled"
                if form.shift != NO_SHIFT:
                    dataset += f"@{form.shift}:{int(form.severity)}"
                shown = current.next_of_stream(dataset, batch_size)
            return current, pages.batch_notice(current, shown, opening)

        return self._reported(session, run, kind)

    def load_state(
        self, session: AppSession | None, form: Form, path: Path, kind: str
    ) -> tuple[AppSession | None, Pages]:
        """Let the chosen method continue from a downloaded state."""

        def run() -> tuple[AppSession, str]:
            most = self.settings.limits.state_bytes
            if path.stat().st_size > most:
                raise invalid(f"a state may have {most:,} bytes")
            current, _ = self._session(session, form)
            images = current.load_state(path.read_bytes())
            method = current.info.method
            words = f"{path.name} is loaded: {method} has seen {images:,} images."
            return current, pages.notice(words)

        return self._reported(session, run, kind)

    def reset(self, session: AppSession | None) -> tuple[AppSession | None, Pages]:
        """Forget what was learned and shown."""
        if session is not None:
            session.reset()
        words = "Forgotten: the next batch is the first one."
        return session, Pages(pages.notice(words))

    def files(self, session: AppSession | None) -> tuple[list[str], str]:
        """Write predictions and state as files to download; also return a notice."""
        if session is None:
            words = "Nothing to download yet: run a batch first."
            return [], pages.notice(words, bad=True)
        folder = self.folder / session.id
        folder.mkdir(exist_ok=True)
        table = folder / "predictions.csv"
        table.write_bytes(session.predictions_csv())
        state = folder / f"{session.info.method}-state.safetensors"
        state.write_bytes(session.state())
        words = "Predictions and state are ready."
        return [str(table), str(state)], pages.notice(words)

    def attention(self, session: AppSession | None, index: int, kind: str) -> str:
        """Render attention maps of one image of the last batch."""
        if session is None or session.last is None or not session.last.rows:
            return pages.NOTHING_YET
        return pages.attention_page(session, session.last, index, kind)

    def forget(self, session: AppSession | None) -> None:
        """Delete the files of a visitor who left, or whose session was replaced."""
        if session is not None:
            shutil.rmtree(self.folder / session.id, ignore_errors=True)

    def _session(
        self, session: AppSession | None, form: Form
    ) -> tuple[AppSession, str]:
        """Return the session if built from these choices, else another one and what it keeps."""
        classes = read_classes(form.classes)
        request = SessionRequest(classes=classes, model=form.model, method=form.method)
        if session is None:
            return AppSession(self.settings, request), ""

        same = (session.info.model, session.info.method) == (form.model, form.method)
        if same and session.info.classes == classes:
            return session, ""
        if same and session.adapter.outlives_classes:
            return session.with_classes(classes), _OTHER_CLASSES
        why = "Another model or method"
        if same:
            why = f"{form.method} learns about its classes only"
        return AppSession(self.settings, request), f"{why}: it starts over."

    def _reported(
        self,
        session: AppSession | None,
        run: Callable[[], tuple[AppSession, str]],
        kind: str,
    ) -> tuple[AppSession | None, Pages]:
        """Render the pages after ``run``, or the reason of a refusal above those before."""
        try:
            current, message = run()
            shown = self._pages(current, message, kind)
        except (ServiceError, ValueError, KeyError) as error:
            sentence = as_refusal(error).message
        except Exception:
            _log.exception("a batch failed")
            sentence = "That failed on the server; nothing was changed. The reason is in its log."
        else:
            if current is not session:
                self.forget(session)
            return current, shown
        return session, self._pages(session, pages.notice(sentence, bad=True), kind)

    def _pages(self, session: AppSession | None, message: str, kind: str) -> Pages:
        """Render all tabs after a batch; attention of the first image whose prediction changed."""
        if session is None or session.last is None:
            return Pages(message)
        shown = session.last
        method = session.info.method
        classes = session.info.classes

        # The first image that changed is chosen: its maps tell most.
        changed = [index for index, row in enumerate(shown.rows) if row.changed]
        pictures = []
        for index, row in enumerate(shown.rows):
            picture = pages.enlarged(shown.pictures[index])
            pictures.append((picture, f"{index + 1}: {row.after}"))
        return Pages(
            notice=message,
            predictions=pages.predictions_page(shown, method),
            cliques=pages.cliques_page(shown, method, classes),
            pictures=pictures,
            attention=self.attention(session, changed[0] if changed else 0, kind),
            memory=pages.memory_page(session.tally, method, classes),
        )


def read_classes(text: str) -> list[str]:
    """Read class names as typed, one per line or separated by commas."""
    parts = [part.strip() for part in text.replace(",", "\n").splitlines()]
    names = [part for part in parts if part]
    if not names:
        raise invalid("no class names: type at least one, separated by commas or lines")
    return names
