"""Train every system of both papers in a small form: the same components, few parameters, 200 steps on real images.

    python benchmarks/systems.py [NAME ...]

The small forms have less than a million parameters. Each runs through the commands prepare, text, autoencoder, encode,
train and sample, with the methods uniform, speed and adaptive. A row contains the number of parameters of the published
system (counted) and of the small form, the validation loss before and after, and the seconds of training. The
validation loss is the squared error of epsilon on held-out images with the raw weights. Images are written next to the
table. CIFAR-10 and COCO are read from the folder $DATA, see benchmarks/README.md. Without CIFAR-10, the digits replace
it; systems that need COCO are skipped.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from papers import COCO, KL, PIXELS, SYSTEMS, VQ, published
from result_file import write_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # clip_case: a tiny text encoder with the real tokenizer's rules
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
STEPS, BATCH = 200, 16
METHODS = ("uniform", "speed", "adaptive")


def small(name: str, steps: int, folder: Path, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Return the experiment of a small form: components of the system's file, a small model, small real images.

    Args:
        name: name of the system.
        steps: steps of training.
        folder: folder for autoencoders and text encoders that are created here.
        methods: names of the methods.
    """
    system, values = SYSTEMS[name], published(name)
    values |= {"experiment": name, **_data(system.data, values, folder)}
    values["model"] = {**values["model"], **system.small}
    kept = {key: values["training"][key] for key in ("augment", "condition_dropout") if key in values["training"]}
    optimizer = {**values["training"]["optimizer"], "lr": 2e-3, "warmup_steps": 20}
    values["training"] = {
        **kept, "batch_size": BATCH, "milestones": [steps], "checkpoint_every": steps, "log_every": 10,
        "optimizer": optimizer, "ema": {"decay": 0.98}, "device": "cpu",
    }  # fmt: skip
    values["sampling"] |= {"steps": 10, "batch_size": BATCH, "grid": BATCH}
    values["evaluation"] = {"num_samples": BATCH, "sets": 1, "extractor": "selfsupervised"}
    values["tracking"] = {"enabled": False}
    for method in values["methods"].values():  # FDM's ramp ends as early in a short training as in a long one
        if isinstance(method.get("weighting"), dict) and "warmup" in method["weighting"]:
            method["weighting"] |= {"warmup": steps // 10}
    # the first method is the baseline, which EDM's file does not call uniform
    method_by_name = {"uniform": next(iter(values["methods"].values())), **values["methods"]}
    values["methods"] = {name: method_by_name[name] for name in methods}
    return values


def _data(kind: str, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the sections dataset and autoencoder of a small form; also text_encoder if the system has captions.

    Args:
        kind: kind of data that the small form is trained on, such as `PIXELS`.
        values: configuration of the system.
        folder: folder for autoencoders and text encoders that are created here.
    """
    taesd = {"kind": "pretrained", "path": str(DATA / "taesd"), "scaling": values.get("autoencoder", {}).get("scaling")}
    if kind == COCO:
        coco = {"source": "folder", "resolution": 64, "crop": "adm", "flips": True, "path": str(DATA / "coco_mini")}
        kept = {key: values["dataset"][key] for key in ("low_resolution",) if key in values["dataset"]}
        coco["path"], coco["heldout"] = (f"{DATA}/coco_mini/{split}2017" for split in ("train", "val"))
        if "captions" not in values["dataset"]:
            return {"dataset": coco | kept, "autoencoder": taesd}
        for name, split in (("captions", "train"), ("heldout_captions", "val")):
            coco[name] = f"{DATA}/coco_mini/annotations/captions_{split}2017.json"
        from clip_case import write_text_encoder

        return {
            "dataset": coco,
            "autoencoder": taesd,
            "text_encoder": {"path": str(write_text_encoder(folder / "clip"))},
        }
    cifar = {"source": "parquet", "path": f"{DATA}/cifar10/train-*.parquet", "limit": 600, "heldout": 0.2}
    has_cifar = (DATA / "cifar10").is_dir()
    side = 64 if kind == KL and has_cifar else 16
    dataset = {**(cifar if has_cifar else {"heldout": 0.2}), "resolution": side}  # else the digits
    if kind == PIXELS:
        return {"dataset": dataset, "autoencoder": {"kind": "none"}}
    if kind == VQ:
        dataset |= {"resolution": 32}
        return {
            "dataset": dataset,
            "autoencoder": {"kind": "pretrained", "path": str(tiny_vq(folder / "vq")), "scaling": 1.0},
        }
    small_autoencoder = {"kind": "train", "channels": [16, 32], "steps": 200}
    return {"dataset": dataset, "autoencoder": taesd if has_cifar else small_autoencoder}


def tiny_vq(folder: Path) -> Path:
    """Write an untrained VQ autoencoder of 2 levels, 32 channels and 256 codes into a folder, and return the folder."""
    import torch
    from diffusers import VQModel

    torch.manual_seed(0)
    down, up = ["DownEncoderBlock2D"] * 2, ["UpDecoderBlock2D"] * 2
    VQModel(
        down_block_types=down, up_block_types=up, block_out_channels=[32, 32], layers_per_block=1, latent_channels=3,
        num_vq_embeddings=256, vq_embed_dim=3, norm_num_groups=8, scaling_factor=1.0,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def run(name: str, steps: int, out: Path, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Train and sample a system's small form; return one row per method, none if the system needs missing data.

    Args:
        name: name of the system.
        steps: steps of training.
        out: folder of results; a grid of images per method is written into its folder systems.
        methods: names of the methods.

    Raises:
        SystemExit: a command fails.
    """
    import torch

    from kairos import models
    from kairos.cli import main as kairos
    from kairos.config import validate
    from kairos.data.latents import open_latents
    from kairos.evaluation.settings import LossSettings
    from kairos.evaluation.validation import epsilon_loss
    from kairos.forward_process import build_process, output_channels
    from kairos.snapshots import open_snapshot

    system = SYSTEMS[name]
    if system.data == COCO and not (DATA / "coco_mini").is_dir():
        print(f"{name}: skipped, {DATA / 'coco_mini'} is not here", flush=True)
        return []
    with tempfile.TemporaryDirectory(prefix="kairos-systems-") as temporary:
        folder = Path(temporary)
        experiment = validate(small(name, steps, folder, methods), name)
        plain = experiment.plain()
        config, results = folder / "config.yaml", folder / "results"
        config.write_text(yaml.safe_dump(plain))

        def call(*arguments: Any) -> None:
            if kairos([str(argument) for argument in arguments]):
                raise SystemExit(f"{name}: kairos {arguments[0]} failed")

        folders = {stage: results / stage for stage in ("dataset", "text", "autoencoder", "latents")}
        config_options = ["--config", config]
        call("prepare", *config_options, "--out", folders["dataset"])
        text_options = []
        if "text" in (plain["model"]["conditions"] or []):
            call("text", *config_options, "--dataset", folders["dataset"], "--out", folders["text"])
            text_options = ["--text", folders["text"]]
        call("autoencoder", *config_options, "--dataset", folders["dataset"], "--out", folders["autoencoder"])
        inputs = ["--dataset", folders["dataset"], "--autoencoder", folders["autoencoder"], *text_options]
        call("encode", *config_options, *inputs, "--out", folders["latents"])
        rows = []
        for method in plain["methods"]:
            training = results / "methods" / method / "seed0"
            train_options = ["--method", method, "--seed", 0, "--latents", folders["latents"], "--out", training]
            begun = time.monotonic()
            call("train", *config_options, *train_options)
            seconds = time.monotonic() - begun

            # images and validation losses
            last = training / "snapshots" / f"{steps:07d}"
            grid = out / "systems" / f"{name}_{method}.png"
            grid.parent.mkdir(parents=True, exist_ok=True)
            images = ["--out", folder / "images.npz", "--grid", grid, "--num", BATCH]
            call("sample", "--snapshot", last, *images, "--weights", "raw")
            latents, settings = open_latents(folders["latents"]), LossSettings(64, 16, 0)
            losses = []  # before and after training
            for step in (0, steps):
                snapshot = open_snapshot(training / "snapshots" / f"{step:07d}", "raw")
                losses.append(epsilon_loss(snapshot, latents, settings)["loss_epsilon"])
            parameters = sum(value.numel() for value in snapshot.model.parameters())
            rows.append({
                "system": name, "method": method, "small_parameters": parameters, "steps": steps,
                "loss_before": f"{losses[0]:.4f}", "loss_after": f"{losses[1]:.4f}", "seconds": f"{seconds:.1f}",
            })  # fmt: skip
    # parameters of the published system
    process = build_process(experiment.diffusion.process, experiment.diffusion.prediction, 0.5)
    with torch.device("meta"):
        options = validate({**published(name)}, name).model
        model = models.build(options, system.shape, system.conditions, output_channels(process, system.shape[0]))
    parameter_count = sum(value.numel() for value in model.parameters())
    return [{**row, "published": system.parameters, "parameters": parameter_count} for row in rows]


def main() -> int:
    """Run the systems in parallel, one process each, or one system in this process; write systems.csv.

    Returns 1 if the validation loss of a training run does not fall, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SYSTEMS)}; default: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    a = parser.parse_args()
    if unknown := set(a.names) - set(SYSTEMS):
        parser.error(f"unknown system {', '.join(sorted(unknown))}")
    begun, rows, names = time.monotonic(), [], a.names or list(SYSTEMS)
    run_system = partial(run, steps=a.steps, out=a.out, methods=a.methods)
    with ProcessPoolExecutor(a.processes, get_context("spawn")) as pool:
        # one system needs no second process, which would import torch again
        apply = map if len(names) == 1 else pool.map
        for rows_of_system in apply(run_system, names):
            for row in rows_of_system:
                rows.append(row)
                print(
                    {key: row[key] for key in ("system", "method", "loss_before", "loss_after", "seconds")}, flush=True
                )
    if rows:
        write_rows(a.out / "systems.csv", rows)
    print(f"{len(rows)} trainings in {time.monotonic() - begun:.0f} s")
    worse = [row for row in rows if not float(row["loss_after"]) < float(row["loss_before"])]
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
