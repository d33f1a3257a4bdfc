"""Accuracy that an exported model keeps: ``python -m benchmarks.exported``.

A method adapts to the first half of a stream; its frozen model and its ONNX files
answer the second half. Prints accuracy, differences of the logits and sizes.
"""

import argparse
import tempfile
from pathlib import Path

import onnxruntime
import torch

from cliquetta import create_method, create_model, get_dataset
from cliquetta.data.stream import Stream
from cliquetta.export import export_model

HEADER = (
    "| method | zero-shot % | learning on % | frozen % | file | difference of logits, "
    "of probabilities | other answers % | MB |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="bundled@gaussian_noise:3")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--methods", default="zero_shot,tent,domain_norm")
    parser.add_argument("--images", type=int, default=1024)
    args = parser.parse_args()
    model = create_model(args.model)
    dataset = get_dataset(args.dataset)
    stream = Stream(dataset, model.preprocess, 64, limit=args.images)
    batches = [(batch.images, labels) for batch, labels in stream.batches()]
    half = len(batches) // 2
    pixels = torch.cat([images for images, _ in batches[half:]])
    labels = torch.cat([labels for _, labels in batches[half:]])
    plain = create_method("zero_shot", model, dataset.prompts).predict(pixels).logits
    print(HEADER)
    for name in args.methods.split(","):
        adapter = create_method(name, model, dataset.prompts)
        for images, _ in batches[:half]:
            adapter.predict(images)
        frozen = adapter.frozen_model()
        state = adapter.state_dict()
        with torch.no_grad():
            answers = frozen(pixels)
        adapter.load_state_dict(state)
        online = torch.cat(
            [adapter.predict(images).logits for images, _ in batches[half:]]
        )
        adapter.load_state_dict(state)
        scores = " | ".join(
            f"{100 * float((logits.argmax(1) == labels).float().mean()):.2f}"
            for logits in (plain, online, answers)
        )
        with tempfile.TemporaryDirectory() as folder:
            for is_half in (False, True):
                path = Path(folder) / "model.onnx"
                size = export_model(adapter, path, half=is_half).bytes / 1e6
                options = onnxruntime.SessionOptions()
                # it tells of every float16 product that it casts
                options.log_severity_level = 3
                session = onnxruntime.InferenceSession(path, options)
                found = torch.from_numpy(
                    session.run(["logits"], {"pixels": pixels.numpy()})[0]
                )
                apart = (found - answers).abs().max()
                shifted = (found.softmax(1) - answers.softmax(1)).abs().max()
                other = 100 * (found.argmax(1) != answers.argmax(1)).float().mean()
                print(
                    f"| `{name}` | {scores} | {'float16' if is_half else 'float32'} | {apart:.1e}, "
                    f"{shifted:.1e} | {other:.2f} | {size:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
