"""Loss terms by name."""

from typing import ClassVar

from kairos.components import ComponentOptions, Components
from kairos.library_components import LibraryComponent
from kairos.section import field
from kairos_timesteps.errors import demand, rejection


class LossOptions(ComponentOptions):
    """Base class of the options of a loss term.

    Attributes:
        trains_variance: True if the term trains a variance that the network predicts.
        masks_tokens: True if the term needs a backbone that can hide tokens.
    """

    trains_variance: ClassVar[bool] = False
    masks_tokens: ClassVar[bool] = False

    scale: float = field(1.0, "factor of the term", gt=0)
    weighted: bool = field(True, "true: the strategy's weights multiply the term")


LOSSES: Components[LossOptions] = Components("loss")


@LOSSES.register
class MseOptions(LossOptions):
    """Mean squared error of the prediction (simple loss)."""

    code: ClassVar[str] = "kairos.losses.terms:mse"

    name: str = "mse"


@LOSSES.register
class VlbOptions(LossOptions):
    """The VLB term: c_t, the weight of the variational bound, times the squared error of epsilon."""

    code: ClassVar[str] = "kairos.losses.terms:vlb"

    name: str = "vlb"


@LOSSES.register
class VbOptions(LossOptions):
    """Variational bound of the learned variance in bits per dimension; scale T/1000 is improved DDPM's RESCALED_MSE."""

    code: ClassVar[str] = "kairos.losses.terms:vb"
    trains_variance: ClassVar[bool] = True

    name: str = "vb"
    weighted: bool = field(False, "true: the strategy's weights multiply the term")


@LOSSES.register
class MaskedMseOptions(LossOptions):
    """Loss term `mse` of a second forward pass with masked tokens."""

    code: ClassVar[str] = "kairos.losses.terms:masked_mse"
    masks_tokens: ClassVar[bool] = True

    name: str = "masked_mse"


@LOSSES.register
class MaskedVbOptions(VbOptions):
    """Loss term `vb` of the second forward pass with masked tokens."""

    code: ClassVar[str] = "kairos.losses.terms:masked_vb"
    masks_tokens: ClassVar[bool] = True

    name: str = "masked_vb"


def check_losses(losses: list[LossOptions], process: LibraryComponent) -> None:
    """Check that loss terms fit each other and the process; that the backbone can mask tokens is not checked here.

    Args:
        losses: field `diffusion.losses`.
        process: field `diffusion.process`.

    Raises:
        ConfigError: no term is weighted; a term is listed twice; a learned variance has no term that trains it, or
            there is such a term without a learned variance.
    """
    where = "diffusion.losses"
    names = [loss.name for loss in losses]
    listed = ", ".join(names)
    has_weighted_term = any(loss.weighted for loss in losses)
    demand(has_weighted_term, where, listed, "with a term that strategies weigh, such as mse")
    has_duplicates = len(set(names)) < len(names)
    demand(not has_duplicates, where, listed, "each once (scale is a factor)")

    variance = process.get("variance", default="none")  # other processes than discrete have no such option
    variance_terms = [name for name, loss in LOSSES.items() if loss.trains_variance]
    used_variance_terms = [name for name in names if name in variance_terms]
    if variance == "learned_range":
        allowed = f"with a term that trains it: {', '.join(variance_terms)}"
        demand(len(used_variance_terms) > 0, where, f"{listed} with variance learned_range", allowed)
    elif used_variance_terms:
        got = f"{used_variance_terms[0]} with process {process.name} and variance {variance}"
        raise rejection(where, got, "with process discrete and variance learned_range")
