"""The other stages of an experiment: whether their records are there."""

from kairos.status.outline import Outline

_RECORDS = {
    "prepared": "dataset/manifest.json",
    "autoencoder": "autoencoder/manifest.json",
    "latents": "latents/manifest.json",
    "extractor": "extractor/manifest.json",
    "reference": "reference/reference.json",
    "report": "report.html",
    "tracked": "tracking.json",
}


def stages(outline: Outline) -> str:
    """What is there and what is not yet, and how many samples and evaluations of how many there will be."""
    there = {name: (outline.results / file).is_file() for name, file in _RECORDS.items()}
    done, open_ = (", ".join(name for name in there if there[name] is which) or "nothing" for which in (True, False))
    number = len(outline.trainings) * len(outline.milestones)
    counts = []
    for what, suffix in (("samples", ".npz"), ("evaluation", ".json")):
        folders = [outline.results / method / f"seed{seed}" / what for method, seed in outline.trainings]
        found = sum(not path.name.startswith(".") for folder in folders for path in folder.glob(f"*{suffix}"))
        counts.append(f"{what.removesuffix('s')}s {found}" + (f" of {number}" if number else ""))
    return f"there: {done}; not yet: {open_}\n{', '.join(counts)}"
