"""Stage `reference`: statistics of the real images, and the `rows` that say what a distance means."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import clock
from kairos.data.dataset import PreparedDataset, open_dataset
from kairos.errors import KairosError
from kairos.evaluation import external, metrics
from kairos.evaluation.extractors import Extractor, open_extractor
from kairos.evaluation.metrics import Statistics, Target
from kairos.evaluation.moments import LAYERS, in_batches, measure
from kairos.evaluation.registries import UNREAL, needs_of
from kairos.evaluation.rows import SPREADS, Gaussian, rows_of
from kairos.evaluation.settings import EvaluationConfig
from kairos.files import check_files, open_record, sha256_file, sha256_json, write_json
from kairos.progress import say
from kairos.sampling.samples_file import open_samples


@dataclass(frozen=True)
class Reference:
    """A reference opened for evaluations.

    Args:
        record: reference.json, or the same fields for images from outside.
        target: what samples are compared with.
    """

    record: dict[str, Any]
    target: Target


def build(
    evaluation: EvaluationConfig,
    device: torch.device,
    dataset: Path,
    autoencoder: Path,
    latents: Path,
    extractor: Path,
    out: Path,
) -> dict[str, Any]:
    """Write the reference's folder and return its record.

    Raises:
        KairosError: too few images for the extractor's features, or a file from outside that does not fit.
    """
    from kairos.autoencoders.codec import load_codec
    from kairos.data.latents import open_latents

    images, opened = open_dataset(dataset), open_extractor(extractor, device, evaluation.precision)
    codec, encoded = load_codec(autoencoder, device), open_latents(latents)
    clock.work_begins()
    wanted = tuple(evaluation.metrics_for(opened.manifest["kind"], len(images.heldout) > 0))
    target = Target(opened.manifest["metric"], _real(evaluation.reference, images, opened, wanted), wanted)
    numbers = {"evaluation.num_samples": evaluation.num_samples}
    if target.statistics.count:  # published moments do not tell
        numbers["real images"] = target.statistics.count
    found = {what: metrics.check_number(number, opened.width, what) for what, number in numbers.items()}
    warnings = [f"{what}: {warning}" for what in found for warning in found[what]]
    gaussian = Gaussian.fit(encoded, evaluation.seed)
    rows = rows_of(evaluation, images, codec, gaussian, opened, target)

    target.statistics.save(out / "statistics.npz")
    record = {
        "extractor": opened.name,
        "extractor_hash": opened.hash,
        "metric": target.metric,
        "metrics": wanted,
        "features": opened.width,
        "accuracy": opened.manifest["accuracy"],
        "reference": evaluation.reference,
        "reference_hash": reference_hash(target.statistics, opened),
        "dataset_sha256": images.manifest["content_sha256"],
        "autoencoder_sha256": codec.manifest["sha256"],
        "real_images": target.statistics.count,
        "num_samples": evaluation.num_samples,
        "sets": evaluation.sets,
        "eval_seed": evaluation.seed,
        "precision": evaluation.precision,
        "validation": {"images": evaluation.loss_images, "strata": evaluation.strata, "seed": evaluation.seed},
        "rows": rows,
        "spread_of": {name: SPREADS[name] for name in rows},
        "gaussian": f"mean and sample covariance of {len(gaussian.rows)} training latents",
        "warnings": warnings,
        "files": {"statistics.npz": sha256_file(out / "statistics.npz")},
    }
    write_json(out / "reference.json", record)
    for name, row in rows.items():
        say(f"reference: {name} {target.metric} {row[target.metric]:.4g} ± {row[target.metric + '_spread'] or 0:.2g}")
    return record


def open_reference(path: Path, extractor: Extractor) -> Reference:
    """Open what stage `reference` wrote, given as folder or as reference.json.

    Raises:
        KairosError: it is missing, or was made with another extractor.
        DamagedError: the statistics have changed.
    """
    path = path / "reference.json" if path.is_dir() else path
    record = open_record(path.parent, "reference", path.name)
    check_files(path.parent, record["files"], "make it again with: kairos reference")
    if record["extractor_hash"] != extractor.hash:
        raise KairosError(
            f"{path}: made with extractor {record['extractor']} {record['extractor_hash'][:12]}, "
            f"got {extractor.name} {extractor.hash[:12]}; pass that one as --extractor DIR"
        )
    real = Statistics.load(path.parent / "statistics.npz")
    return Reference(record, Target(record["metric"], real, tuple(record["metrics"])))


def _real(which: str, dataset: PreparedDataset, extractor: Extractor, wanted: tuple[dict[str, Any], ...]) -> Statistics:
    """Statistics of the training images, of all, or of a file from outside; cached by content."""
    needs = needs_of(wanted) - UNREAL
    if which not in ("train", "all"):
        return outside_statistics(Path(which), extractor, needs)
    indices = dataset.train if which == "train" else np.arange(len(dataset.images))
    parts = {"dataset": dataset.manifest["content_sha256"], "split": which}
    return _of_images(dataset.images, indices, extractor, needs, parts)


def outside_statistics(path: Path, extractor: Extractor, needs: set[str]) -> Statistics:
    """Statistics of a file, cached by its content: published moments where it holds them, else those of its images.

    Raises:
        KairosError: see `external.check`; or too few images for the extractor.
    """
    published = {LAYERS[need]: pair for need, pair in external.check(path, extractor.width, needs, "reference").items()}
    with np.load(path, allow_pickle=False) as file:
        moments = {
            layer: (file[mean].astype(float), file[sigma].astype(float)) for layer, (mean, sigma) in published.items()
        }
    rest = {need for need in needs if LAYERS.get(need) not in moments}
    if not rest:
        return Statistics(moments)
    images = open_samples(path).images
    if "moments" in rest:
        metrics.check_number(len(images), extractor.width, str(path))
    found = _of_images(images, range(len(images)), extractor, rest, {"images": sha256_file(path)})
    return Statistics({**found.moments, **moments}, found.features, 0 if moments else found.count)


def _of_images(images: Any, indices: Any, extractor: Extractor, needs: set[str], parts: dict[str, Any]) -> Statistics:
    """Statistics of some images; `parts` decides which they are."""
    parts = {**parts, "extractor": extractor.hash, "precision": extractor.precision, "needs": sorted(needs)}
    batches, kept = in_batches(images, indices), metrics.kept(len(indices))
    return metrics.cached(parts, lambda: metrics.statistics_of(measure(extractor, batches, needs, kept)))


def reference_hash(statistics: Statistics, extractor: Extractor) -> str:
    """What identifies a reference: real statistics and extractor."""
    return sha256_json({"statistics": statistics.hash, "extractor": extractor.hash})
