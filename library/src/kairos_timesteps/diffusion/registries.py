"""Forward processes by name."""

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry

VARIANCES = ("fixed_large", "fixed_small", "learned_range")
ENDS = {"linear": (1e-4, 0.02), "quadratic": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}  # usual betas
CELLS = 1000  # cells of a continuous process: rows of tables, and timesteps of strategies defined per timestep


class DiscreteOptions(Options):
    """A discrete Gaussian process (DDPM)."""

    timesteps: int = option(1000, "number of timesteps T", ge=2, le=100_000)
    schedule: str = option("linear", "noise schedule", choices=("linear", "cosine", "quadratic", "scaled_linear"))
    scale_betas: bool = option(True, "multiply the end points of beta by 1000/T")
    variance: str = option("fixed_large", "reverse variance; learned_range: by twice the channels", choices=VARIANCES)
    beta_start: float | None = option(None, "beta of the first timestep; null: the schedule's usual", gt=0, lt=1)
    beta_end: float | None = option(None, "beta of the last timestep; null: the schedule's usual", gt=0, lt=1)
    first_index: int = option(0, "index of the first timestep for the network; U-ViT on latents: 1", choices=(0, 1))

    predictions = ("epsilon", "x0", "v")

    def __post_init__(self) -> None:
        given = self.beta_start, self.beta_end
        got = f"{given[0]} and {given[1]} with schedule cosine"
        demand(self.schedule != "cosine" or not any(given), "beta_start and beta_end", got, "null")
        first, last = (beta or usual for beta, usual in zip(given, ENDS.get(self.schedule, (0, 1))))
        demand(first < last, "beta_start", first, f"less than beta_end = {last}")


class EdmOptions(Options):
    """Noise levels sigma with EDM's preconditioning."""

    sigma_data: float | None = option(None, "standard deviation of the data; null: measured on the training data", gt=0)
    sigma_min: float = option(0.002, "smallest noise level", gt=0)
    sigma_max: float = option(80.0, "largest noise level", gt=0)
    time_scale: float = option(400.0, "factor of ln(sigma)/4 in the network's time input; EDM's own networks: 1", gt=0)
    negated: bool = option(False, "the network's output is subtracted (v_prediction of diffusers' EDM schedulers)")

    def __post_init__(self) -> None:
        least, most = self.sigma_min, self.sigma_max
        demand(least < most, "sigma_min and sigma_max", f"{least} and {most}", "0 < min < max")


class FdmOptions(EdmOptions):
    """Options of EDM with momentum in the network's input."""

    multiplier: float = option(2.0, "m of the momentum's time; published: 2 for CIFAR-10, else 1", gt=0)


class FlowOptions(Options):
    """Rectified flow."""

    shift: float = option(1.0, "fraction u is time shift u/(1 + (shift - 1) u), SD3's for larger images", gt=0, le=100)
    time_scale: float = option(1000.0, "factor of t in the network's time input", gt=0)


class VpOptions(Options):
    """The variance-preserving process in continuous time."""

    beta_min: float = option(0.1, "beta at t = 0", ge=0)
    beta_max: float = option(20.0, "beta at t = 1", gt=0)
    t_min: float = option(1e-5, "smallest time trained and sampled", gt=0, lt=1)
    time_scale: float = option(999.0, "factor of t in the network's time input", gt=0)

    predictions = ("epsilon", "x0", "v")


PROCESSES = Registry("process")
PROCESSES.add(
    "discrete", "kairos_timesteps.diffusion.processes:Discrete", DiscreteOptions, "DDPM: T steps of Gaussian noise"
)
PROCESSES.add(
    "edm", "kairos_timesteps.diffusion.processes:Edm", EdmOptions, "EDM: noise levels, preconditioned (estimates x0)"
)
PROCESSES.add(
    "fdm", "kairos_timesteps.diffusion.processes:Fdm", FdmOptions, "EDM whose network's input has momentum (FDM)"
)
PROCESSES.add(
    "flow", "kairos_timesteps.diffusion.processes:Flow", FlowOptions, "rectified flow: a straight path to noise"
)
PROCESSES.add("vp", "kairos_timesteps.diffusion.processes:Vp", VpOptions, "DDPM's process in continuous time")
