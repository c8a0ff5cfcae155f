"""A training from its experiment to its outputs: start or resume, steps, checkpoints, milestones, publishing."""

import importlib
import json
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kairos import compute
from kairos.data.latents import open_latents
from kairos.progress import Progress, duration, say
from kairos.training.checkpoint import component_hashes
from kairos.training.identity import code_roots, identity_of
from kairos.training.loop import Trainer
from kairos.training.milestone import write_milestone
from kairos.training.store import Store, exclusive, read_timing


def import_components(plain: dict[str, Any], method: str) -> None:
    """Import what a training of `method` will use, so that its time counts as start-up.

    torch's optimisers import its compiler when the first one is made.
    """
    for module in ("torch._dynamo", *code_roots(plain, method)):
        importlib.import_module(module)


def train(
    plain: dict[str, Any],
    method: str,
    seed: int,
    out: Path,
    latents_folder: Path,
    milestones: list[int],
    restart: bool = False,
    part: bool = False,
    wait: bool = False,
) -> dict[str, Any]:
    """Train until every one of `milestones` is reached, and publish them in `out`.

    Args:
        plain: the whole resolved experiment as plain values.
        method: name of one of its methods.
        seed: of the training.
        out: folder of the training.
        latents_folder: what `kairos encode` made.
        milestones: steps to keep weights at, increasing; the last one is the length.
        restart: forget the state and start from step 0.
        part: publish the milestones only; a later call completes the training.
        wait: wait for another process that trains here, such as a killed controller's job, instead of refusing.

    Returns:
        What happened: ``steps_run`` by this call and ``step`` reached.

    Raises:
        KairosError: another process trains here; the loss is not finite; data or device are missing.
    """
    settings = plain["training"]
    device = compute.setup(settings["threads"], settings["device"], settings["deterministic"])
    latents = open_latents(latents_folder)
    identity = identity_of(plain, method, seed, latents.manifest, device.type)
    store = Store(out, identity["identity"])
    with exclusive(out / ".state", wait):
        if restart:
            store.clear()
        missing = store.start(milestones, part)
        trainer = None
        steps_run = 0
        if missing:
            trainer = Trainer(plain, method, seed, latents, device)
            facts = {
                "identity": identity["identity"],
                "method": method,
                "seed": seed,
                "config": plain,
                "autoencoder_sha256": latents.manifest["autoencoder_sha256"],
                "dataset_sha256": latents.manifest["dataset_sha256"],
                "provenance": provenance(settings, device),
            }
            label = f"train {method} seed {seed}"
            steps_run = Run(store, trainer, facts, label).until(milestones, missing)
        else:
            say(f"{out}: all milestones are there, 0 steps to do")
        store.fulfil(milestones)
        record: dict[str, Any] | None = None
        if not part:
            content = store.newest(milestones[-1])
            assert content is not None
            record = {
                "identity": identity["identity"],
                "parts": {key: value for key, value in identity.items() if key != "identity"},
                "method": method,
                "seed": seed,
                "steps": content["step"],
                "milestones": milestones,
                "components": {**component_hashes(content), "metrics": content["metrics"]["sha256"]},
                "provenance": provenance(settings, device),
            }
        store.publish(milestones, record)
    return {"steps_run": steps_run, "step": milestones[-1], "identity": identity["identity"]}


class Run:
    """The steps of one job: metrics and timing lines, checkpoints, milestones."""

    def __init__(self, store: Store, trainer: Trainer, facts: dict[str, Any], label: str):
        self.store, self.trainer, self.facts, self.label = store, trainer, facts, label
        start = trainer.strategy.table(trainer.density_images())  # before anything is loaded: the start's
        self.start_density = start["p"]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.steps_run = 0
        self.seconds = 0.0

    def until(self, milestones: list[int], missing: list[int]) -> int:
        """Go on from the newest usable state until the last milestone; returns the number of steps computed."""
        trainer, store = self.trainer, self.store
        state = store.resume(missing[0], trainer.device)
        if state is not None:
            trainer.load(state, state["step"])
            say(f"{self.label}: goes on from step {trainer.step}")
        self.seconds = max((line["seconds"] for line in read_timing(store.timing)), default=0.0)
        if trainer.step == 0 and 0 in milestones:
            self._milestone()
        wanted, every = set(milestones), trainer.settings["checkpoint_every"]
        facts = ""
        progress = Progress(milestones[-1], self.label, "step", start=trainer.step)
        with open(store.metrics, "a", encoding="utf-8") as metrics:
            while trainer.step < milestones[-1]:
                begun = time.perf_counter()
                line = trainer.advance()
                facts = f"loss {line['loss']:.4g}"
                self.seconds += time.perf_counter() - begun
                self.steps_run += 1
                if trainer.step % trainer.settings["log_every"] == 0:
                    metrics.write(json.dumps(line) + "\n")
                if trainer.step in wanted or trainer.step % every == 0 or trainer.step == milestones[-1]:
                    metrics.flush()
                    os.fsync(metrics.fileno())
                    self._timing()
                    if trainer.step in wanted:
                        self._milestone()
                    store.save(trainer.step, trainer.state())
                progress.advance(facts=facts)
        if trainer.step == 0:
            self._timing()
            store.save(0, trainer.state())
        progress.close(facts)
        say(f"{self.label}: {self.steps_run} steps computed, {duration(self.seconds)} of training in all")
        return self.steps_run

    def _milestone(self) -> None:
        write_milestone(self.store.milestone(self.trainer.step), self.trainer, self.start_density, self.facts)

    def _timing(self) -> None:
        line = {
            "step": self.trainer.step,
            "seconds": round(self.seconds, 3),
            "steps_run": self.steps_run,
            "started": self.started,
        }
        with open(self.store.timing, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def provenance(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What a result was computed with, and whether that is exact; no clock and no host."""
    inexact = []
    if settings["compile"]:
        inexact.append("training.compile: autotuning may choose other kernels on another run")
    if not settings["deterministic"]:
        inexact.append("training.deterministic is off")
    return {
        "kairos": version("kairos"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "diffusers": version("diffusers"),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": settings["threads"],
        "exact": not inexact,
        "inexact_because": inexact,
    }
