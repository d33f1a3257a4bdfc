"""Runs one method on one stream and scores it beside zero-shot on the same images."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.evaluation.metrics import Metrics
from cliquetta.methods._shared.fewshot_io import fit_method
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import create_method, get_method, method_config
from cliquetta.prompts.classes import ClassPrompts
from comparison.contestants import BASELINE, Contestant
from comparison.held import Held, Segment, cut_stream
from comparison.worlds import World


class Bench:
    """Runs cells on sets that lie on the device."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self._held: dict[str, Held] = {}
        self._answers: dict[tuple[str, str], tuple[Tensor, float]] = {}
        self._fitted: dict[str, Mapping[str, Tensor]] = {}
        self._prompts: dict[tuple[str, ...], ClassPrompts] = {}
        self._warm: set[str] = set()

    def hold(self, *ids: str) -> list[Held]:
        """The sets on the device; others are let go, with all that was answered on them."""
        self._held = {id: held for id, held in self._held.items() if id in ids}
        self._answers = {key: value for key, value in self._answers.items() if key[1] in ids}
        for id in ids:
            if id not in self._held:
                start = time.perf_counter()
                self._held[id] = self._load(id)
                seconds = time.perf_counter() - start
                print(f"# {id}: {len(self._held[id])} images in {seconds:.1f} s", flush=True)
        return [self._held[id] for id in ids]

    def _load(self, id: str) -> Held:
        options, cycles = self.options, 1
        if options.stream == "long":
            size = min(len(self.world.draw(id, 0)), options.limit or sys.maxsize)
            cycles = -(-options.length // size)
        return Held(
            id,
            lambda cycle: self.world.draw(id, cycle),
            self.world.model,
            limit=options.limit,
            cycles=cycles,
            workers=options.workers,
        )

    def run(self, one: Contestant, held: Held, other: Held | None, seed: int) -> dict[str, Any]:
        """The scores of one method on one stream."""
        options = self.options
        limit = one.limit
        if options.stream == "long":
            limit = min(limit or options.length, options.length)
        segments = cut_stream(
            options.stream, held, other, seed, limit=limit, present=options.present
        )
        if one.independent:
            # The rounds of a long stream are shuffled one by one: its end is not the set's.
            some = None if options.stream == "long" else limit
            parts = [self.answers(one, s.held, some) for s in segments]
            logits = [part[0][s.rows] for part, s in zip(parts, segments, strict=True)]
            rate = parts[0][1]
        else:
            self._warm_up(one, held)
            logits, rate = self._stream(self._adapter(one, held, seed), segments, options.batch)
        return {"images_per_s": rate, **self._score(segments, logits)}

    def answers(self, one: Contestant, held: Held, limit: int | None) -> tuple[Tensor, float]:
        """Logits of an independent method for the set as held, and its images/s; run once a set."""
        key = (f"{one.label} {limit}", held.id)
        if key not in self._answers:
            self._warm_up(one, held)
            adapter = self._adapter(one, held, 0)
            rows = np.arange(len(held))[:limit]
            batch = max(self.options.batch, 64)
            logits, rate = self._stream(adapter, [Segment(held, rows)], batch)
            self._answers[key] = logits[0], rate
        return self._answers[key]

    def _score(self, segments: Sequence[Segment], logits: Sequence[Tensor]) -> dict[str, Any]:
        """Accuracy, ECE and gains over zero-shot on the same images."""
        baseline = Contestant(BASELINE, BASELINE, method_config(BASELINE), None)
        labels = [segment.held.labels[segment.rows] for segment in segments]
        plain = [self.answers(baseline, s.held, None)[0][s.rows] for s in segments]
        right, was = (
            [(x.argmax(dim=-1) == y) for x, y in zip(answers, labels, strict=True)]
            for answers in (logits, plain)
        )
        metrics = Metrics(logits[0].shape[1])
        metrics.update(torch.cat(list(logits)), torch.cat(labels))
        scores = metrics.compute()
        now, then = torch.cat(right), torch.cat(was)
        base = 100 * float(then.float().mean())
        return {
            "images": len(now),
            "top1": scores["top1"],
            "base": base,
            "gain": scores["top1"] - base,
            "helped": int((now & ~then).sum()),
            "harmed": int((then & ~now).sum()),
            "mean_class": scores["mean_class"],
            "ece": scores["ece"],
            "nll": scores["nll"],
            "segment_gains": [
                100 * float(r.float().mean() - w.float().mean())
                for r, w in zip(right, was, strict=True)
            ],
        }

    def _adapter(self, one: Contestant, held: Held, seed: int) -> Adapter:
        model, dataset = self.world.model, held.parts[0]
        if dataset.names not in self._prompts:
            self._prompts[dataset.names] = self.world.prompts(dataset)
        prompts, fitted = self._prompts[dataset.names], None
        examples = self.world.examples
        if get_method(one.name).fit is not None and examples is not None:
            if one.label not in self._fitted:
                config, epochs = one.config, self.options.fit_epochs
                if epochs and hasattr(config, "epochs"):
                    config = dataclasses.replace(config, epochs=epochs)
                start = time.perf_counter()
                self._fitted[one.label] = fit_method(one.name, model, prompts, examples, config)
                print(f"# {one.label} fitted in {time.perf_counter() - start:.1f} s", flush=True)
            fitted = self._fitted[one.label]
        return create_method(one.name, model, prompts, one.config, seed=seed, fitted=fitted)

    def _stream(
        self, adapter: Adapter, segments: Sequence[Segment], batch: int
    ) -> tuple[list[Tensor], float]:
        """Logits (n, N) of every segment, on the CPU, and images/s."""
        for segment in segments:
            if adapter.views is not None:
                segment.held.views(adapter.views)  # made before the clock starts
        self._wait()
        start = time.perf_counter()
        logits = []
        for segment in segments:
            parts = []
            for at in range(0, len(segment.rows), batch):
                rows = segment.rows[at : at + batch]
                parts.append(adapter.predict(segment.held.batch(rows, adapter.views)).logits)
            logits.append(torch.cat(parts).cpu())
        self._wait()
        count = sum(len(segment.rows) for segment in segments)
        return logits, count / (time.perf_counter() - start)

    def _warm_up(self, one: Contestant, held: Held) -> None:
        """Let a GPU choose its kernels before the clock of a method's first run starts."""
        if self.world.model.device.type == "cuda" and one.label not in self._warm:
            self._warm.add(one.label)
            adapter = self._adapter(one, held, 0)
            adapter.predict(held.batch(np.arange(min(4, len(held))), adapter.views))

    def _wait(self) -> None:
        if self.world.model.device.type == "cuda":
            torch.cuda.synchronize()
