"""Which feature extractor an experiment gets, decided before any job, and what is refused at that point.

Without torch: `kairos check` and every reading of the Snakefile ask.
"""

from collections.abc import Collection
from pathlib import Path

from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import ImageCounts, count_images
from kairos.evaluation import external_reference, inception_weights
from kairos.evaluation.registries import UNREAL, needs_of
from kairos.evaluation.settings import EvaluationConfig
from kairos.section import check
from kairos_timesteps.errors import ConfigError, KairosError

FEWEST = 5  # images of a class that a classifier can be trained on
WIDTHS = {"inception": 2048}  # features of the extractors that have no option for it


def choose_extractor(
    evaluation: EvaluationConfig, dataset: DatasetConfig, conditions: Collection[str] = ()
) -> tuple[EvaluationConfig, list[str]]:
    """The section with a definite extractor, and what is to be said: why `auto` became which, and warnings.

    Raises:
        ConfigError: `conditions` name classes that the images do not have, the extractor cannot be made of these
            images, they are too few for it, its weights are neither here nor can be downloaded, or a metric or the
            reference has not what it needs.
    """
    known, said, faults = count_images(dataset), [], []
    if known.unknown:
        said.append(f"warning: what the images are like is not known before kairos prepare ({known.unknown})")
    name = evaluation.extractor["name"]
    if name == "auto":
        name, why = _resolve_auto(evaluation, known)
        said.insert(0, f"extractor: {name} (auto: {why})")
        evaluation = check(EvaluationConfig, {**evaluation.model_dump(), "extractor": name}, said[0])
    elif name == "classifier" and not known.unknown and (lack := _reason_against_classifier(known)):
        allowed = f"selfsupervised, inception, auto, or images with labels, {FEWEST} or more of each class"
        faults.append(f"evaluation.extractor: got classifier, but {lack}; allowed: {allowed}")
    if "class" in conditions and not known.unknown and known.smallest is None:
        faults.append("model.conditions: got class, but the images have no labels; allowed: images with labels")
    faults += _too_few_images(evaluation, known)
    try:
        if name in ("inception", "dinov2"):
            look = inception_weights.find_weights if name == "inception" else inception_weights.find_network
            where, here = look(evaluation.extractor["path"])
            said += [] if here else [f"warning: the extractor's job will download {where}; kairos fetch brings it now"]
        wanted = evaluation.metrics_for(name, dataset.heldout != 0)
        if evaluation.reference not in ("train", "all"):
            width = evaluation.extractor.get("features", WIDTHS.get(name))
            external_reference.read_moments(
                Path(evaluation.reference), width, needs_of(wanted) - UNREAL, "evaluation.reference"
            )
    except KairosError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("\n  ".join(faults))
    return evaluation, said


def _resolve_auto(evaluation: EvaluationConfig, known: ImageCounts) -> tuple[str, str]:
    """The extractor that `auto` stands for, and why."""
    place, fewest = inception_weights.default_path(), min(evaluation.num_samples, known.train or evaluation.num_samples)
    if place.is_file() and fewest > WIDTHS["inception"]:
        return "inception", f"its weights are {place}"
    why = f"{fewest} images are too few for Inception" if place.is_file() else f"no Inception weights at {place}"
    lack = _reason_against_classifier(known)
    return ("selfsupervised", f"{why}; {lack}") if lack else ("classifier", f"{why}; the images have labels")


def _reason_against_classifier(known: ImageCounts) -> str:
    """Why a classifier cannot be trained, or is not supposed to be; empty where it can."""
    if known.unknown:
        return "assumed, for the images are not known yet: name one, so that it does not change later"
    if known.smallest is None:
        return "the images have no labels"
    return f"the smallest class has {known.smallest} images" if known.smallest < FEWEST else ""


def _too_few_images(evaluation: EvaluationConfig, known: ImageCounts) -> list[str]:
    """The numbers of images that give the covariance of the features no full rank."""
    name = evaluation.extractor["name"]
    width = evaluation.extractor.get("features", WIDTHS.get(name, 0))
    numbers = [("evaluation.num_samples", evaluation.num_samples, "images a set")]
    if known.train is not None and evaluation.reference == "train":
        numbers.append(("dataset", known.train, "training images"))
    hint = "; evaluation.extractor.features sets it" if "features" in evaluation.extractor else ""
    allowed = f"more than {width}, the number of features of {name} (fewer make the Fréchet distance meaningless{hint})"
    return [f"{field}: got {got} {what}, allowed: {allowed}" for field, got, what in numbers if got <= width]
