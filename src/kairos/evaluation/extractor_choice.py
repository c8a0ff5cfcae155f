"""Selection of an experiment's feature extractor, and the checks of section `evaluation` before any job.

No torch here: `kairos check` and every evaluation of the Snakefile import this module.
"""

from collections.abc import Collection
from pathlib import Path

from kairos.data.settings import DatasetConfig, report_as_heldout
from kairos.data.source_statistics import ImageCounts, count_images
from kairos.evaluation import external_reference, inception_weights
from kairos.evaluation.settings import SPLITS, DinoOptions, EvaluationConfig, InceptionOptions, needs_of_real_images
from kairos.section import check
from kairos_timesteps.errors import ConfigError, KairosError

_INCEPTION_WIDTH = 2048  # features of Inception
MIN_IMAGES_PER_CLASS = 5  # images of each class that training a classifier needs


def choose_extractor(
    evaluation: EvaluationConfig, dataset: DatasetConfig, conditions: Collection[str] = ()
) -> tuple[EvaluationConfig, list[str]]:
    """Replace extractor ``auto`` by a definite one and check that the evaluation is possible.

    An extractor that replaces ``auto`` has the default values of its options; a classifier has a fallback. A number of
    images that is unknown passes the checks.

    Args:
        evaluation: section `evaluation`.
        dataset: section `dataset`.
        conditions: names of the model's conditions.

    Returns:
        The section with a definite extractor, and messages for the user: the reason for the choice of ``auto``, then
        warnings. A section without ``auto`` is returned unchanged.

    Raises:
        ConfigError: the images are too few, lack labels that extractor or conditions need, or contradict
            `dataset.train_images`. The weights are missing
            and cannot be downloaded. A metric or the reference lacks something. The message has a line per problem.
            If images cannot be used, or their number is not `dataset.images`, the message has this problem alone.
    """
    counts = count_images(dataset)
    messages: list[str] = []
    problems: list[str] = []  # messages of the error
    if counts.unknown:
        messages.append(
            f"warning: the number and labels of the images are unknown before kairos prepare ({counts.unknown})"
        )

    # the extractor
    name = evaluation.extractor.name
    if name == "auto":
        name, reason = _resolve_auto(evaluation, counts)
        messages.insert(0, f"extractor: {name} (auto: {reason})")
        # the default options, and a replacement of a classifier that learns nothing; `source` begins the error message
        extractor = {"name": name, "fallback": "selfsupervised"} if name == "classifier" else name
        evaluation = check(EvaluationConfig, {**evaluation.model_dump(), "extractor": extractor}, source=messages[0])
    elif name == "classifier" and not counts.unknown:
        problems += _classifier_problems(counts)

    # numbers and labels of the images
    if "class" in conditions and not counts.unknown and counts.smallest is None:
        problems.append("model.conditions: got class, but the images have no labels; allowed: images with labels")
    problems += _train_count_problems(dataset, counts)
    problems += _image_count_problems(evaluation, dataset, counts)

    # weights, metrics and reference; the first problem among them is reported
    try:
        messages += _check_weights(evaluation)
        metrics = evaluation.metrics_for(name, heldout=dataset.heldout != 0)
        if evaluation.reference not in SPLITS:
            width = evaluation.extractor.feature_count
            needs = needs_of_real_images(metrics)
            # only for its checks: the moments are not used here
            external_reference.read_moments(Path(evaluation.reference), width, needs, "evaluation.reference")
    except KairosError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(problems))
    return evaluation, messages


def _resolve_auto(evaluation: EvaluationConfig, counts: ImageCounts) -> tuple[str, str]:
    """Return the name of the extractor that ``auto`` selects, and the reason.

    Inception needs weights at the default path, and more images than features in a set of samples and in the training
    data. The set of samples alone decides if the number of training images is unknown. A classifier needs labels, and
    `MIN_IMAGES_PER_CLASS` images or more of each class. The alternative is a self-supervised network.
    """
    path = inception_weights.default_path()
    smallest_set = evaluation.num_samples  # images of the smallest set that features are computed of
    if counts.train is not None:
        smallest_set = min(smallest_set, counts.train)
    if path.is_file() and smallest_set > _INCEPTION_WIDTH:
        return "inception", f"its weights are {path}"
    if path.is_file():
        reason = f"{smallest_set} images are too few for Inception"
    else:
        reason = f"no Inception weights at {path}"
    obstacle = _classifier_obstacle(counts)
    if obstacle:
        return "selfsupervised", f"{reason}; {obstacle}"
    return "classifier", f"{reason}; the images have labels"


def _classifier_obstacle(counts: ImageCounts) -> str:
    """Return why ``auto`` trains no classifier on the images; empty if it does.

    While the images are unknown, it is assumed that ``auto`` trains none. The text then begins with ``assumed``.
    """
    if counts.unknown:
        return "assumed, because the images are unknown yet; set the extractor, so that it does not change later"
    if counts.smallest is None:
        return "the images have no labels"
    if counts.smallest < MIN_IMAGES_PER_CLASS:
        return f"the smallest class has {counts.smallest} images"
    return ""


def _classifier_problems(counts: ImageCounts) -> list[str]:
    """Return a list with the error message if a classifier cannot be trained on the images, else an empty list.

    The caller ensures that numbers and labels of the images are known.
    """
    obstacle = _classifier_obstacle(counts)
    if not obstacle:
        return []
    allowed = f"selfsupervised, inception, auto, or images with labels, {MIN_IMAGES_PER_CLASS} or more of each class"
    return [f"evaluation.extractor: got classifier, but {obstacle}; allowed: {allowed}"]


def _check_weights(evaluation: EvaluationConfig) -> list[str]:
    """Return a list with a warning if the extractor's published weights will be downloaded, else an empty list.

    Raises:
        ConfigError: the configured weights lack the last layer, which the Inception score needs.
        KairosError: the weights are missing and cannot be downloaded.
    """
    extractor = evaluation.extractor
    source: Path | str
    if isinstance(extractor, InceptionOptions):
        source, is_present = inception_weights.find_weights(extractor.path, evaluation.needs_logits)
        if evaluation.needs_logits and source.name == inception_weights.NAME_WITHOUT_LAST_LAYER:
            raise ConfigError(inception_weights.missing_last_layer_message())
    elif isinstance(extractor, DinoOptions):
        source, is_present = inception_weights.find_network(extractor.path)
    else:
        return []
    if is_present:
        return []
    return [f"warning: the extractor's job will download {source}; run kairos fetch to download it now"]


def _train_count_problems(dataset: DatasetConfig, counts: ImageCounts) -> list[str]:
    """Return a list with the error message if `dataset.train_images` cannot be the number of training images.

    Otherwise the list is empty, for example if the number is unknown. Images that stage prepare may leave out, because
    they are broken or have no captions, are in `counts`: the number may then be smaller.
    """
    if dataset.train_images is None or counts.train is None:
        return []
    may_lack_captions = dataset.captions is not None and dataset.unmatched == "count"
    may_be_smaller = dataset.broken == "skip" or may_lack_captions
    if dataset.train_images == counts.train or (may_be_smaller and dataset.train_images < counts.train):
        return []
    limit = "at most " if may_be_smaller else ""
    return [f"dataset.train_images: got {dataset.train_images}, allowed: {limit}{counts.train} (or null)"]


def _image_count_problems(evaluation: EvaluationConfig, dataset: DatasetConfig, counts: ImageCounts) -> list[str]:
    """Return an error message for each number of images that is too small for a feature covariance of full rank.

    The checked numbers are images per set and real images: training images with reference ``train``, all images with
    ``all``. An npz file as reference is not checked here. Unknown numbers of images pass, and all numbers pass if the
    number of features is unknown.
    """
    name = evaluation.extractor.name
    width = evaluation.extractor.feature_count or 0  # 0: unknown, so that no number is too small
    image_counts = [("evaluation.num_samples", evaluation.num_samples, "images a set")]  # field, number and unit
    if counts.train is not None and evaluation.reference == "train":
        image_counts.append(("dataset", counts.train, "training images"))
    if counts.count is not None and evaluation.reference == "all" and counts.count <= width:
        # too few unless held-out images from another path, which `counts` leaves out, are added
        heldout_count = _count_separate_heldout(dataset)
        if heldout_count is not None:
            image_counts.append(("dataset", counts.count + heldout_count, "images with the held-out ones"))
    if evaluation.reference == "heldout" and dataset.heldout == 0:
        image_counts.append(("dataset.heldout", 0, "held-out images with evaluation.reference: heldout"))
    hint = "; evaluation.extractor.features sets it" if hasattr(evaluation.extractor, "features") else ""
    allowed = f"more than {width}, the number of features of {name} (fewer make the Fréchet distance meaningless{hint})"
    problems = []
    for field, number, unit in image_counts:
        if number <= width:
            problems.append(f"{field}: got {number} {unit}, allowed: {allowed}")
    return problems


def _count_separate_heldout(dataset: DatasetConfig) -> int | None:
    """Return the number of held-out images from another path, split or list; 0 without them, None if it is unknown.

    Raises:
        ConfigError: these images are present but cannot be used.
    """
    if dataset.heldout_section is None:
        return 0
    # `dataset.limit` does not apply to these images
    with report_as_heldout():
        return count_images(dataset.heldout_section.model_copy(update={"limit": None})).count
