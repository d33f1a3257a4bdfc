"""Between the widgets and a visitor's session: every press of a button, errors turned to words."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.app import pages
from cliquetta.app.figures import Picture, enlarged
from cliquetta.app.session import AppSession, Choices, StreamChoice, read_classes
from cliquetta.errors import UnknownNameError
from cliquetta.methods.registry import MethodEntry
from cliquetta.model.clip import CLIP
from cliquetta.serve.errors import ServiceError, invalid
from cliquetta.serve.factory import as_refusal
from cliquetta.serve.limits import Limits

STREAM, FILES = "Bundled stream", "My images"
SOURCES = (STREAM, FILES)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """What the widgets hold when a button is pressed."""

    model: str
    method: str
    classes: str
    source: str = STREAM
    stream: StreamChoice = field(default_factory=StreamChoice)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Pages:
    """What is shown afterwards."""

    notice: str
    predictions: str = pages.NOTHING_YET
    cliques: str = pages.NOTHING_YET
    pictures: tuple[tuple[Picture, str], ...] = ()
    """To choose from for the attention maps, with captions."""
    attention: str = pages.NOTHING_YET
    memory: str = pages.NOTHING_YET


class Desk:
    """Serves all visitors; what belongs to one is in the session that comes and goes with him."""

    def __init__(
        self,
        models: Mapping[str, CLIP],
        methods: Mapping[str, MethodEntry],
        limits: Limits,
        folder: Path,
    ) -> None:
        """Files for download go below ``folder``."""
        self.models = models
        self.methods = methods
        self.limits = limits
        self.folder = folder

    def next_batch(
        self, session: AppSession | None, form: Form, kind: str
    ) -> tuple[AppSession | None, Pages]:
        """Run one batch; with another model, method or class list, on a new session."""

        def run() -> tuple[AppSession, Pages]:
            current, opening = self._session(session, form)
            if form.source == FILES:
                shown = current.next_of_files(form.files, form.stream.batch_size)
            else:
                shown = current.next_of_stream(form.stream)
            return current, self._pages(current, pages.batch_notice(current, shown, opening), kind)

        return self._told(session, run, kind)

    def load_state(
        self, session: AppSession | None, form: Form, path: Path, kind: str
    ) -> tuple[AppSession | None, Pages]:
        """Let the chosen method go on from a downloaded state."""

        def run() -> tuple[AppSession, Pages]:
            if path.stat().st_size > self.limits.state_bytes:
                raise invalid(f"a state may have {self.limits.state_bytes:,} bytes")
            current, _ = self._session(session, form)
            images = current.load_state(path.read_bytes())
            words = f"{path.name} is loaded: {current.choices.method} has seen {images:,} images."
            return current, self._pages(current, pages.notice(words), kind)

        return self._told(session, run, kind)

    def reset(self, session: AppSession | None) -> tuple[AppSession | None, Pages]:
        """Forget what was learned and shown."""
        if session is not None:
            session.reset()
        return session, Pages(pages.notice("Forgotten: the next batch is the first one."))

    def files(self, session: AppSession | None) -> tuple[list[str], str]:
        """Predictions and state as files to download, and a notice."""
        if session is None:
            return [], pages.notice("Nothing to download yet: run a batch first.", bad=True)
        folder = self.folder / session.id
        folder.mkdir(exist_ok=True)
        found = []
        for name, data in (
            ("predictions.csv", session.predictions_csv()),
            (f"{session.choices.method}-state.safetensors", session.state()),
        ):
            (folder / name).write_bytes(data)
            found.append(str(folder / name))
        return found, pages.notice("Predictions and state are ready.")

    def attention(self, session: AppSession | None, place: int, kind: str) -> str:
        """Attention maps of one image of the last batch."""
        return pages.NOTHING_YET if session is None else pages.attention_page(session, place, kind)

    def forget(self, session: AppSession | None) -> None:
        """A visitor has gone, or his session was replaced: delete his files."""
        if session is not None:
            shutil.rmtree(self.folder / session.id, ignore_errors=True)

    def _session(self, session: AppSession | None, form: Form) -> tuple[AppSession, str]:
        """The session if it was built from these choices, else a new one and why."""
        for kind, name, known in (
            ("model", form.model, self.models),
            ("method", form.method, self.methods),
        ):
            if name not in known:
                raise UnknownNameError(kind, name, known)
        choices = Choices(form.model, form.method, read_classes(form.classes, self.limits))
        if session is not None and session.choices == choices:
            return session, ""
        fresh = AppSession(self.models, choices, self.limits)
        changed = "Another model, method or class list: the method starts anew."
        return fresh, "" if session is None else changed

    def _told(
        self,
        session: AppSession | None,
        run: Callable[[], tuple[AppSession, Pages]],
        kind: str,
    ) -> tuple[AppSession | None, Pages]:
        """``run``, or the reason why not above what was shown before."""
        try:
            current, shown = run()
        except ServiceError as error:
            return session, self._refusal(session, error.message, kind)
        except (ValueError, KeyError) as error:
            return session, self._refusal(session, as_refusal(error).message, kind)
        except Exception:
            _log.exception("a batch failed")
            sentence = "That failed on our side; nothing was changed. The log says why."
            return session, self._refusal(session, sentence, kind)
        if current is not session:
            self.forget(session)
        return current, shown

    def _refusal(self, session: AppSession | None, sentence: str, kind: str) -> Pages:
        told = pages.notice(sentence, bad=True)
        return Pages(told) if session is None else self._pages(session, told, kind)

    def _pages(self, session: AppSession, told: str, kind: str) -> Pages:
        shown = session.last
        memory = pages.memory_page(session)
        if shown is None:
            return Pages(told, memory=memory)
        place = next((i for i, row in enumerate(shown.rows) if row.changed), 0)
        return Pages(
            told,
            pages.predictions_page(session),
            pages.cliques_page(session),
            tuple(
                (enlarged(picture), f"{number}: {row.after}")
                for number, (picture, row) in enumerate(
                    zip(shown.pictures, shown.rows, strict=True), start=1
                )
            ),
            pages.attention_page(session, place, kind),
            memory,
        )


def make_form(
    model: str,
    method: str,
    classes: str,
    source: str,
    shift: str,
    severity: float,
    batch_size: float,
    files: Sequence[str] | None,
) -> Form:
    """The form from the values of the widgets, in their order."""
    stream = StreamChoice(shift, int(severity), max(1, int(batch_size)))
    return Form(model, method, classes, source, stream, tuple(map(Path, files or ())))
