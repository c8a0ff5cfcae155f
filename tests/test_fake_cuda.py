"""Every component on a CUDA device that does not exist: no mixed devices, and only the synchronisations listed here.

Each training takes four steps: step 0 sets up, 1 is ordinary, 2 measures, 3 logs.
"""

import itertools
from collections import Counter
from contextlib import suppress

import pytest
import torch
from fake_cuda import DEVICE, fake_cuda, process_group
from training_case import experiment, make_latents

from kairos.data.latents import open_latents
from kairos.diffusion.registries import LOSSES, PROCESSES
from kairos.errors import ConfigError
from kairos.models.registries import MODELS
from kairos.sampling.draw import Estimate, Guidance, guided, noise_of
from kairos.sampling.places import places
from kairos.sampling.registries import SCHEDULERS, resolved
from kairos.section import build
from kairos.strategies import SAMPLERS, WEIGHTINGS, coarse_to_fine
from kairos.strategies.points import POINTS
from kairos.strategies.registries import COUPLINGS
from kairos.training.loop import steps
from kairos.training.state import Training

SAMPLING_STEPS = 3
ORDINARY, MEASURING, LOGGING, STEPS = 1, 2, 3, 4  # numbers of steps, and how many there are
SHORT = {
    "frequency": 2, "start": 1, "history": 1, "length": 8, "bins": 2, "samples": 2, "feature_timesteps": 4,
    "selected": 2, "queue": 3,
}  # fmt: skip

# Upper bounds of the synchronisations of a step. An ordinary step has none.
IN_EVERY_STEP = {
    "assignment": {"copy to the host in couplings.Assignment.__call__": 1,
                   "copy to the device in couplings.Assignment.__call__": 1},
}  # fmt: skip
OF_LOGGING = {
    "copy to the host in loop._line": 1,  # the losses
    "value read in loop._line": 1,  # the gradient norm
    "value read in loop.steps": 1,  # whether everything was finite
    "value read in base.Tabled.statistics": 1,
    "copy to the host in distributed.gather": 1,  # a and b of a policy
}
OF_MEASURING = {
    "adaptive": {
        "copy to the host in meter.Meter.errors": 6,  # before and after: features, and 2 timesteps of S
        "value read in adaptive.Adaptive._learn": 1,  # whether the policy's gradient is finite
    },
    "gradients": {"copy to the host in gradients.FromGradients.squares": 2},
    "first_order": {"copy to the host in gradients.FirstOrder.measure": 1},
    "coarse_to_fine": {"copy to the host in history.Predicted.mean": 1},
}

DISCRETE = {"name": "discrete", "timesteps": 100}
LEARNED_VARIANCE = {**DISCRETE, "variance": "learned_range"}
TRANSFORMER = {"patch": 2, "width": 16, "depth": 2, "heads": 2}
UNET = {"channels": 8, "multipliers": [1], "blocks": 1, "attention": [], "norm_groups": 4}
SMALL = {
    "unet": UNET, "ldm_unet": UNET | {"head_channels": 4}, "adm": UNET | {"head_channels": 4},
    "ddpmpp": {"channels": 8, "multipliers": [1], "blocks": 1, "attention": [], "augment": 0},
    "dit": TRANSFORMER | {"depth": 1}, "mdt": TRANSFORMER | {"decoder_depth": 1}, "uvit": TRANSFORMER,
    "vit": TRANSFORMER | {"depth": 1},
}  # fmt: skip

AXES = {
    "sampler": list(SAMPLERS),
    "weighting": list(WEIGHTINGS),
    "coupling": list(COUPLINGS),
    "process": [*PROCESSES, "epsilon", "x0", "v"],  # of a discrete process, what is predicted
    "model": list(MODELS),
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


def plain_experiment(chosen: dict) -> dict:
    """The experiment with one value of each axis; terms of the loss decide process and model where they need one."""
    sampler = {"name": chosen["sampler"], **_known(SAMPLERS, chosen["sampler"], SHORT)}
    sampler |= _known(SAMPLERS, chosen["sampler"], {"points": chosen["points"]})
    if chosen["importance"]:
        sampler |= _known(SAMPLERS, chosen["sampler"], {"importance": True})
    process, prediction, model = {"name": chosen["process"]}, None, chosen["model"]
    if chosen["process"] in ("epsilon", "x0", "v", "discrete"):
        process, prediction = DISCRETE, None if chosen["process"] == "discrete" else chosen["process"]
    if chosen["process"] == "vp":
        prediction = "v"
    losses = ["mse"] if chosen["loss"] == "mse" else ["mse", chosen["loss"]]
    if LOSSES[chosen["loss"]].facts.get("variance"):
        process, prediction = LEARNED_VARIANCE, None
    if LOSSES[chosen["loss"]].facts.get("masked"):
        model = "mdt"
    return experiment(
        {"method": {"sampler": sampler, "weighting": chosen["weighting"], "coupling": chosen["coupling"]}},
        model={"name": model, **SMALL[model], "conditions": ["class"] if chosen["conditions"] else []},
        diffusion={"process": process, "prediction": prediction, "losses": losses},
        training={
            "batch_size": 16 * chosen["ranks"],
            "milestones": [STEPS],
            "device": "cuda",
            "log_every": LOGGING + 1,
            "microbatch": chosen["microbatch"],
            "precision": chosen["precision"],
            "condition_dropout": 0.1 if chosen["conditions"] else 0.0,
        },
    )


def _known(registry, name: str, options: dict) -> dict:
    return {key: value for key, value in options.items() if key in registry[name].options.__dataclass_fields__}


def waits_by_step(chosen: dict, latents) -> list[Counter]:
    """Synchronisations in each of four steps, by kind and function."""
    plain, found = plain_experiment(chosen), []
    with process_group(chosen["ranks"]), fake_cuda() as record:
        training = Training(plain, "method", 0, latents, DEVICE)
        running = steps(training, STEPS)
        for step in range(STEPS):
            record.clear()
            line = next(running)
            assert (line is not None) == (step == LOGGING)
            found.append(Counter(record.waits))
        running.close()
        assert all(parameter.grad.is_cuda for parameter in training.parameters)
    return found


def allowed(chosen: dict, step: int) -> dict[str, int]:
    """Upper bounds of the synchronisations of a step by kind and function."""
    bounds = dict(IN_EVERY_STEP.get(chosen["coupling"], {}))
    if step == LOGGING:
        bounds |= OF_LOGGING
    family = SAMPLERS[chosen["sampler"]].module.rsplit(".", 1)[1].removesuffix("_official")
    family = chosen["sampler"] if chosen["sampler"] in OF_MEASURING else family
    if step == MEASURING:
        bounds |= OF_MEASURING.get(family, {})
    if step == LOGGING and chosen["weighting"] == "coarse_to_fine":
        bounds |= OF_MEASURING["coarse_to_fine"]
    return bounds


def check(chosen: dict, latents) -> None:
    """Train and compare the synchronisations of each step but the first with their bounds."""
    found = waits_by_step(chosen, latents)
    for step in (ORDINARY, MEASURING, LOGGING):
        bounds = allowed(chosen, step)
        exceeded = {wait: count for wait, count in found[step].items() if count > bounds.get(wait, 0)}
        assert not exceeded, f"step {step}"


def each_once() -> list[dict]:
    """Few combinations that hold each value of each axis at least once, as many as the longest axis has values.

    Backbones but the cheapest are in one combination each.
    """
    longest = max(len(values) for values in AXES.values())
    rows = [{axis: values[number % len(values)] for axis, values in AXES.items()} for number in range(longest)]
    for row in rows[len(MODELS) :]:
        row["model"] = "dit"
    return rows


def pairwise(sampler: str) -> list[dict]:
    """Combinations that hold each pair of values of two axes at least once, those with one of the samplers.

    Pairs of two other axes are spread over the samplers: each value of the one is tried with each of the other.
    """
    covered: set = set()
    rows = []
    for name in AXES["sampler"]:
        for weighting in AXES["weighting"]:
            row = {"sampler": name, "weighting": weighting}
            for axis in AXES.keys() - row.keys():
                row[axis] = max(
                    AXES[axis], key=lambda value: (_uncovered(row, axis, value, covered), value == DEFAULTS[axis])
                )
            covered |= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
            rows.append(row)
    return [row for row in rows if row["sampler"] == sampler]


def _uncovered(row: dict, axis: str, value: object, covered: set) -> int:
    return sum(frozenset([(axis, value), pair]) not in covered for pair in row.items())


ONCE = each_once()
SINGLE = [(axis, value) for axis, values in AXES.items() for value in values if value != DEFAULTS[axis]]


@pytest.fixture(autouse=True)
def weightings_learn_early(monkeypatch):
    monkeypatch.setattr(coarse_to_fine, "_EVERY", 2)


@pytest.mark.parametrize("chosen", ONCE, ids=[f"{row['sampler']}-{row['weighting']}" for row in ONCE])
def test_each_component_waits_only_where_it_is_listed(chosen, latents):
    try:
        plain_experiment(chosen)
    except ConfigError:  # some are of a discrete process alone
        chosen = chosen | {"process": "discrete"}
    check(chosen, latents)


@pytest.mark.long
@pytest.mark.parametrize(("axis", "value"), SINGLE, ids=[f"{axis}-{value}" for axis, value in SINGLE])
def test_a_component_waits_only_where_it_is_listed(axis, value, latents):
    sampler = {"sampler": "adaptive"} if axis == "importance" else {}  # `uniform` is rejected with importance weights
    check(DEFAULTS | sampler | {axis: value}, latents)


@pytest.mark.long
@pytest.mark.parametrize("sampler", AXES["sampler"])
def test_pairs_of_components_wait_only_where_it_is_listed(sampler, latents):
    tried = 0
    for chosen in pairwise(sampler):
        with suppress(ConfigError):  # a combination that is rejected by name
            check(chosen, latents)
            tried += 1
    assert tried > 10


def test_by_default_a_gpu_logs_every_tenth_step_and_a_cpu_every_step(latents):
    plain = experiment({"uniform": {}})
    with fake_cuda() as record:
        training = Training(plain, "uniform", 0, latents, DEVICE)
        record.clear()
        logged = [line["step"] for line in steps(training, 11) if line is not None]
        reads = [wait for wait in record.waits if "loop" in wait]
    assert logged == [10] and len(reads) == 3 * len(logged)
    training = Training(plain, "uniform", 0, latents, torch.device("cpu"))
    assert [line["step"] for line in steps(training, 3)] == [1, 2, 3]


SCHEMES = [(scheme, process, prediction) for scheme in SCHEDULERS for process, prediction in (
    ("discrete", "epsilon"), ("discrete", "v"), ("edm", None), ("fdm", None), ("flow", None), ("vp", "x0"),
)]  # fmt: skip


def waits_of_sampling(latents, scheme: str, diffusion: dict, precision: str, guidance_scale: float) -> Counter:
    """Synchronisations in drawing four images, without those that set up."""
    names = ["class"] if guidance_scale != 1 else []
    plain = experiment(
        {"method": {}},
        model__conditions=names,
        diffusion=diffusion,
        training__condition_dropout=0.1 if names else 0.0,
        sampling={"scheduler": scheme, "steps": SAMPLING_STEPS, "guidance_scale": guidance_scale},
    )
    scheduler = resolved(plain["sampling"]["scheduler"], plain["diffusion"]["process"])
    with fake_cuda() as record, torch.no_grad():
        training = Training(plain, "method", 0, latents, DEVICE)
        process, shape = training.process, latents.shape
        grid = places(process, SAMPLING_STEPS, scheduler)
        conditions = {name: torch.zeros(4, dtype=torch.int64, device=DEVICE) for name in names}
        predict = guided(process, training.model, conditions, latents.condition_kinds, Guidance(guidance_scale))
        estimate = Estimate(process, predict, False, precision)
        estimate(torch.zeros(4, *shape, dtype=torch.float64, device=DEVICE), grid[0])  # moves tables to the device
        record.clear()
        x0 = build(SCHEDULERS, scheduler, process, grid, estimate, noise_of(0, range(4), shape, DEVICE))
        assert x0.device == DEVICE and x0.shape == (4, *shape)
        return Counter(record.waits)


@pytest.mark.parametrize(("scheme", "process", "prediction"), SCHEMES[::5])  # each scheme and each process
def test_sampling_does_not_wait(scheme, process, prediction, latents):
    diffusion = {"process": process, "prediction": prediction}
    assert not waits_of_sampling(latents, scheme, diffusion, "bf16", 2.0)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
@pytest.mark.parametrize(("scheme", "process", "prediction"), SCHEMES)
def test_sampling_does_not_wait_in_any_precision(scheme, process, prediction, guidance_scale, precision, latents):
    diffusion = {"process": process, "prediction": prediction}
    assert not waits_of_sampling(latents, scheme, diffusion, precision, guidance_scale)
