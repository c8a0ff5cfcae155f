"""Results for others: TensorBoard's and Weights & Biases' files, and a milestone as the Hugging Face hub takes it."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from kairos.files import atomic_folder, glance, write_text
from kairos.milestones import check_milestone, step_name
from kairos.models.registries import omit_overridden_size
from kairos.report import formatting
from kairos.report.collect import Results, RunResults
from kairos.report.sample_figures import load_sample_grid
from kairos.tracking import content
from kairos_timesteps.errors import KairosError, demand


def tensorboard(results: Results, out: Path) -> None:
    """Write event files, one folder per training: all curves, and the grids of samples, at their recorded times.

    Raises:
        KairosError: TensorBoard is not installed.
    """
    tool = _tool("tensorboard", "torch.utils.tensorboard")
    for training, points, _ in _runs(results):
        with tool.SummaryWriter(str(out / training.method / f"seed{training.seed}")) as writer:
            for point in points:
                writer.add_scalar(point.key, point.value, point.step, point.timestamp / 1000)
            for one in training.snapshots:
                writer.add_image("samples", load_sample_grid(one.grid_file), one.step, dataformats="HWC")


def wandb(results: Results, out: Path) -> None:
    """Write offline runs of Weights & Biases, one per training, a group per method; ``wandb sync`` sends them.

    Raises:
        KairosError: wandb is not installed.
    """
    tool = _tool("wandb", "wandb")
    for training, points, params in _runs(results):
        name = f"{training.method} seed {training.seed}"
        where = {"project": results.experiment.experiment, "group": training.method, "name": name, "dir": str(out)}
        grids = {one.step: one.grid_file for one in training.snapshots}
        quiet = tool.Settings(silent=True, console="off", disable_git=True)
        with tool.init(**where, mode="offline", config=params, settings=quiet, reinit="finish_previous") as run:
            for step, found in groupby(sorted(points, key=attrgetter("step")), attrgetter("step")):
                images = {"samples": tool.Image(load_sample_grid(grids[step]))} if step in grids else {}
                run.log({point.key: point.value for point in found} | images, step=step)


def hub(milestone: Path, out: Path) -> None:
    """Copy a milestone, with what decodes its latents and the grid of samples, beside a card that says what it is.

    Raises:
        KairosError: there is no milestone; DamagedError where it is not what its record says.
    """
    record, training = check_milestone(milestone), milestone.resolve().parent.parent
    name, results = step_name(record["step"]), training.parent.parent
    evaluation = glance(training / "evaluation" / f"{name}.json")
    if evaluation.get("protocol", {}).get("identity") != record["identity"]:
        evaluation = {}  # of another training
    data, decoder = glance(results / "dataset" / "manifest.json"), results / "autoencoder"
    latent, grid = glance(decoder / "manifest.json"), training / "samples" / f"{name}.png"
    shutil.copytree(milestone, out, dirs_exist_ok=True)
    if decodes := latent.get("sha256", "") == record["autoencoder_sha256"]:
        shutil.copytree(decoder, out / "autoencoder")  # whole: kairos sample checks what its manifest lists
    if drawn := grid.exists() and bool(evaluation):
        shutil.copy(grid, out / "samples.png")
    facts = {
        "imported": record.get("imported"),
        "grid": drawn,
        "evaluation": evaluation,
        "data": data if data.get("content_sha256") == record["dataset_sha256"] else {},
        "model": omit_overridden_size(record["config"]["model"]),
        "network": glance(milestone / "ema" / "config.json"),
        "scheduler": glance(milestone / "scheduler" / "scheduler_config.json"),
        "latent": latent | glance(decoder / "config.json") if decodes and latent["kind"] != "none" else {},
    }
    filters = {
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip(),
        "number": formatting.format_number,
    }
    card = formatting.load_template(Path(__file__).with_name("card.md.jinja"), **filters)
    write_text(out / "README.md", card.render(record | facts))


def export(form: Callable[..., None], what: Any, out: Path) -> None:
    """Let one of them write to `out`, which is there when all is, and which nothing is there before.

    Raises:
        ConfigError: it is there already.
    """
    demand(not out.exists(), "--out", f"{out}, which exists", "a new folder")
    with atomic_folder(out) as temporary:
        form(what, temporary)


def _runs(results: Results) -> Iterator[tuple[RunResults, list[content.Point], dict[str, str]]]:
    for training in results.runs:
        params = content.parameters(results.experiment, training.method, training.seed)
        yield training, content.points(training), params


def _tool(name: str, module: str) -> ModuleType:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        return import_module(module)
    except ImportError as error:
        raise KairosError(f"{name} cannot be imported ({error}); install kairos[{name}]") from None
