"""Export of results: TensorBoard event files, offline Weights & Biases runs, and folders for the Hugging Face hub."""

import os
import shutil
from collections.abc import Callable
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from kairos.files import atomic_folder, glance, write_text
from kairos.models.settings import omit_overridden_size
from kairos.report import findings, formatting
from kairos.report.collect import Results
from kairos.report.sample_figures import load_sample_grid
from kairos.snapshots import check_snapshot, step_name
from kairos.tracking import run_content
from kairos_timesteps.errors import KairosError, demand


def write_tensorboard(results: Results, out: Path) -> None:
    """Write event files of TensorBoard: curves at their recorded times, sample grids by step, and warnings.

    The files of a training run are in the folder ``<out>/<method>/seed<seed>``. Grids have the tag ``samples``. The
    warnings of the experiment are a text with the tag ``warnings``.

    Raises:
        KairosError: TensorBoard is not installed, or metrics.jsonl of a run is damaged.
    """
    tensorboard = _import_package("tensorboard", "torch.utils.tensorboard")
    warnings = findings.list_warnings(results)
    for run in results.runs:
        with tensorboard.SummaryWriter(str(out / run.method / f"seed{run.seed}")) as writer:
            for point in run_content.collect_points(run):
                seconds = point.timestamp / 1000  # since 1970
                writer.add_scalar(point.key, point.value, point.step, seconds)
            for snapshot in run.snapshots:
                image = load_sample_grid(snapshot.grid_file)
                writer.add_image("samples", image, snapshot.step, dataformats="HWC")
            if warnings:
                writer.add_text("warnings", "\n\n".join(warnings))


def write_wandb(results: Results, out: Path) -> None:
    """Write offline runs of Weights & Biases into folder `out`, one per training run; ``wandb sync`` sends them.

    The project has the name of the experiment, and a group the name of a method. Curves and sample grids are logged by
    step, without recorded times. A grid is left out if no curve has a point at its step. The warnings of the experiment
    are the notes of each run.

    Raises:
        KairosError: wandb is not installed, or metrics.jsonl of a run is damaged.
    """
    wandb = _import_package("wandb", "wandb")
    warnings = findings.list_warnings(results)
    for run in results.runs:
        grid_files = {snapshot.step: snapshot.grid_file for snapshot in run.snapshots}
        with wandb.init(
            project=results.experiment.experiment,
            group=run.method,
            name=f"{run.method} seed {run.seed}",
            dir=str(out),
            mode="offline",
            config=run_content.flatten_parameters(results.experiment, run.method, run.seed),
            notes="\n\n".join(warnings),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
            reinit="finish_previous",  # this process writes several runs, one after another
        ) as wandb_run:
            # Weights & Biases accepts steps in ascending order only
            points = sorted(run_content.collect_points(run), key=attrgetter("step"))
            for step, points_of_step in groupby(points, attrgetter("step")):
                values: dict[str, Any] = {point.key: point.value for point in points_of_step}
                if step in grid_files:
                    values["samples"] = wandb.Image(load_sample_grid(grid_files[step]))
                wandb_run.log(values, step=step)


def write_hub_folder(snapshot: Path, out: Path) -> None:
    """Copy a snapshot with its decoder and its sample grid into folder `out`, and write a model card there.

    The decoder is in folder autoencoder, the grid is samples.png, and the card is README.md. Decoder, sample grid,
    evaluation and facts of the data set are left out if they are missing or do not belong to the snapshot. In pixel
    space the folder of the decoder contains no network.

    Args:
        snapshot: folder of the snapshot, within a folder of results.
        out: the new folder.

    Raises:
        KairosError: there is no snapshot.
        DamagedError: the snapshot does not match its record.
    """
    record = check_snapshot(snapshot)
    name = step_name(record["step"])
    run_folder = snapshot.resolve().parents[1]  # <results>/methods/<method>/seed<seed>/snapshots/<step>
    results = run_folder.parents[2]

    # records of the inputs; records of another training run or data set are treated as missing
    evaluation = glance(run_folder / "evaluation" / f"{name}.json")
    if evaluation.get("protocol", {}).get("identity") != record["identity"]:
        evaluation = {}
    dataset = glance(results / "dataset" / "record.json")
    if dataset.get("content_sha256") != record["dataset_sha256"]:
        dataset = {}
    autoencoder_folder = results / "autoencoder"
    autoencoder = glance(autoencoder_folder / "record.json")
    # a record of imported weights may have the hash None, which must not equal the hash of a missing record, ""
    has_autoencoder = autoencoder.get("sha256", "") == record["autoencoder_sha256"]

    # files
    shutil.copytree(snapshot, out, dirs_exist_ok=True)
    if has_autoencoder:
        shutil.copytree(autoencoder_folder, out / "autoencoder")
    grid_file = run_folder / "samples" / f"{name}.png"
    has_grid = grid_file.exists() and bool(evaluation)  # without an evaluation the grid may be of another run
    if has_grid:
        shutil.copy(grid_file, out / "samples.png")

    # model card
    latent: dict[str, Any] = {}  # facts of the autoencoder; empty in pixel space
    if has_autoencoder and autoencoder["kind"] != "none":
        latent = autoencoder | glance(autoencoder_folder / "config.json")
    card_values = {
        "imported": record.get("imported"),
        "grid": has_grid,
        "evaluation": evaluation,
        "data": dataset,
        "model": omit_overridden_size(record["config"]["model"]),
        "network": glance(snapshot / "ema" / "config.json"),
        "scheduler": glance(snapshot / "scheduler" / "scheduler_config.json"),
        "latent": latent,
    }
    filters = {
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip(),
        "number": formatting.format_number,
    }
    card = formatting.load_template(Path(__file__).with_name("card.md.jinja"), **filters)
    write_text(out / "README.md", card.render(record | card_values))


# writers by the name of their form; a writer takes results, or the folder of a snapshot for "hub", and a folder
FORMS: dict[str, Callable[..., None]] = {
    "tensorboard": write_tensorboard,
    "wandb": write_wandb,
    "hub": write_hub_folder,
}


def export(write: Callable[..., None], content: Results | Path, out: Path) -> None:
    """Create the folder `out` atomically with a writer of `FORMS`; after an error there is no folder.

    Args:
        write: one of `FORMS`.
        content: argument of the writer: results, or the folder of a snapshot.
        out: the new folder.

    Raises:
        ConfigError: `out` exists already.
        KairosError: see the writers.
    """
    demand(not out.exists(), "--out", f"{out}, which exists", "a new folder")
    with atomic_folder(out) as temporary:
        write(content, temporary)


def _import_package(name: str, module: str) -> ModuleType:
    """Import a module of an optional package; sets WANDB_ERROR_REPORTING to false unless the user has set it.

    `name` is the name of the package, and of the extra of kairos that installs it.

    Raises:
        KairosError: the package is not installed.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb would send its errors; it reads this at import
    try:
        return import_module(module)
    except ImportError as error:
        raise KairosError(f"{name} cannot be imported ({error}); `make setup` installs it") from None
