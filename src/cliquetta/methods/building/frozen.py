"""An adapter that has learned and learns no more."""

from collections.abc import Sequence
from pathlib import Path

import torch

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.state import load_state
from cliquetta.methods.building.zero_shot_reference import CONFIDENCES, LEFT_OUT
from cliquetta.types import Batch, Prediction


class FrozenAdapter(Adapter):
    """Adapter with the :meth:`Adapter.frozen_model` of another as it was."""

    batch_dependence = BatchDependence.INDEPENDENT
    frozen = True

    def __init__(self, source: Adapter) -> None:
        self._frozen_model = source.frozen_model()
        self.name = source.name
        super().__init__(source.model, source.prompts, source.config, seed=source.seed)
        self._bias = 0.0  # the frozen model adds it
        self.scaled_cosines = source.scaled_cosines
        self.fitted = {**(source.fitted or {}), **source.state_dict()}
        """Tensors that its predictions come from: they distinguish two states."""
        if source.reject_share is not None:
            self.enable_rejection(source.reject_share)
            self._take(source, LEFT_OUT, "--reject")
        if source.calibrated:
            self.enable_calibration()
            self._take(source, CONFIDENCES, "--calibrate")

    def _take(self, source: Adapter, name: str, option: str) -> None:
        """Copy what rejection or calibration learned; refused if it learned nothing."""
        if torch.equal(source.memory[name], self.memory[name]):
            raise UserError(
                f"the state was saved without {option}, which needs what it learns: predict with "
                f"--state and {option}, without --frozen, before"
            )
        self.memory[name] = source.memory[name]

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        return Prediction(self._frozen_model(batch.images))


def freeze(adapters: Sequence[Adapter], state: Path | None) -> FrozenAdapter:
    """Freeze the one adapter with what a state file holds, if that is enough for it."""
    if len(adapters) > 1:
        raise UserError("one method at a time can be frozen")
    (adapter,) = adapters
    if state is not None:
        load_state(adapter, state, other_classes=True)
    elif len(adapter.memory):
        raise UserError(
            "a frozen method needs the state that it has learned: give --state FILE"
        )
    return FrozenAdapter(adapter)
