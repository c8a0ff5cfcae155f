"""Run every component on a simulated CUDA device: no mixed devices, and only the synchronisations listed here.

Each training run takes four steps: step 0 sets up, 1 is ordinary, 2 measures, 3 logs.
"""

import functools
import itertools
from collections import Counter
from random import Random
from unittest import mock

import pytest
import torch

from fake_cuda import DEVICE, fake_cuda, process_group
from kairos.config import validate
from kairos.data.latents import open_latents
from kairos.losses.settings import LOSSES
from kairos.models.settings import BACKBONES
from kairos.sampling.generate import DataPrediction, Guidance, build_guided_predictor, make_noise_source
from kairos.sampling.settings import SOLVERS, resolve_solver
from kairos.sampling.time_grids import build_time_grid
from kairos.training.loop import train_steps
from kairos_timesteps.base import FixedDensity, Learned, MeasuresNetwork
from kairos_timesteps.components import COUPLINGS, PROCESSES, SAMPLERS, WEIGHTINGS
from kairos_timesteps.coordinates import POINTS
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.registry import Registry
from kairos_timesteps.strategy import Strategy
from kairos_timesteps.weightings import coarse_to_fine
from rank_groups import case
from training_case import build_training, experiment, make_latents

SAMPLING_STEPS = 3
ORDINARY, MEASURING, LOGGING, STEPS = 1, 2, 3, 4  # step indices, and the number of steps
SHORT = {
    "frequency": 2, "start": 1, "history": 1, "length": 8, "bins": 2, "samples": 2, "feature_timesteps": 4,
    "selected": 2, "queue": 3, "min_count": 1,
}  # fmt: skip

# Upper bounds of the synchronisations of a step. An ordinary step has none.
BOUNDS_OF_EVERY_STEP = {
    "assignment": {"copy to the host in couplings.Assignment.__call__": 1,
                   "copy to the device in couplings.Assignment.__call__": 1},
}  # fmt: skip
BOUNDS_WHEN_LOGGING = {
    "copy to the host in loop._compute_metrics": 1,  # the losses and the gradient norm
    "value read in state.TrainingState.is_finite": 1,  # if the loss and gradients are finite
    "value read in base.TableDensity.statistics": 1,
    "value read in info_noise.InfoNoise.statistics": 1,
    "copy to the host in adaptive.Adaptive.statistics": 1,  # a and b of a policy
}
BOUNDS_WHEN_MEASURING = {
    "adaptive": {
        "copy to the host in meter.Meter.errors": 6,  # before and after: features, and 2 timesteps of S
        "value read in adaptive.Adaptive._learn": 1,  # if the policy's gradient is finite
    },
    "gradients": {"copy to the host in gradients.FollowsGradients.squared_norms": 2},
    "first_order": {"copy to the host in gradients.FirstOrder.measure": 1},
    "coarse_to_fine": {"copy to the host in losses.ErrorOfEpsilon.mean": 1},
}

DISCRETE = {"name": "discrete", "timesteps": 100}
LEARNED_VARIANCE = {**DISCRETE, "variance": "learned_range"}
TRANSFORMER = {"patch": 2, "width": 16, "depth": 2, "heads": 2}
UNET = {"channels": 8, "multipliers": [1], "blocks": 1, "attention": [], "norm_groups": 4}
SMALL = {
    "unet": UNET, "ldm_unet": UNET | {"head_channels": 4}, "adm": UNET | {"head_channels": 4, "null_class": True},
    "ddpmpp": {"channels": 8, "multipliers": [1], "blocks": 1, "attention": [], "augment": 0},
    "dit": TRANSFORMER | {"depth": 1}, "mdt": TRANSFORMER | {"decoder_depth": 1}, "uvit": TRANSFORMER,
    "vit": TRANSFORMER | {"depth": 1},
}  # fmt: skip

AXES = {
    "sampler": list(SAMPLERS),
    "weighting": list(WEIGHTINGS),
    "coupling": list(COUPLINGS),
    "process": [*PROCESSES, "epsilon", "x0", "v"],  # prediction types of a discrete process
    "model": list(BACKBONES),
    "loss": list(LOSSES),
    "precision": ["fp32", "tf32", "bf16", "fp64"],
    "points": list(POINTS),
    "microbatch": [None, 8],
    "conditions": [False, True],
    "importance": [False, True],
    "ranks": [1, 8, 1024],
}
DEFAULTS = {name: values[0] for name, values in AXES.items()} | {"model": "dit"}


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return open_latents(make_latents(tmp_path_factory.mktemp("fake_cuda")))


def resolve_combination(combination: dict) -> dict:
    """Switch off options that the sampler lacks, and take process and model from the loss."""
    sampler = SAMPLERS[combination["sampler"]].component.options
    row = dict(combination)
    row["points"] = combination["points"] if "points" in sampler else "random"
    # a list never draws most timesteps, so importance weights are rejected
    row["importance"] = combination["importance"] and "importance" in sampler and combination["sampler"] != "listed"
    if LOSSES[combination["loss"]].trains_variance:
        row["process"] = "learned variance"
    if LOSSES[combination["loss"]].masks_tokens:
        row["model"] = "mdt"
    return row


def make_experiment(combination: dict) -> dict:
    """Return the plain experiment with one value of each axis."""
    combination = resolve_combination(combination)
    sampler = {"name": combination["sampler"], **_known(SAMPLERS, combination["sampler"], SHORT)}
    sampler |= _known(SAMPLERS, combination["sampler"], {"points": combination["points"]})
    if combination["importance"]:
        sampler["importance"] = True
    if combination["sampler"] == "uniform":
        del sampler["start"]  # its `start` is a timestep, not a number of steps
    process, prediction, model = {"name": combination["process"]}, None, combination["model"]
    if combination["process"] in ("epsilon", "x0", "v", "discrete"):
        process, prediction = DISCRETE, None if combination["process"] == "discrete" else combination["process"]
    if combination["process"] == "learned variance":
        process = LEARNED_VARIANCE
    if combination["process"] == "vp":
        prediction = "v"
    losses = ["mse"] if combination["loss"] == "mse" else ["mse", combination["loss"]]
    return experiment(
        {"method": {"sampler": sampler, "weighting": combination["weighting"], "coupling": combination["coupling"]}},
        model={"name": model, **SMALL[model], "conditions": ["class"] if combination["conditions"] else []},
        diffusion={"process": process, "prediction": prediction, "losses": losses},
        training={
            "batch_size": 16 * combination["ranks"],
            "milestones": [STEPS],
            "device": "cuda",
            "log_every": LOGGING + 1,
            "microbatch": combination["microbatch"],
            "precision": combination["precision"],
            "condition_dropout": 0.1 if combination["conditions"] else 0.0,
        },
    )


def _known(registry, name: str, options: dict) -> dict:
    return {key: value for key, value in options.items() if key in registry[name].component.options}


def count_synchronisations(combination: dict, latents) -> list[Counter]:
    """Count the synchronisations in each of four steps, by kind and function."""
    plain, counts = make_experiment(combination), []
    with process_group(combination["ranks"]), fake_cuda() as record:
        training = build_training(plain, "method", 0, latents, DEVICE)
        running = train_steps(training, STEPS)
        for step in range(STEPS):
            record.clear()
            line = next(running)
            assert (line is not None) == (step == LOGGING)
            counts.append(Counter(record.synchronisations))
        running.close()
        assert all(parameter.grad.is_cuda for parameter in training.parameters)
    return counts


def bound_synchronisations(combination: dict, step: int) -> dict[str, int]:
    """Return the upper bounds of the synchronisations of a step by kind and function."""
    bounds = dict(BOUNDS_OF_EVERY_STEP.get(combination["coupling"], {}))
    if step == LOGGING:
        bounds |= BOUNDS_WHEN_LOGGING
    family = SAMPLERS[combination["sampler"]].module.rsplit(".", 1)[1].removesuffix("_official")
    family = combination["sampler"] if combination["sampler"] in BOUNDS_WHEN_MEASURING else family
    if step == MEASURING:
        bounds |= BOUNDS_WHEN_MEASURING.get(family, {})
    if step == LOGGING and combination["weighting"] == "coarse_to_fine":
        bounds |= BOUNDS_WHEN_MEASURING["coarse_to_fine"]
    return bounds


def check_synchronisations(combination: dict, latents) -> None:
    """Train, and compare the synchronisations of each step after the setup with their bounds."""
    counts = count_synchronisations(combination, latents)
    for step in (ORDINARY, MEASURING, LOGGING):
        bounds = bound_synchronisations(combination, step)
        exceeded = {event: count for event, count in counts[step].items() if count > bounds.get(event, 0)}
        assert not exceeded, f"step {step}"


def is_fixed(registry: Registry, name: str) -> bool:
    """True for a sampler or weighting that does not learn."""
    return not issubclass(registry[name].component, Learned)


def cover_each_value() -> list[dict]:
    """Return a few combinations with each value of each axis at least once, except fixed samplers and weightings.

    Slow values are not combined: large backbones, further losses, and samplers that measure the network.
    """
    losses = AXES["loss"][1:]
    measuring = [name for name in SAMPLERS if issubclass(SAMPLERS[name].component, MeasuresNetwork)]
    following = [name for name in SAMPLERS if not is_fixed(SAMPLERS, name) and name not in measuring]
    fixed = [name for name in SAMPLERS if is_fixed(SAMPLERS, name)]
    samplers = [*following, *fixed][: len(BACKBONES) + len(losses)] + measuring
    weightings = sorted(WEIGHTINGS, key=lambda name: is_fixed(WEIGHTINGS, name))
    rows = []
    for number, sampler in enumerate(samplers):
        row = {axis: values[number % len(values)] for axis, values in AXES.items()}
        row["sampler"], row["weighting"] = sampler, weightings[number]
        row["model"] = AXES["model"][number] if number < len(BACKBONES) else "dit"
        with_loss = number - len(BACKBONES) in range(len(losses))
        row["loss"] = losses[number - len(BACKBONES)] if with_loss else "mse"
        row["microbatch"] = 8 if number == len(samplers) - 1 else None
        rows.append(row)
    return rows


def merge_fixed(row: dict) -> dict:
    """Replace each sampler of a fixed density by one common value, and each fixed weighting by another."""
    values = dict(row)
    if is_fixed(SAMPLERS, row["sampler"]):
        values["sampler"] = "fixed density"
    if is_fixed(WEIGHTINGS, row["weighting"]):
        values["weighting"] = "fixed weights"
    return values


def list_pairs(row: dict) -> set[frozenset]:
    """Return the pairs of values of any two axes of the row, as they are trained; missing axes take their defaults."""
    values = merge_fixed(resolve_combination(DEFAULTS | row))
    return {frozenset((axis, values[axis]) for axis in pair) for pair in itertools.combinations(row, 2)}


def pair_of_axes(row: dict, one: str, other: str) -> frozenset:
    """Return the pair of values of two axes of the row, as they are trained."""
    values = merge_fixed(resolve_combination(DEFAULTS | row))
    return frozenset(((one, values[one]), (other, values[other])))


def fill_row(row: dict, covered: set[frozenset], random: Random) -> dict:
    """Choose values of the axes that a row lacks, in random order, such that most of the row's pairs are new."""
    missing = [axis for axis in AXES if axis not in row]
    for axis in random.sample(missing, len(missing)):
        values = random.sample(AXES[axis], len(AXES[axis]))
        rows = [row | {axis: value} for value in values]
        row = max(rows, key=lambda row: (len(list_pairs(row) - covered), row[axis] == DEFAULTS[axis]))
    return row


def is_valid(row: dict) -> bool:
    """False if the experiment is rejected."""
    try:
        make_experiment(row)
    except ConfigError:
        return False
    return True


@functools.cache
def cover_pairs() -> list[dict]:
    """Build combinations with each possible pair of values of two axes, see `merge_fixed`: greedy search, seed 0."""
    random = Random(0)
    covered: set[frozenset] = set()
    rows = []
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            fixed = {one: first, other: second}
            pair_to_cover = frozenset((axis, merge_fixed(DEFAULTS | fixed)[axis]) for axis in fixed)
            if pair_to_cover in covered:
                continue
            candidates = [fill_row(fixed, covered, random) for _ in range(3)]
            candidates += [{axis: random.choice(values) for axis, values in AXES.items()} | fixed for _ in range(60)]
            matching = [row for row in candidates if pair_of_axes(row, one, other) == pair_to_cover]
            matching.sort(key=lambda row: len(list_pairs(row) - covered), reverse=True)
            row = next(filter(is_valid, matching), None)
            if row is not None:
                covered |= list_pairs(row)
                rows.append(row)
    return rows


COMBINATIONS = cover_each_value()
FIXED_SAMPLERS = [name for name in SAMPLERS if is_fixed(SAMPLERS, name)]
FIXED_WEIGHTINGS = [name for name in WEIGHTINGS if is_fixed(WEIGHTINGS, name)]
PARTS = 8  # number of tests that share the combinations of `cover_pairs`, in their order
PARTS_OFTEN = 1  # the first combinations hold most pairs: this part holds 53 % of them


@pytest.fixture(autouse=True)
def weightings_learn_early(monkeypatch):
    monkeypatch.setattr(coarse_to_fine, "_EVERY", 2)


@pytest.mark.parametrize("combination", [
    # every eleventh is quick: 11 has no factor in common with the axes of 2, 3 and 4 values
    pytest.param(row, id=f"{row['sampler']}-{row['weighting']}", marks=[pytest.mark.long] * (number % 11 > 0))
    for number, row in enumerate(COMBINATIONS)
])  # fmt: skip
def test_each_component_synchronises_only_where_listed(combination, latents):
    try:
        make_experiment(combination)
    except ConfigError:  # some components need a discrete process
        combination = combination | {"process": "discrete"}
    check_synchronisations(combination, latents)


@pytest.mark.parametrize("number", range(len(FIXED_SAMPLERS)))
def test_draws_with_fixed_densities_and_weights_do_not_synchronise(number):
    sampler, weighting = FIXED_SAMPLERS[number], FIXED_WEIGHTINGS[number % len(FIXED_WEIGHTINGS)]
    points = AXES["points"][number % 4]  # points over epochs need the items
    strategy = Strategy(f"{sampler}+{weighting}", "cosine", sampler=_known(SAMPLERS, sampler, {"points": points}))
    with fake_cuda() as record:
        x0 = torch.zeros(16, 4, 2, 2, device=DEVICE)
        for step in range(3):
            draw = strategy.draw(x0)
            noise = strategy.couple(draw, torch.zeros_like(x0))
            loss = strategy.loss(draw, noise.square().mean((1, 2, 3)))
            assert loss.is_cuda
            with strategy.observe(draw):
                pass
            if step == 0:  # moves tables to the device
                record.clear()
        assert not record.synchronisations


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.long if part < PARTS_OFTEN else pytest.mark.nightly)
        for part in range(PARTS)
    ],
)
def test_pairs_of_components_synchronise_only_where_listed(part, latents):
    rows = cover_pairs()
    for combination in rows[part * len(rows) // PARTS : (part + 1) * len(rows) // PARTS]:
        with case(str(combination)):
            check_synchronisations(combination, latents)


def test_by_default_a_gpu_logs_every_tenth_step_and_a_cpu_every_step(latents):
    plain = experiment({"uniform": {}})
    with fake_cuda() as record:
        training = build_training(plain, "uniform", 0, latents, DEVICE)
        record.clear()
        logged = [line["step"] for line in train_steps(training, 11) if line is not None]
        reads = [wait for wait in record.synchronisations if "loop" in wait or "is_finite" in wait]
    assert logged == [10] and len(reads) == 2 * len(logged)
    training = build_training(plain, "uniform", 0, latents, torch.device("cpu"))
    assert [line["step"] for line in train_steps(training, 3)] == [1, 2, 3]


SAMPLING_CASES = [(solver, process, prediction) for solver in SOLVERS for process, prediction in (
    ("discrete", "epsilon"), ("discrete", "v"), ("edm", None), ("fdm", None), ("flow", None), ("vp", "x0"),
)]  # fmt: skip


def count_synchronisations_of_sampling(
    latents, solver: str, diffusion: dict, precision: str, guidance_scale: float
) -> Counter:
    """Count the synchronisations of sampling four images, without those of the setup."""
    names = ["class"] if guidance_scale != 1 else []
    plain = experiment(
        {"method": {}},
        model__conditions=names,
        diffusion=diffusion,
        training__condition_dropout=0.1 if names else 0.0,
        sampling={"scheduler": solver, "steps": SAMPLING_STEPS, "guidance_scale": guidance_scale},
    )
    config = validate(plain)
    scheduler = resolve_solver(config.sampling.scheduler, config.diffusion.process)
    with fake_cuda() as record, torch.no_grad():
        training = build_training(plain, "method", 0, latents, DEVICE)
        process, shape = training.process, latents.shape
        grid = build_time_grid(process, SAMPLING_STEPS, scheduler)
        conditions = {name: torch.zeros(4, dtype=torch.int64, device=DEVICE) for name in names}
        predict = build_guided_predictor(
            process, training.model, conditions, latents.condition_kinds, Guidance(guidance_scale)
        )
        estimate = DataPrediction(process, predict, False, precision)
        estimate(torch.zeros(4, *shape, dtype=torch.float64, device=DEVICE), grid[0])  # moves tables to the device
        record.clear()
        x0 = scheduler.build(process, grid, estimate, make_noise_source(0, range(4), shape, DEVICE))
        assert x0.device == DEVICE and x0.shape == (4, *shape)
        return Counter(record.synchronisations)


@pytest.mark.parametrize(("solver", "process", "prediction"), SAMPLING_CASES[::5])  # each solver and each process
def test_sampling_does_not_synchronise(solver, process, prediction, latents):
    diffusion = {"process": process, "prediction": prediction}
    assert not count_synchronisations_of_sampling(latents, solver, diffusion, "bf16", 2.0)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(SAMPLING_CASES)))
def test_sampling_does_not_synchronise_in_any_precision(number, latents):
    """Each solver and each process with each precision, with and without guidance."""
    solver, process, prediction = SAMPLING_CASES[number]
    solver_index, process_index = divmod(number, len(SAMPLING_CASES) // len(SOLVERS))
    precision = ("fp32", "tf32", "bf16")[(solver_index + process_index) % 3]
    guidance_scale = (1.0, 2.0)[(solver_index + process_index // 3) % 2]
    diffusion = {"process": process, "prediction": prediction}
    assert not count_synchronisations_of_sampling(latents, solver, diffusion, precision, guidance_scale)


@pytest.mark.parametrize(
    "name", [name for name, entry in SAMPLERS.items() if issubclass(entry.component, FixedDensity)]
)
def test_draws_of_a_fixed_density_can_be_captured_in_a_cuda_graph(name):
    """A draw after the first one copies nothing to the device: a graph cannot capture copies from unpinned memory."""
    with fake_cuda() as record, mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        strategy = Strategy(name, "cosine")
        x0 = torch.zeros(4, 3, 8, 8, device=DEVICE)
        step = torch.zeros((), dtype=torch.int64, device=DEVICE)
        strategy.draw(x0, step=step)  # moves tables to the device
        record.clear()
        strategy.draw(x0, step=step)
        assert not record.synchronisations
