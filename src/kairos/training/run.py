"""A training from its experiment to its outputs: start or resume, steps, checkpoints, milestones, publishing."""

import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kairos import compute, ranks
from kairos.data.latents import open_latents
from kairos.forward_process import scheduler_config
from kairos.milestones import write_milestone
from kairos.progress import Progress, duration, say
from kairos.training import launch
from kairos.training.checkpoint import component_hashes
from kairos.training.identity import code_roots, compute_identity
from kairos.training.job import CollectiveStop, ProgressFile, StoppedEarly, StopRequest
from kairos.training.loop import divergence_error, train_steps
from kairos.training.memory import explain_out_of_memory
from kairos.training.provenance import provenance, versions
from kairos.training.run_folder import RunFolder, lock_run_folder, read_timing
from kairos.training.state import TrainingState
from kairos_timesteps import distributed
from kairos_timesteps.base import Learned
from kairos_timesteps.errors import DivergedError


def import_components(plain: dict[str, Any], method: str) -> None:
    """Import what a training of `method` will use, so that its time counts as start-up.

    torch's optimisers import its compiler when the first one is made.
    """
    for root in ("torch._dynamo", *code_roots(plain, method)):
        importlib.import_module(root.partition(":")[0])


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
    stop_request: StopRequest | None = None,
    accept_versions: bool = False,
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
        leave: says when to end early.
        accept_versions: go on from a state that other versions of torch or diffusers have computed.

    Returns:
        What happened: ``steps_run`` by this call and ``step`` reached.

    Raises:
        KairosError: another process trains here; the loss is not finite; data or device are missing, or its memory is
            too small.
        StoppedEarly: asked to end early; what has been computed is saved.
    """
    label = f"train {method} seed {seed}"
    with _job(plain["training"], out / ".state", milestones[-1], wait) as (device, progress):
        first = distributed.rank() == 0
        if first:
            together = f", {distributed.ranks()} processes" if distributed.ranks() > 1 else ""
            say(f"{label}: on {compute.describe(device)}{together}")
        latents = open_latents(latents_folder)
        parts = compute_identity(plain, method, seed, latents.manifest, device.type)
        identity = parts.pop("identity")
        progress.identify(identity)
        store = RunFolder(out, identity)
        if restart and first:
            store.clear()
        missing = ranks.on_first(lambda: store.start(milestones, part))
        steps_run = 0
        if missing:
            training = TrainingState(plain, method, seed, latents, device)
            run = TrainingJob(store, training, label, progress, stop_request or StopRequest(), accept_versions)
            steps_run = run.train_until(milestones, missing)
        elif first:
            say(f"{out}: all milestones are there, 0 steps to do")
        if first:
            record: dict[str, Any] | None = None
            if not part:
                content = store.newest(milestones[-1])
                assert content is not None
                record = {
                    "identity": identity,
                    "parts": parts,
                    "method": method,
                    "seed": seed,
                    "steps": content["step"],
                    "milestones": milestones,
                    "components": {**component_hashes(content), "metrics": content["metrics"]["sha256"]},
                    "provenance": provenance(plain, device, content["versions"], content["resumed_under"]),
                }
            store.publish(milestones, record)
    return {"steps_run": steps_run, "step": milestones[-1], "identity": identity}


@contextmanager
def _job(settings: dict[str, Any], state: Path, last: int, wait: bool) -> Iterator[tuple[torch.device, ProgressFile]]:
    """The training's lock, its device, the other processes if there are several, and a last word on how it ended."""
    several = settings["processes"] > 1
    first = not several or os.environ.get("RANK", "0") == "0"
    with lock_run_folder(state, wait) if first else nullcontext():
        progress = ProgressFile(state, last, often=first)
        try:
            local_rank = launch.local_rank() if several else None
            device = compute.setup(
                settings["threads"], settings["device"], settings["deterministic"], local_rank, settings["precision"]
            )
            if several:
                ranks.join(settings["processes"], device)
            yield device, progress
            ranks.leave()
        except StoppedEarly as left:
            if first:
                progress.end("stopped", left.reason)
            raise
        except BaseException as error:
            if launch.is_first_failure(error):
                progress.end("failed", str(error) or type(error).__name__, again=not isinstance(error, DivergedError))
            raise
        if first:
            progress.end("complete")


@dataclass
class TrainingJob:
    """The steps of one job: metrics and timing lines, checkpoints, milestones. Of several processes rank 0 writes."""

    store: RunFolder
    training: TrainingState
    label: str
    progress: ProgressFile
    leave: StopRequest
    accept_versions: bool = False
    steps_run: int = 0
    seconds: float = 0.0
    saving: float = 0.0  # seconds that the longest checkpoint has taken, milestone included

    def __post_init__(self) -> None:
        self.first = distributed.rank() == 0
        start = self.training.strategy.table(self.training.density_images())  # before anything is loaded: the start's
        self.start_density = start["p"]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def train_until(self, milestones: list[int], missing: list[int]) -> int:
        """Go on from the newest usable state until the last milestone; returns the number of steps computed.

        Raises:
            StoppedEarly: asked to end before it; the last step computed is saved.
        """
        training, last, every = self.training, milestones[-1], self.training.settings["checkpoint_every"]
        self._resume(missing[0])
        if training.step == 0 and 0 in milestones:
            self._milestone()
        ranks.meet()
        self.leave.begin()
        ranks.meet()  # who is asked to leave before leaves alone, after it all leave together
        together = CollectiveStop(self.leave)
        bar = Progress(last, self.label, "step", start=training.step) if self.first else None
        facts, begun = "", time.perf_counter()
        with open(self.store.metrics if self.first else os.devnull, "a", encoding="utf-8") as metrics:
            self.progress.at(training.step, self.seconds)
            for line in explain_out_of_memory(training, train_steps(training, last)):
                self.seconds += time.perf_counter() - begun
                self.steps_run += 1
                if line is not None:
                    metrics.write(json.dumps(line) + "\n")
                    facts = f"loss {line['loss']:.4g}"
                leaving = training.step < last and together.after_step(self.saving)
                if training.step in milestones or training.step % every == 0 or training.step == last or leaving:
                    metrics.flush()
                    self._save(training.step in milestones)
                self.progress.at(training.step, self.seconds)
                if leaving:
                    ranks.leave()  # rank 0 has written by then
                    reason = self.leave.reason or "another process of the training was asked to leave"
                    raise StoppedEarly(f"{reason}: stopped after step {training.step} of {last}, which is saved")
                if bar is not None:
                    bar.advance(facts=facts)
                begun = time.perf_counter()
        if training.step == 0:
            self._save(False)
        if bar is not None:
            bar.close(facts)
            say(f"{self.label}: {self.steps_run} steps computed, {duration(self.seconds)} of training in all")
        return self.steps_run

    def _resume(self, at_most: int) -> None:
        """Load the newest usable state up to step `at_most`, on every rank the one that rank 0 has found."""
        training, store = self.training, self.store
        state = store.resume(at_most, training.device, self.accept_versions) if self.first else None
        step = ranks.on_first(lambda: state["step"] if state else 0)
        if step or state:
            state = state or store.at(step, training.device)
            training.load_state_dict(state, step)
            if self.first:
                say(f"{self.label}: goes on from step {training.step}")
        self.seconds = max((line["seconds"] for line in read_timing(store.timing)), default=0.0)

    def _save(self, milestone: bool) -> None:
        """Keep the state; what is not finite is refused before it takes the place of a good one."""
        begun, step = time.monotonic(), self.training.step
        if not self.training.all_finite:
            raise divergence_error(step - 1)
        if milestone:
            self._milestone()
        if self.first:
            with open(self.store.metrics, "ab") as written:
                os.fsync(written.fileno())
            times = {"seconds": round(self.seconds, 3), "steps_run": self.steps_run, "started": self.started}
            with open(self.store.timing, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **times}) + "\n")
            self.store.save(step, self.training.state_dict())
        ranks.meet()
        self.saving = max(self.saving, time.monotonic() - begun)

    def _milestone(self) -> None:
        """Write a milestone; what samplers tell of a batch is asked on all ranks."""
        training, sampler = self.training, self.training.strategy.sampler
        statistics, manifest = sampler.statistics(), training.latents.manifest
        if not self.first:
            return
        columns = training.strategy.table(training.density_images())
        facts = {
            "identity": self.store.identity,
            "method": training.method,
            "seed": training.seed,
            "config": training.plain,
            "autoencoder_sha256": manifest["autoencoder_sha256"],
            "dataset_sha256": manifest["dataset_sha256"],
            "shape": list(training.latents.shape),
            "sigma_data": training.sigma_data,
            "conditions": {name: manifest["conditions"][name] for name in training.conditions},
            "provenance": provenance(training.plain, training.device, versions(), self.store.resumed_under),
            "step": training.step,
            "images_seen": training.step * training.settings["batch_size"],
            "learned": isinstance(sampler, Learned),
            "strategy": {
                **{name: statistics.get(name) for name in ("updates", "a", "b")},
                "tv_from_start": float(abs(columns["p"] - self.start_density).sum() / 2),
            },
        }
        scheduler = scheduler_config(training.process, clip=manifest["kind"] == "pixels")
        folder = self.store.milestone(training.step)
        write_milestone(folder, training.model, training.average.weights, facts, columns=columns, scheduler=scheduler)
