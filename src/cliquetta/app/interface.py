"""The page of the web app: Gradio widgets around a :class:`Controller`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cliquetta.errors import UserError

# Before the import, which reads it: otherwise Gradio reports every start to its makers.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
from gradio import processing_utils

from cliquetta.app.controller import FILES, NO_SHIFT, STREAM, Controller, Form, Pages
from cliquetta.app.pages import CSS, NOTHING_YET, notice
from cliquetta.app.session import AppSession
from cliquetta.data.bundled import load_bundled
from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES
from cliquetta.serve.schema import DEFAULT_METHOD

VISITORS = 32  # sessions held in memory; the least recently used are dropped first
IDLE_SECONDS = 3600  # after which a session and the files of a visitor are deleted
WAITING = 32  # clicks that may wait; batches run one at a time

_PRIVATE: dict[str, Any] = {"api_visibility": "private"}  # not offered as an API
# of events that compute: one at a time for all visitors
_WORK = {**_PRIVATE, "concurrency_limit": 1, "concurrency_id": "model"}
_QUICK = {**_PRIVATE, "queue": False, "show_progress": "hidden"}

_WELCOME = "Choose images, classes and a method, then press Next batch."
_ABOUT = (
    "# CliqueTTA\nPlain CLIP and a method that adapts while it predicts, side by side. Images stay "
    "on the machine that runs this page."
)


def build_app(controller: Controller) -> gr.Blocks:
    """Build the page. Each visitor's session is held in a state of its own."""
    with gr.Blocks(
        title="CliqueTTA", analytics_enabled=False, delete_cache=(600, IDLE_SECONDS)
    ) as app:
        session = gr.State(
            None, time_to_live=IDLE_SECONDS, delete_callback=controller.forget
        )
        gr.Markdown(_ABOUT)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                form = _form(controller)
                with gr.Row():
                    run = gr.Button(
                        "Next batch", variant="primary", min_width=120, elem_id="next"
                    )
                    reset = gr.Button("Reset", min_width=80, elem_id="reset")
            with gr.Column(scale=3):
                message = gr.HTML(notice(_WELCOME), elem_id="notice")
                kind, shown, files = _tabs(controller, session, form, message)
        # What a click changes, in the order of `_flat`.
        outputs = [session, message, *shown]

        def on_next(now: AppSession | None, kind: str, *values: Any) -> list[Any]:
            current, pages = controller.next_batch(now, Form(*values), kind)
            return _flat(current, pages)

        def on_reset(now: AppSession | None) -> list[Any]:
            current, pages = controller.reset(now)
            return _flat(current, pages)

        # Downloads of an earlier batch are cleared by the next one.
        ran = run.click(on_next, [session, kind, *form], outputs, **_WORK)
        ran.then(list, None, files, **_QUICK)
        reset.click(on_reset, [session], outputs, **_WORK)
    app.queue(max_size=WAITING, api_open=False)
    return app


def _form(controller: Controller) -> list[Any]:
    """Build the choices, in the order of :class:`Form`."""
    most = min(64, controller.settings.limits.images)
    methods = list(controller.settings.methods)
    default = DEFAULT_METHOD if DEFAULT_METHOD in methods else methods[0]
    source = gr.Radio([STREAM, FILES], value=STREAM, label="Images", elem_id="source")
    with gr.Group() as bundled:
        shifts = [NO_SHIFT, *CORRUPTIONS]
        shift = gr.Dropdown(shifts, value=Form.shift, label="Shift", elem_id="shift")
        severity = gr.Slider(
            minimum=min(SEVERITIES),
            maximum=max(SEVERITIES),
            value=Form.severity,
            step=1,
            label="Severity",
        )
    files = gr.File(
        label=f"Images, at most {controller.settings.limits.images}",
        file_count="multiple",
        visible=False,
        elem_id="files",
        height=160,
    )
    batch = gr.Slider(
        1, most, min(Form.batch_size, most), step=1, label="Images per batch"
    )
    classes = gr.Textbox(
        ", ".join(load_bundled().names),
        label="Class names",
        info="separated by commas or lines; may change between batches",
        lines=2,
        elem_id="classes",
    )
    names = list(controller.settings.models)
    method = gr.Dropdown(methods, value=default, label="Method", elem_id="method")
    model = gr.Dropdown(names, value=names[0], label="Model", elem_id="model")

    def on_source(value: str) -> tuple[Any, Any]:
        return gr.update(visible=value == STREAM), gr.update(visible=value == FILES)

    source.change(on_source, source, [bundled, files], **_QUICK)
    return [model, method, classes, source, shift, severity, batch, files]


def _tabs(
    controller: Controller, session: Any, form: list[Any], message: Any
) -> tuple[Any, list[Any], Any]:
    """Build the tabs; return the kind of attention, what shows a batch, and the downloads."""
    with gr.Tab("Predictions"):
        predictions = gr.HTML(NOTHING_YET, elem_id="predictions")
    with gr.Tab("Cliques"):
        cliques = gr.HTML(NOTHING_YET, elem_id="cliques")
    with gr.Tab("Attention"):
        kind = gr.Radio(
            [("class token", "class"), ("rollout", "rollout")],
            value="class",
            label="Map",
            elem_id="kind",
        )
        gr.Markdown("Choose an image:")
        pictures = gr.Gallery(
            label="Choose an image",
            show_label=False,
            columns=8,
            height="auto",
            buttons=[],
            object_fit="contain",
            allow_preview=False,
            interactive=False,
            elem_id="pictures",
        )
        attention = gr.HTML(NOTHING_YET, elem_id="attention")
    with gr.Tab("Memory"):
        memory = gr.HTML(NOTHING_YET, elem_id="memory")
    shown = [predictions, cliques, pictures, attention, memory]
    with gr.Tab("Files"):
        prepare = gr.Button("Prepare downloads", elem_id="prepare")
        files = gr.File(
            label="Predictions and state",
            file_count="multiple",
            interactive=False,
            height=120,
            elem_id="downloads",
        )
        upload = gr.UploadButton(
            "Load a state", file_types=[".safetensors"], elem_id="load"
        )
    chosen = gr.State(0)

    def on_select(
        now: AppSession | None, kind: str, event: gr.SelectData
    ) -> tuple[int, str]:
        index = int(event.index)
        return index, controller.attention(now, index, kind)

    def on_load(
        now: AppSession | None, kind: str, path: str, *values: Any
    ) -> list[Any]:
        form = Form(*values)
        current, pages = controller.load_state(now, form, Path(path), kind)
        return _flat(current, pages)

    pictures.select(on_select, [session, kind], [chosen, attention], **_WORK)
    kind.change(controller.attention, [session, chosen, kind], attention, **_WORK)
    prepare.click(controller.files, [session], [files, message], **_WORK)
    upload.upload(
        on_load, [session, kind, upload, *form], [session, message, *shown], **_WORK
    )
    return kind, shown, files


def _flat(session: AppSession | None, pages: Pages) -> list[Any]:
    """List the values of the widgets that show a batch, after the session."""
    return [session, *vars(pages).values()]


async def refuse_address(url: str) -> None:
    """Replace Gradio's download of addresses: a visitor may send one for a file."""
    raise UserError(f"addresses are not fetched: {url[:100]}")


def launch(
    controller: Controller,
    *,
    host: str,
    port: int,
    open_browser: bool,
    auth: Callable[[str, str], bool] | None,
    app_kwargs: dict[str, Any],
) -> None:
    """Show the app until the process is stopped; ``app_kwargs`` go to the web server."""
    processing_utils.async_ssrf_protected_get = refuse_address
    build_app(controller).launch(
        server_name=host,
        server_port=port,
        auth=auth,
        app_kwargs=app_kwargs,
        share=False,
        inbrowser=open_browser,
        quiet=True,
        auth_message="Any name; the password is a token.",
        max_file_size=controller.settings.limits.body_bytes,
        state_session_capacity=VISITORS,
        run_history=False,
        footer_links=[],
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        ssr_mode=False,
        css=CSS,
        theme=gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["monospace"]
        ),
    )
