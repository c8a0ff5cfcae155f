"""Loss terms by name."""

from typing import Any

from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry


class LossOptions(Options):
    """Options of a loss term."""

    scale: float = option(1.0, "factor of the term", gt=0)
    weighted: bool = option(True, "true: the strategy's weights multiply the term")


class VbOptions(LossOptions):
    """Options of a term that trains the variance; scale T/1000 is improved DDPM's RESCALED_MSE."""

    weighted: bool = option(False, "true: the strategy's weights multiply the term")


LOSSES = Registry("loss")
LOSSES.add("mse", "kairos.losses.terms:mse", LossOptions, "mean squared error of the prediction (simple loss)")
LOSSES.add("vlb", "kairos.losses.terms:vlb", LossOptions, "the VLB term: c_t times the squared error of epsilon")
# facts of a term: `variance`: it trains a learned variance; `masked`: it needs a backbone that can hide tokens
LOSSES.add(
    "vb",
    "kairos.losses.terms:vb",
    VbOptions,
    "variational bound of the learned variance in bits per dimension",
    variance=True,
)
LOSSES.add(
    "masked_mse",
    "kairos.losses.terms:masked_mse",
    LossOptions,
    "mse of a second forward pass with masked tokens",
    masked=True,
)
LOSSES.add(
    "masked_vb",
    "kairos.losses.terms:masked_vb",
    VbOptions,
    "vb of the second forward pass with masked tokens",
    masked=True,
    variance=True,
)


def check_losses(losses: list[dict[str, Any]], process: dict[str, Any]) -> None:
    """Check the loss terms against each other and the process.

    Args:
        losses: field `diffusion.losses`.
        process: field `diffusion.process`.

    Raises:
        ConfigError: no term is weighted; a term is listed twice; a learned variance has no term that trains it, or
            there is such a term without a learned variance.
    """
    field = "diffusion.losses"
    names = [loss["name"] for loss in losses]
    listed = ", ".join(names)
    is_weighted = any(loss["weighted"] for loss in losses)
    demand(is_weighted, field, listed, "with a term that strategies weigh, such as mse")
    has_duplicates = len(set(names)) < len(names)
    demand(not has_duplicates, field, listed, "each once (scale is a factor)")

    variance = process.get("variance", "none")
    variance_terms = [name for name, entry in LOSSES.items() if entry.facts.get("variance")]
    used_variance_terms = [name for name in names if name in variance_terms]
    if variance == "learned_range":
        allowed = f"with a term that trains it: {', '.join(variance_terms)}"
        demand(len(used_variance_terms) > 0, field, f"{listed} with variance learned_range", allowed)
    elif used_variance_terms:
        got = f"{used_variance_terms[0]} with process {process['name']} and variance {variance}"
        raise rejection(field, got, "with process discrete and variance learned_range")
