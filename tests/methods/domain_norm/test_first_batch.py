"""With calibration one threshold on probabilities serves first and later batches alike."""

from __future__ import annotations

from cliquetta import create_method, create_model, get_dataset
from cliquetta.data.stream import Stream


def test_calibrated_first_batches_are_as_sure_as_zero_shot() -> None:
    model, dataset = create_model("micro", device="cpu"), get_dataset("bundled")
    batch, _ = next(iter(Stream(dataset, model.preprocess, 64)))

    def sure(name: str, *, calibrate: bool = False) -> float:
        method = create_method(name, model, dataset.prompts)
        method.enable(reject=None, calibrate=calibrate)
        return float(method.predict(batch).probabilities.amax(dim=1).mean())

    plain, calibrated = sure("domain_norm"), sure("domain_norm", calibrate=True)
    zero_shot = sure("zero_shot")
    assert abs(calibrated - zero_shot) < abs(plain - zero_shot) / 4
    assert plain < zero_shot
