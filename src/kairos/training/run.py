"""`kairos train`: start or resume a training run, save checkpoints and snapshots, publish the results.

The steps are in `kairos.training.loop`, the files in `kairos.training.run_folder`.
"""

import importlib
import json
import os
import signal
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
from kairos.files import read_entries, set_missing_filename
from kairos.finite import demand_finite
from kairos.forward_process import scheduler_config
from kairos.progress import ProgressBar, duration, log
from kairos.snapshots import write_snapshot
from kairos.stage_keys import list_modules
from kairos.stages import TRAIN
from kairos.training import launch
from kairos.training.checkpoint import component_hashes
from kairos.training.job import CollectiveStop, ProgressFile, StoppedEarly, StopRequest
from kairos.training.loop import DIVERGENCE_REMEDY, divergence_error, train_steps
from kairos.training.memory import explain_out_of_memory
from kairos.training.provenance import build_provenance, describe_clock, describe_environment
from kairos.training.run_folder import RunFolder, lock_run_folder
from kairos.training.settings import RunSettings, TrainingConfig
from kairos.training.state import TrainingState
from kairos.validity import describe_training, find_identity
from kairos_timesteps import distributed
from kairos_timesteps.base import Learned
from kairos_timesteps.errors import KairosError, NotFiniteError

# Seconds between an error that another rank may have caused and its record. torchrun compares whole seconds.
_CONNECTION_LOST_DELAY = 2.0


def import_components(run: RunSettings) -> None:
    """Import the modules whose code a training run uses, so that the caller's timing counts imports as start-up."""
    for module in list_modules(TRAIN, run.sections):
        importlib.import_module(module)


def train(
    run: RunSettings,
    out: Path,
    latents_folder: Path,
    milestones: list[int],
    restart: bool = False,
    snapshots_only: bool = False,
    wait: bool = False,
    stop_request: StopRequest | None = None,
    accept_versions: bool = False,
) -> dict[str, Any]:
    """Train until every one of `milestones` is reached, and publish their snapshots in `out`.

    Unless `snapshots_only` is set, training.json, the last checkpoint, metrics and times are published too. The run
    resumes from the state of an earlier call with equal identity. If that call has reached all milestones and its last
    checkpoint exists where it is needed, no step is computed, and the state is published again. Threads and
    determinism are set for the whole process. Every rank calls this function. Rank 0 alone writes files, except that a
    failed rank records its failure.

    Args:
        run: settings of the training run.
        out: folder of the training run.
        latents_folder: output of `kairos encode`.
        milestones: steps whose weights are kept, increasing; training ends at the last one.
        restart: delete the saved state of this identity and start from step 0.
        snapshots_only: publish the snapshots, but neither training.json nor checkpoint; a later call completes the run.
        wait: wait for another process that trains in `out`, such as a killed controller's job, instead of failing.
        stop_request: source of requests to stop early, whose context the caller has entered; None: there are none.
        accept_versions: resume from a state that other versions of torch or diffusers computed.

    Returns:
        ``steps_run``: number of steps that this call computed; ``step``: the last milestone; ``identity``: hash of
        everything that decides the trajectory.

    Raises:
        KairosError: another process trains in `out`; data or device are missing; device memory is too small. Or the
            saved state has other library versions.
        NotFiniteError: a loss, a gradient, the weights or the latents are not finite.
        StoppedEarly: a stop was requested; the completed steps are saved.
    """
    label = f"train {run.method_name} seed {run.seed}"
    process_context = _set_up_process(run.training, out / ".state", last_milestone=milestones[-1], wait=wait)
    with process_context as (device, progress):
        is_first = distributed.rank() == 0
        if is_first:
            processes = f", {distributed.ranks()} processes" if distributed.ranks() > 1 else ""
            log(f"{label}: on {compute.describe(device)}{processes}")

        # identity of the run, and its folder
        latents = open_latents(latents_folder)
        computed_from = describe_training(run, latents.record, device.type)
        identity = find_identity(out, computed_from)
        progress.set_identity(identity)

        run_folder = RunFolder(out, identity)
        if restart and is_first:
            run_folder.clear()

        # steps; rank 0 reads the files, and all ranks get its result: empty if no step is left to compute
        missing_milestones = ranks.call_on_rank_0(lambda: run_folder.prepare(milestones, snapshots_only))
        steps_run = 0
        if missing_milestones:
            job = TrainingJob(
                run_folder=run_folder,
                training=TrainingState(run, latents, device),
                computed_from=computed_from,
                label=label,
                progress=progress,
                stop_request=stop_request or StopRequest(),
                accept_versions=accept_versions,
            )
            steps_run = job.train_until(milestones, missing_milestones)
        elif is_first:
            log(f"{out}: all milestones are complete, 0 steps to do")

        # outputs
        if is_first and snapshots_only:
            run_folder.publish(milestones, None, computed_from)
        elif is_first:
            checkpoint = run_folder.newest_checkpoint(latest_step=milestones[-1])
            assert checkpoint is not None  # written by the job above, or found by `prepare`
            record = _build_record(run, identity, milestones, checkpoint)
            run_folder.publish(milestones, record, computed_from)
    return {"steps_run": steps_run, "step": milestones[-1], "identity": identity}


def _build_record(run: RunSettings, identity: str, milestones: list[int], checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the content of training.json.

    ``components`` contains the hash of each component of the checkpoint, and the hash of metrics.jsonl up to it.

    Args:
        run: settings of the training run.
        identity: see `find_identity`.
        milestones: steps whose snapshots were requested.
        checkpoint: content of the last checkpoint; its environment is recorded, also if this job computes no step.
    """
    return {
        "identity": identity,
        "method": run.method_name,
        "seed": run.seed,
        "steps": checkpoint["step"],
        "milestones": milestones,
        "components": {**component_hashes(checkpoint), "metrics": checkpoint["metrics"]["sha256"]},
        "provenance": build_provenance(run.model, run.training, checkpoint["environment"], checkpoint["resumed_under"]),
    }


@contextmanager
def _set_up_process(
    settings: TrainingConfig, state_folder: Path, last_milestone: int, wait: bool
) -> Iterator[tuple[torch.device, ProgressFile]]:
    """Set up the device, join the other ranks, and record in the progress file how the block ended.

    Rank 0 alone holds the run's lock during the block, and nothing is recorded if it cannot take the lock. The recorded
    state is ``complete``, ``stopped`` after StoppedEarly, or ``failed`` after any other error; errors are raised again.
    Rank 0 records ``complete`` and ``stopped``, and a rank that fails records ``failed`` if it is the first. After a
    NotFiniteError ``again`` is False, since another attempt would fail too. Ranks leave the process group only without
    an error.

    Args:
        settings: section `training` of the experiment.
        state_folder: ``.state`` of the run's folder.
        last_milestone: step at which this job ends.
        wait: wait for the lock instead of failing.

    Yields:
        The computing device and the progress file.
    """
    has_ranks = settings.processes > 1
    is_first = not has_ranks or os.environ.get("RANK", "0") == "0"  # torchrun sets RANK; the ranks join further below
    # outside of `try`: the progress file belongs to the job that holds the lock
    with lock_run_folder(state_folder, wait) if is_first else nullcontext():
        progress = ProgressFile(state_folder, last_milestone, reports=is_first)
        try:
            local_rank = launch.local_rank() if has_ranks else None
            device = compute.setup(
                settings.threads,
                settings.device,
                settings.deterministic,
                local_rank=local_rank,
                precision=settings.precision,
            )
            if has_ranks:
                ranks.join(settings.processes, device)
            yield device, progress
            ranks.leave()
        except StoppedEarly as stopped:
            if is_first:
                progress.write_end("stopped", stopped.reason)
            raise
        except BaseException as error:
            # gloo and NCCL raise a RuntimeError after another rank has ended; torchrun then ends this rank too
            if has_ranks and isinstance(error, RuntimeError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(_CONNECTION_LOST_DELAY)
                if progress.has_failed():  # on another machine
                    raise KairosError("another process of the training run has failed before") from None
            retry_may_help = not isinstance(error, NotFiniteError)
            message = str(error) or type(error).__name__  # a KeyboardInterrupt, for example, has no text
            progress.write_end("failed", message, again=retry_may_help)
            raise
        if is_first:
            progress.write_end("complete")


@dataclass
class TrainingJob:
    """The steps of one job with their metrics, times, checkpoints and snapshots. Only rank 0 writes files.

    Attributes:
        run_folder: files of the training run.
        training: model, optimizer and strategy.
        computed_from: see `describe_training`; the records of snapshots contain it.
        label: prefix of messages.
        progress: file that `kairos status` reads.
        stop_request: source of requests to stop early.
        accept_versions: resume from a state that other library versions computed.
        steps_run: steps that this job has computed.
        seconds: training time of the run, earlier jobs included.
        longest_save: seconds of the longest save so far, snapshot included.
        is_first: this process is rank 0.
        start_density: density of the untrained sampler, (T,).
        started: UTC time at which the job started, ISO 8601.
        environment: versions and device of this job, see `describe_environment`.
        machine: machine that the times are measured on, see `describe_clock`.
    """

    run_folder: RunFolder
    training: TrainingState
    computed_from: dict[str, Any]
    label: str
    progress: ProgressFile
    stop_request: StopRequest
    accept_versions: bool = False
    steps_run: int = 0
    seconds: float = 0.0
    longest_save: float = 0.0

    def __post_init__(self) -> None:
        """Set `is_first`, `start_density`, `started`, `environment` and `machine`."""
        self.is_first = distributed.rank() == 0
        # a checkpoint is loaded later, so this is the density of the untrained sampler
        self.start_density = self.training.strategy.table(self.training.density_images())["p"]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.environment = describe_environment(self.training.settings, self.training.device)
        self.machine = describe_clock(self.training.settings, self.training.device)

    def train_until(self, milestones: list[int], missing: list[int]) -> int:
        """Resume from the newest usable checkpoint and train to the last milestone; return how many steps it took.

        A snapshot of the step that it resumes from is written if requested. If the last milestone is step 0, a
        checkpoint is saved too.

        Args:
            milestones: steps whose snapshots are requested, increasing.
            missing: milestones to compute, see `RunFolder.prepare`; no later checkpoint than the first is loaded.

        Raises:
            StoppedEarly: a stop was requested before the last milestone; the last completed step is saved.
            NotFiniteError: a loss, a gradient, the weights or the latents are not finite.
            KairosError: other library versions computed the checkpoint, or device memory is too small.
        """
        training = self.training
        self._resume(latest_step=missing[0])
        # at step 0, `_resume` has deleted all snapshots; a later checkpoint may be of a step without a snapshot so far
        if training.step in missing or (training.step == 0 and 0 in milestones):
            self._write_snapshot()
        self._begin_steps()
        self._run_steps(milestones)
        if training.step == 0:  # the last milestone is step 0: the loop has saved nothing
            self._save(with_snapshot=False)
        if self.is_first:
            log(f"{self.label}: {self.steps_run} steps computed, {duration(self.seconds)} of training in all")
        return self.steps_run

    def _begin_steps(self) -> None:
        """Wait for all ranks, and begin to collect requests to stop, so that all ranks stop after an equal step.

        Until then, a request stops each rank where it arrives.

        Raises:
            StoppedEarly: a stop was requested already.
        """
        ranks.barrier()
        self.stop_request.begin()
        ranks.barrier()  # no rank computes a step before all ranks have switched

    def _run_steps(self, milestones: list[int]) -> None:
        """Compute the steps up to the last milestone; append metrics, report progress, save, and stop if requested.

        A checkpoint is saved every `training.checkpoint_every` steps, at every milestone together with its snapshot, at
        the last step, and before a stop. `steps_run` and `seconds` grow; `seconds` excludes the time of saving.
        `train_until` lists the errors.
        """
        training = self.training
        last_milestone = milestones[-1]
        checkpoint_interval = training.settings.checkpoint_every
        collective_stop = CollectiveStop(self.stop_request)
        progress_bar = ProgressBar(last_milestone, self.label, "step", start=training.step) if self.is_first else None
        latest_loss = ""
        metrics_path = self.run_folder.metrics if self.is_first else os.devnull
        with open(metrics_path, "a", encoding="utf-8") as metrics_file:
            self.progress.update(training.step, self.seconds)
            step_begun = time.perf_counter()
            for metrics in explain_out_of_memory(training, train_steps(training, last_milestone)):
                self.seconds += time.perf_counter() - step_begun
                self.steps_run += 1
                if metrics is not None:
                    with set_missing_filename(metrics_path):
                        metrics_file.write(json.dumps(metrics) + "\n")
                    latest_loss = f"loss {metrics['loss']:.4g}"

                is_last = training.step == last_milestone
                is_milestone = training.step in milestones
                is_checkpoint = training.step % checkpoint_interval == 0
                # the last step ends the run in any case, so no rank requests a stop there
                stops_now = not is_last and collective_stop.after_step(self.longest_save)
                if is_last or is_milestone or is_checkpoint or stops_now:
                    with set_missing_filename(metrics_path):
                        metrics_file.flush()  # a checkpoint contains the hash of the file
                    self._save(with_snapshot=is_milestone)
                self.progress.update(training.step, self.seconds)
                if stops_now:
                    self._stop(last_milestone)
                if progress_bar is not None:
                    progress_bar.advance(facts=latest_loss)
                step_begun = time.perf_counter()  # leaves out the time of saving
        if progress_bar is not None:
            progress_bar.close(latest_loss)

    def _resume(self, latest_step: int) -> None:
        """Load the newest usable checkpoint up to `latest_step` into `training`; all ranks load the one rank 0 selects.

        Rank 0 cuts the files in the run's folder back to the checkpoint, see `RunFolder.resume`. Without a checkpoint
        `training` is unchanged, at step 0. Attribute `seconds` becomes the largest time in timing.jsonl, or 0.

        Raises:
            KairosError: other library versions computed the checkpoint, and `accept_versions` is False.
            NotFiniteError: the weights in the checkpoint are not finite.
        """
        training, run_folder = self.training, self.run_folder
        # rank 0 selects and reads the checkpoint; the other ranks get its step and read it themselves
        checkpoint = None
        if self.is_first:
            checkpoint = run_folder.resume(latest_step, training.device, self.environment, self.accept_versions)
        checkpoint_step = ranks.call_on_rank_0(lambda: checkpoint["step"] if checkpoint else None)
        if checkpoint_step is not None:
            if checkpoint is None:  # on other ranks than 0
                checkpoint = run_folder.read_checkpoint(checkpoint_step, training.device)
            for name in ("model", "ema"):
                what = f"{run_folder.state}: checkpoint of step {checkpoint_step}: {name}"
                demand_finite(checkpoint[name], what, "start over with kairos train --restart")
            training.load_state_dict(checkpoint, checkpoint_step)
            if self.is_first:
                log(f"{self.label}: resumes from step {training.step}")
        self.seconds = max((entry["seconds"] for entry in read_entries(run_folder.timing)), default=0.0)

    def _save(self, with_snapshot: bool) -> None:
        """Save a checkpoint, and before it a snapshot if requested; rank 0 writes, and all ranks wait for it.

        A line with the times is appended to timing.jsonl, and `longest_save` is updated. Every rank must call this.

        Raises:
            NotFiniteError: a loss, a gradient or the weights are not finite; the earlier checkpoints are kept.
        """
        begun = time.monotonic()
        step = self.training.step
        if not self.training.is_finite():
            raise divergence_error(step - 1)  # steps count from 0 there
        # a finite gradient times a large learning rate overflows too
        demand_finite(self.training.model.state_dict(), f"step {step}: weights", DIVERGENCE_REMEDY)
        demand_finite(self.training.average.weights, f"step {step}: averaged weights", DIVERGENCE_REMEDY)
        if with_snapshot:
            self._write_snapshot()
        if self.is_first:
            with open(self.run_folder.metrics, "ab") as metrics_file:
                os.fsync(metrics_file.fileno())  # durable before the checkpoint that contains its hash
            times = {
                "step": step,
                "seconds": round(self.seconds, 3),
                "steps_run": self.steps_run,
                "started": self.started,
                "saved": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": self.machine,
            }
            self.run_folder.append_times(times)
            self.run_folder.save_checkpoint(step, self.training.state_dict(), self.environment)
        ranks.barrier()
        self.longest_save = max(self.longest_save, time.monotonic() - begun)

    def _stop(self, last_milestone: int) -> None:
        """Leave the process group after a save, and raise StoppedEarly, whose message reports `last_milestone`."""
        ranks.leave()  # waits for rank 0, which writes
        reason = self.stop_request.reason or "another process of the training run was asked to stop"
        raise StoppedEarly(f"{reason}: stopped after step {self.training.step} of {last_milestone}, which is saved")

    def _write_snapshot(self) -> None:
        """Write a snapshot of this step: weights, the strategy's density, and a record; every rank must call this.

        Rank 0 writes it into the run's private state. ``tv_from_start`` in the record is the total variation
        distance between the densities of the sampler and of the untrained sampler. ``updates``, ``a`` and ``b`` are
        None for samplers that lack them.
        """
        training = self.training
        sampler = training.strategy.sampler
        if not self.is_first:
            return
        statistics = sampler.statistics()
        record = training.latents.record
        columns = training.strategy.table(training.density_images())
        strategy_facts: dict[str, Any] = {name: statistics.get(name) for name in ("updates", "a", "b")}
        strategy_facts["tv_from_start"] = float(abs(columns["p"] - self.start_density).sum() / 2)
        facts = {
            "identity": self.run_folder.identity,
            "computed_from": self.computed_from,
            "method": training.run.method_name,
            "seed": training.seed,
            "config": training.run.plain_experiment(),
            "autoencoder_sha256": record["autoencoder_sha256"],
            "dataset_sha256": record["dataset_sha256"],
            "shape": list(training.latents.shape),
            "sigma_data": training.sigma_data,
            "conditions": {name: record["conditions"][name] for name in training.conditions},
            "provenance": build_provenance(
                training.run.model, training.settings, self.environment, self.run_folder.resumed_under
            ),
            "step": training.step,
            "images_seen": training.step * training.settings.batch_size,
            "learned": isinstance(sampler, Learned),
            "strategy": strategy_facts,
        }
        scheduler = scheduler_config(training.process, clip=record["kind"] == "pixels")
        folder = self.run_folder.snapshot_folder(training.step)
        write_snapshot(folder, training.model, training.average.weights, facts, columns=columns, scheduler=scheduler)
