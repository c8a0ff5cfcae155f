"""Names of random streams and keys of states must never change.

Names of random streams are hashed into every random number. Keys of states are in checkpoints. This file lists both, so
that a rename cannot change them unnoticed.
"""

import ast
from pathlib import Path

import pytest
import torch

import kairos_timesteps
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS

SOURCE = Path(kairos_timesteps.__file__).parent

STREAMS = {
    "coupling",
    "floor",
    "measured image",
    "measured images",
    "measured signs",
    "measured times",
    "order of timesteps",
    "part",
    "policy",
    "sobol",
    "timesteps",
    "uncertainty",
    "validation noise",
}
# noise of measurements: the name of the stream is an argument, some names contain numbers
MEASUREMENTS = {"measurement", "measurement after the step", "{} at S {}", "measured target {}", "measurement {}"}

STATE_KEYS = {
    "adaptive": {"policy", "optimizer", "queue", "selected", "updates", "reward", "last_reward"},
    "adaptive_official": {"policy", "optimizer", "queue", "selected", "updates", "reward", "last_reward"},
    "adaptive_paper": {"policy", "optimizer", "queue", "selected", "updates", "reward", "last_reward"},
    "auto": {"values", "updates"},
    "first_order": {"values", "updates"},
    "gradient_norm": {"values", "updates"},
    "gradient_variance": {"values", "updates"},
    "info_noise": {"sums", "means", "measured", "pivot", "taken", "updates", "masses"},
    "info_rate": {"sums", "taken", "updates", "masses"},
    "loss_mean": {"sums", "taken", "updates", "masses"},
    "loss_rms": {"sums", "taken", "updates", "masses"},
    "loss_second_moment": {"losses", "counts", "updates", "masses"},
    "coarse_to_fine": {"share", "errors"},
    "edm2": {"linear", "optimizer"},
}


def template(node: ast.expr) -> "str | None":
    """Return a string constant, or an f-string with {} for its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def strings(functions: dict[str, int]) -> set[str]:
    """Return the strings that the code passes to functions, by name, at a position of their arguments."""
    texts = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in functions and len(node.args) > functions[name]:
                    texts.add(template(node.args[functions[name]]))
    return texts - {None}


def test_random_streams_keep_their_names():
    assert strings({"stream": 0, "uniform": 0, "Stream": 1, "derived_seed": 1}) == STREAMS


def test_noise_of_measurements_keeps_its_names():
    after = {SAMPLERS[name].component.noise_after for name in ("adaptive", "adaptive_official")}
    assert strings({"gradient": 2, "_losses": 3, "_measure": 1}) | after == MEASUREMENTS


def test_first_order_keeps_its_noise():
    source = (SOURCE / "samplers/gradients.py").read_text(encoding="utf-8")
    assert 'f"measurement {k} {number}"' in source  # a variable, which the test above does not find


@pytest.mark.parametrize("name", sorted(STATE_KEYS))
def test_states_keep_their_keys(name):
    strategy = kairos_timesteps.Strategy(name)
    strategy.draw(torch.zeros(2, 1, 4, 4))
    part = strategy.weighting if name in WEIGHTINGS and name not in SAMPLERS else strategy.sampler
    assert part.state_dict().keys() == STATE_KEYS[name]
    assert strategy.state_dict().keys() == {"settings", "step", "drawn", "sampler", "weighting"}


def test_no_two_classes_share_a_name():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted({*names})


def test_every_learned_component_is_listed():
    learned = {
        name
        for registry in (SAMPLERS, WEIGHTINGS)
        for name, entry in registry.items()
        if issubclass(entry.component, kairos_timesteps.base.Learned)
    }
    assert learned - {"auto"} == set(STATE_KEYS) - {"auto"}
