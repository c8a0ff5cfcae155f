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
    """Return the experiment of a small form: components of the system's file, a small model, small real images."""
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
    given = {"uniform": next(iter(values["methods"].values())), **values["methods"]}  # EDM's is called by its name
    values["methods"] = {name: given[name] for name in methods}
    return values


def _data(kind: str, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the sections dataset, autoencoder and text_encoder of a small form."""
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
    at_hand = (DATA / "cifar10").is_dir()
    side = 64 if kind == KL and at_hand else 16
    dataset = {**(cifar if at_hand else {"heldout": 0.2}), "resolution": side}
    if kind == PIXELS:
        return {"dataset": dataset, "autoencoder": {"kind": "none"}}
    if kind == VQ:
        dataset |= {"resolution": 32}
        return {
            "dataset": dataset,
            "autoencoder": {"kind": "pretrained", "path": str(tiny_vq(folder / "vq")), "scaling": 1.0},
        }
    small_autoencoder = {"kind": "train", "channels": [16, 32], "steps": 200}
    return {"dataset": dataset, "autoencoder": taesd if at_hand else small_autoencoder}


def tiny_vq(folder: Path) -> Path:
    """Return an untrained VQ autoencoder of 2 levels, 32 channels and 256 codes."""
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
    """Train and sample a system's small form; return one row per method."""
    import torch

    from kairos import models
    from kairos.cli import main as kairos
    from kairos.config import validate
    from kairos.data.latents import open_latents
    from kairos.evaluation.settings import LossSettings
    from kairos.evaluation.validation import validation_loss
    from kairos.forward_process import build_process, output_channels
    from kairos.milestones import open_milestone

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

        at = {stage: results / stage for stage in ("dataset", "text", "autoencoder", "latents")}
        given = ["--config", config]
        call("prepare", *given, "--out", at["dataset"])
        text_options = []
        if "text" in (plain["model"]["conditions"] or []):
            call("text", *given, "--dataset", at["dataset"], "--out", at["text"])
            text_options = ["--text", at["text"]]
        call("autoencoder", *given, "--dataset", at["dataset"], "--out", at["autoencoder"])
        read = ["--dataset", at["dataset"], "--autoencoder", at["autoencoder"], *text_options]
        call("encode", *given, *read, "--out", at["latents"])
        rows = []
        for method in plain["methods"]:
            training, begun = results / method / "seed0", time.monotonic()
            call("train", *given, "--method", method, "--seed", 0, "--latents", at["latents"], "--out", training)
            seconds = time.monotonic() - begun
            last, grid = training / "milestones" / f"{steps:07d}", out / "systems" / f"{name}_{method}.png"
            grid.parent.mkdir(parents=True, exist_ok=True)
            images = ["--out", folder / "images.npz", "--grid", grid, "--num", BATCH]
            call("sample", "--milestone", last, *images, "--weights", "raw")
            latents, settings = open_latents(at["latents"]), LossSettings(64, 16, 0)
            losses = []
            for step in (0, steps):
                milestone = open_milestone(training / "milestones" / f"{step:07d}", "raw")
                losses.append(validation_loss(milestone, latents, settings)["loss"])
            parameters = sum(value.numel() for value in milestone.model.parameters())
            rows.append({
                "system": name, "method": method, "small_parameters": parameters, "steps": steps,
                "loss_before": f"{losses[0]:.4f}", "loss_after": f"{losses[1]:.4f}", "seconds": f"{seconds:.1f}",
            })  # fmt: skip
    process = build_process(experiment.diffusion.process, experiment.diffusion.prediction, 0.5)
    with torch.device("meta"):
        whole = validate({**published(name)}, name).model
        model = models.build(whole, system.shape, system.conditions, output_channels(process, system.shape[0]))
    counted = sum(value.numel() for value in model.parameters())
    return [{**row, "published": system.parameters, "parameters": counted} for row in rows]


def main() -> int:
    """Run the systems in parallel, one process each, or one system in this process; write results/systems.csv."""
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
