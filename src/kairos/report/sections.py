"""The report's sections, in the order in which they are read."""

from collections.abc import Iterator
from pathlib import Path

from kairos.report import outcome, tables
from kairos.report.canvas import Look
from kairos.report.collect import Record, Results
from kairos.report.figures import FIGURES
from kairos.report.html import Section, Table, definitions, digest, escape, picture, table
from kairos.report.table import Row
from kairos.report.text import component, listed, number, plural

_HOW_TO_READ = (
    "Lower is better. The uncertainty of a distance is the larger of its spread over sets of samples and over seeds. "
    "Methods whose intervals overlap are not ranked: they share a range of ranks. With one set of samples and one seed "
    "the uncertainty is unknown and nothing is ranked. “Fewer steps” is how many times sooner a method reaches the "
    "baseline's final distance (interpolated linearly between milestones), “less time” the same in seconds of "
    "training; below each, the range when the curve is shifted by the uncertainty of both."
)


def head(results: Results, rows: list[Row], warnings: list[str]) -> str:
    """Title, what was compared, the outcome, and warnings."""
    verdict = "".join(f"<p>{escape(sentence)}</p>" for sentence in outcome.verdict(results, rows))
    notes = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    box = f'<div class="warnings"><b>Before you rely on these numbers</b><ul>{notes}</ul></div>' if notes else ""
    return (
        f"<h1>{escape(results.experiment.experiment)}: timestep strategies compared</h1>"
        f'<p class="lead">{escape(outcome.setting(results))}</p><div class="verdict">{verdict}</div>{box}'
    )


def all_sections(results: Results, rows: list[Row], looks: dict[str, Look], figures: Path) -> Iterator[Section]:
    """Every section of the page."""
    baseline = "" if results.baseline else "<p>There is no method without strategy, so factors have no baseline.</p>"
    yield Section(
        "comparison",
        "Comparison",
        f"<p>{escape(_HOW_TO_READ)}</p>{baseline}{tables.comparison(results, rows, looks)}"
        f"<h3>Reference rows</h3>{tables.references(results)}",
    )
    yield Section(
        "curves",
        "Over training",
        _figure(figures, "metric_vs_steps")
        + _figure(figures, "metric_vs_time")
        + f"<h3>Every milestone: {escape(results.metric)}</h3>"
        + tables.milestones(results, looks)
        + tables.other_metrics(results, looks),
    )
    yield Section("validation", "Validation loss", _figure(figures, "validation_loss"))
    learned = tables.learned(results)
    yield Section(
        "strategies",
        "Strategies",
        tables.methods(results, looks)
        + _figure(figures, "density")
        + _figure(figures, "effective_weight")
        + (f"<h3>Learned samplers</h3>{learned}" if learned else ""),
    )
    yield Section("samples", "Samples", _figure(figures, "final_samples") + _figure(figures, "samples"))
    yield Section("training", "Training losses", _figure(figures, "training_loss"))
    yield Section("protocol", "How the numbers came about", _protocol(results))
    yield Section("cost", "Cost", _cost(results))
    yield Section("provenance", "Provenance", _provenance(results))


def _figure(folder: Path, name: str) -> str:
    suffix = ".png" if name.endswith("samples") else ".svg"
    return picture(folder / f"{name}{suffix}", FIGURES[name].title, FIGURES[name].caption)


def _protocol(results: Results) -> str:
    experiment, reference = results.experiment, results.reference
    protocol = results.trainings[0].final.evaluation["protocol"]
    accuracy = reference.get("accuracy")
    features = f"{escape(reference['extractor'])}, {plural(reference['features'], 'feature')}"
    if accuracy is not None:
        features += f", held-out accuracy {accuracy:.1%}"
    ratio = reference["num_samples"] / reference["features"]
    clip = "clipped" if protocol["clip"] else "not clipped"
    sampling = (
        f"{escape(component(experiment.sampling.scheduler))}: {plural(protocol['steps'], 'step')}, "
        f"{escape(protocol['spacing'])} spacing, x0 {clip}, {escape(protocol['weights'].upper())} weights, "
        f"guidance {number(experiment.sampling.guidance_scale)}, seed {protocol['sample_seed']}"
    )
    evaluation = experiment.evaluation
    diffusion = experiment.diffusion
    training = experiment.training
    losses = listed([component(loss) for loss in diffusion.losses])
    optimizer = training.optimizer
    bound = "VLB: losses weighted by the variational bound's c, averaged over strata"
    paired = "data order, noise and initial weights are the same for all methods of a seed"
    return definitions(
        [
            (
                "Distance",
                f"<b>{escape(results.metric)}</b>: Fréchet distance between Gaussians fitted to features; comparable "
                "only with numbers of the same extractor and reference",
            ),
            ("Extractor", f"{features}, {digest(reference['extractor_hash'])}"),
            (
                "Images",
                f"{protocol['n_samples']:,} per set ({ratio:.1f} per feature), {plural(protocol['sets'], 'set')}; the "
                "spread is the standard deviation over sets",
            ),
            ("Reference", f"statistics of the training images, {digest(reference['reference_hash'])}, for all rows"),
            ("Sampling", sampling),
            (
                "Validation loss",
                f"{plural(evaluation.loss_images, 'held-out image')}, {plural(evaluation.strata, 'stratum', 'strata')} "
                f"between the two end points, fixed noise, seed {protocol['eval_seed']}. {bound}",
            ),
            (
                "Diffusion",
                f"{escape(component(diffusion.process))}, {diffusion.prediction} prediction, loss {escape(losses)}",
            ),
            ("Model", escape(component(experiment.model))),
            (
                "Training",
                f"{training.batch_size} images per step, {optimizer.name} at {optimizer.lr:g}, EMA "
                f"{training.ema.decay:g}, {training.precision}, {plural(training.threads, 'thread')}; seeds "
                f"{listed([str(seed) for seed in experiment.seeds])}; {paired}",
            ),
        ]
    )


def _cost(results: Results) -> str:
    if not results.jobs:
        return "<p>No job of this experiment left a record of its time (<code>timing/</code> is empty).</p>"
    content, share = tables.cost(results.jobs)
    return (
        f"<p>Start-up (interpreter and imports) takes <b>{share:.0%}</b> of all CPU time. "
        "Times are those of the machine and of its load; the jobs that report and track are not in it.</p>" + content
    )


def _provenance(results: Results) -> str:
    records = [training.record for training in results.trainings]
    shared, varying = _split([_flat(record["provenance"]) for record in records])
    autoencoder = results.autoencoder
    psnr = f", reconstruction PSNR {autoencoder['psnr']:.1f} dB" if autoencoder.get("psnr") is not None else ""
    skipped = results.dataset.get("skipped") or []
    data = f"{digest(results.dataset['content_sha256'])}, {plural(results.dataset['count'], 'image')}"
    if skipped:
        data += f", {plural(len(skipped), 'broken image')} skipped"
    items = [("Data", data), ("Autoencoder", f"{autoencoder['kind']}{psnr}, {digest(str(autoencoder['sha256']))}")]
    items += [(key.replace("_", " "), escape(value)) for key, value in shared.items() if value not in ("None", "[]")]
    header = ["method", "seed", "steps", "identity", "EMA weights", *map(escape, varying)]
    lines = [
        [
            f"<b>{escape(training.method)}</b>",
            str(training.seed),
            f"{training.record['steps']:,}",
            digest(training.record["identity"]),
            digest(training.record["components"].get("ema")),
            *(escape(_flat(training.record["provenance"]).get(key, "–")) for key in varying),
        ]
        for training in results.trainings
    ]
    explanation = (
        "<p>The identity is the hash of everything that decides a training's trajectory: data, autoencoder, model, "
        "diffusion, method, seed, batch, optimiser, threads and the code that computes it.</p>"
    )
    return definitions(items) + explanation + table(Table(header, lines, frozenset({1, 2})))


def _flat(record: Record) -> dict[str, str]:
    return {key: listed(value) if isinstance(value, list) and value else str(value) for key, value in record.items()}


def _split(records: list[dict[str, str]]) -> tuple[dict[str, str], list[str]]:
    """What all records share, and the names in which they differ."""
    names = dict.fromkeys(name for record in records for name in record)
    varying = [name for name in names if len({record.get(name) for record in records}) > 1]
    return {name: records[0][name] for name in names if name not in varying}, varying
