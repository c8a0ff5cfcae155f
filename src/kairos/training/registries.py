"""Components of a training run by name: optimisers, learning-rate schedules, averages of weights, probes."""

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import NoOptions, Registry


class AdamOptions(Options):
    """Adam, or AdamW with decoupled weight decay; with linear warm-up and gradient clipping.

    A gradient that is not finite ends the training run; EDM's code replaces its values by 0 and 1e5.
    """

    lr: float = option(2e-4, "learning rate after warm-up", gt=0)
    betas: tuple[float, ...] = option((0.9, 0.999), "decay rates of the two moment estimates, each in [0, 1)")
    eps: float = option(1e-8, "term added to the denominator", gt=0)
    weight_decay: float = option(0.0, "weight decay (decoupled for adamw)", ge=0)
    warmup_steps: int = option(0, "steps of linear warm-up", ge=0)
    warmup_from_zero: bool = option(False, "the first step has rate 0 (EDM, U-ViT) instead of 1/warmup_steps of lr")
    grad_clip: float | None = option(1.0, "largest gradient norm; null: no clipping", gt=0)

    def __post_init__(self) -> None:
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        demand(valid, "betas", list(self.betas), "two numbers, each in [0, 1)")


OPTIMIZERS = Registry("optimizer")
OPTIMIZERS.add("adam", "kairos.training.optim:adam", AdamOptions, "Adam (Kingma and Ba 2015)")
OPTIMIZERS.add("adamw", "kairos.training.optim:adamw", AdamOptions, "AdamW (Loshchilov and Hutter 2019)")


class CosineOptions(Options):
    """Half a cosine, from the learning rate to a fraction of it."""

    length: int | None = option(None, "steps until the end is reached; null: the last milestone", ge=1)
    final: float = option(0.0, "fraction of the learning rate at the end", ge=0, le=1)


class InverseSqrtOptions(Options):
    """Constant, then falling with the square root of the step."""

    reference: int = option(70_000, "step from which the rate falls", ge=1)


class DecaysOptions(Options):
    """Constant except for a short decay to 0 before each of some steps, so that their weights can be evaluated."""

    at: list[float] = option([100_000], "steps at which a decay ends, increasing; after each the rate is full again")
    share: float = option(0.2, "length of a decay, as a fraction of the steps before its end", gt=0, le=1)

    def __post_init__(self) -> None:
        valid = self.at and self.at[0] >= 1 and self.at == sorted({*self.at})
        demand(valid, "at", self.at, "steps, 1 or more, increasing")


SCHEDULES = Registry("learning-rate schedule")
SCHEDULES.add("constant", "kairos.training.optim:constant", NoOptions, "constant learning rate")
SCHEDULES.add("cosine", "kairos.training.optim:cosine", CosineOptions, "half a cosine (Loshchilov and Hutter 2017)")
SCHEDULES.add("decays", "kairos.training.optim:decays", DecaysOptions, "linear to 0 before each of some steps")
SCHEDULES.add("inverse_sqrt", "kairos.training.optim:inverse_sqrt", InverseSqrtOptions, "EDM2's (Karras et al. 2024)")


class DecayOptions(Options):
    """An exponential moving average."""

    decay: float = option(0.9999, "decay per step", ge=0, lt=1)
    warmup: bool = option(True, "decay min(decay, (1 + n)/(10 + n)), so that early averages are not initial")
    count_from: int = option(0, "n of the first step (ddpm-torch: 0, latent diffusion: 1)", choices=(0, 1))


class HalfLifeOptions(Options):
    """An exponential moving average whose half-life is given in images."""

    images: float = option(500_000.0, "half-life of the average, in images", gt=0)
    rampup: float | None = option(0.05, "largest half-life, as a fraction of the images seen; null: no limit", gt=0)


class PowerOptions(Options):
    """An average whose half-life grows with the length of the training run."""

    width: float = option(0.05, "relative width sigma_rel of the averaging profile", gt=0, lt=0.289)


AVERAGES = Registry("average of weights")
AVERAGES.add("decay", "kairos.training.optim:decay", DecayOptions, "exponential, by step (Ho et al. 2020)")
AVERAGES.add("half_life", "kairos.training.optim:half_life", HalfLifeOptions, "EDM's, by images (Karras et al. 2022)")
AVERAGES.add("power", "kairos.training.optim:power", PowerOptions, "EDM2's power function (Karras et al. 2024)")

PROBES = Registry("probe")  # measurements in steps that log, see `kairos.training.loop.StepResult`
