"""The other stages of an experiment: which records are there, and how many samples and evaluations are valid."""

from kairos.status.outline import Outline
from kairos.status.products import Products

_RECORDS = {
    "prepared": "dataset/manifest.json",
    "autoencoder": "autoencoder/manifest.json",
    "latents": "latents/manifest.json",
    "extractor": "extractor/manifest.json",
    "reference": "reference/reference.json",
    "report": "report.html",
    "tracked": "tracking.json",
}


def stages(outline: Outline, products: list[Products]) -> str:
    """Return two lines: the records that are there, and the numbers of samples and evaluations, with the outdated ones.

    Args:
        outline: the experiment.
        products: the samples and evaluations of every training.
    """
    there = {name: (outline.results / file).is_file() for name, file in _RECORDS.items()}
    done, open_ = (", ".join(name for name in there if there[name] is which) or "nothing" for which in (True, False))
    wanted = len(outline.trainings) * len(outline.milestones)
    samples = _counted("samples", [each.samples for each in products], wanted)
    evaluations = _counted("evaluations", [each.evaluations for each in products], wanted)
    return f"there: {done}; not yet: {open_}\n{samples}, {evaluations}"


def _counted(name: str, files: list[dict[str, bool]], wanted: int) -> str:
    valid = [is_valid for of_training in files for is_valid in of_training.values()]
    of_all = f" of {wanted}" if wanted else ""
    outdated = f" ({valid.count(False)} outdated)" if False in valid else ""
    return f"{name} {valid.count(True)}{of_all}{outdated}"
