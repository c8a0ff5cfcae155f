"""Loss terms by name."""

from functools import partial
from typing import Any

from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry


class LossOptions(Options):
    """A per-sample loss term."""

    scale: float = option(1.0, "factor of the term", gt=0)
    weighted: bool = option(True, "whether the strategy's weights multiply the term")


class VbOptions(LossOptions):
    """A term of the variance; T/1000 as its scale is improved DDPM's RESCALED_MSE."""

    weighted: bool = option(False, "whether the strategy's weights multiply the term")


LOSSES = Registry("loss")
LOSSES.add("mse", "kairos.losses.terms:mse", LossOptions, "mean squared error of the prediction (simple loss)")
LOSSES.add("vlb", "kairos.losses.terms:vlb", LossOptions, "the VLB term: c_t times the squared error of epsilon")
# `variance`: trains a learned variance; `masked`: asks a backbone that hides tokens once more
LOSSES.add("vb", "kairos.losses.terms:vb", VbOptions, "bits that the learned variance costs", variance=True)
_add = partial(LOSSES.add, masked=True)
_add("masked_mse", "kairos.losses.terms:masked_mse", LossOptions, "mse of a second pass with a mask")
_add("masked_vb", "kairos.losses.terms:masked_vb", VbOptions, "vb of that second pass", variance=True)


def check_losses(losses: list[dict[str, Any]], process: dict[str, Any]) -> None:
    """A learned variance needs a term that trains it, and such a term a learned variance; strategies need one to weigh.

    Raises:
        ConfigError: one is there without the other, or twice.
    """
    names, variance, where = [loss["name"] for loss in losses], process.get("variance", "none"), "diffusion.losses"
    got, training = ", ".join(names), [name for name, entry in LOSSES.items() if entry.facts.get("variance")]
    demand(any(loss["weighted"] for loss in losses), where, got, "with a term that strategies weigh, such as mse")
    demand(len(set(names)) == len(names), where, got, "each once (scale is a factor)")
    training_it = [name for name in names if name in training]
    if variance == "learned_range":
        got, allowed = f"{got} with variance learned_range", f"with a term that trains it: {', '.join(training)}"
        demand(training_it, where, got, allowed)
    elif training_it:
        got = f"{training_it[0]} with process {process['name']} and variance {variance}"
        raise rejection(where, got, "with process discrete and variance learned_range")
