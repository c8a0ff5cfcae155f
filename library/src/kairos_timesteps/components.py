"""Samplers, weightings and couplings by name, any with any. Their options are in `strategies.options`."""

from collections.abc import Mapping
from typing import Any

from kairos_timesteps import component_options as options
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.registry import NoOptions, Registry

SAMPLERS = Registry("sampler")
WEIGHTINGS = Registry("weighting")
COUPLINGS = Registry("coupling")


def checked(
    registry: Registry, name: str, values: Mapping[str, Any] | None, timesteps: int, schedule: str, where: str = ""
) -> Any:
    """The options of a sampler or weighting, checked against the process too.

    Raises:
        ConfigError: an option is unknown, not allowed, or does not fit T or the schedule.
    """
    where = where or f"{registry.kind} {name}"
    found = registry.parse(name, values, where)
    if hasattr(found, "check_fits"):
        try:
            found.check_fits(timesteps, schedule)
        except ValueError as error:
            raise ConfigError(f"{where}.{error}") from None
    return found


def _sampler(name: str, code: str, its_options: type, help: str) -> None:
    SAMPLERS.add(name, f"kairos_timesteps.{code}", its_options, help)


def _weighting(name: str, code: str, its_options: type, help: str) -> None:
    WEIGHTINGS.add(name, f"kairos_timesteps.{code}", its_options, help)


_sampler("uniform", "samplers.fixed:Uniform", options.Uniform, "every timestep alike (DDPM), or a range of them")
_sampler("log_normal", "samplers.fixed:LogNormal", options.LogNormal, "logit-normal, middle timesteps (SD3)")
_sampler("edm_log_normal", "samplers.log_snr:LogSnr", options.EdmLogNormal, "ln sigma ~ N(-1.2, 1.2²) (EDM)")
_sampler("mode", "samplers.fixed:Mode", options.Mode, "SD3's mode sampling")
_sampler("log_snr", "samplers.log_snr:LogSnr", options.LogSnr, "ln SNR by Laplace's law (Hang et al. 2025) or another")
_sampler(
    "cosine_interpolated",
    "samplers.log_snr:CosineInterpolated",
    options.CosineInterpolated,
    "shifted cosines of ln SNR",
)
_sampler("cosmap", "samplers.fixed:CosMap", options.Fixed, "a uniform angle on a linear flow (SD3)")
_sampler("parabola", "samplers.fixed:Parabola", options.Parabola, "an inverted parabola (OneTrainer, Chroma)")
_sampler("slope", "samplers.fixed:Slope", options.Slope, "rising or falling by a sigmoid (OneTrainer)")
_sampler("u_shape", "samplers.fixed:UShape", options.UShape, "the ends (rectified flow++)")
_sampler("beta", "samplers.fixed:Beta", options.Beta, "t/T ~ Beta(0.8, 1) (B-TTDM)")
_sampler("range", "samplers.combined:Range", options.Range, "a density cut to, or scaled into, a part of the process")
_sampler(
    "shift", "samplers.combined:Shift", options.Shift, "a density shifted by a number, or by resolution (SD3, Flux)"
)
_sampler("mixture", "samplers.combined:Mixture", options.Mixture, "several densities, each with its share")
_sampler("by_group", "samplers.combined:ByGroup", options.ByGroup, "a density for each group of the data set")
_sampler("schedule", "samplers.combined:Schedule", options.Schedule, "densities one after the other over training")
_sampler("table", "samplers.combined:Table", options.Table, "a density by numbers: cells, lines or a spline")
_sampler("listed", "samplers.combined:Listed", options.Listed, "the times of a list alone")
_sampler("clts", "samplers.fixed:Clts", options.Clts, "curriculum from uniform to a normal density at 0.3 T (CLTS)")
_sampler("speed", "samplers.speed:Speed", options.Speed, "SpeeD, eq. 6: k times more often before tau")
_sampler(
    "speed_official",
    "samplers.speed:SpeedOfficial",
    options.SpeedOfficial,
    "SpeeD's public code: half a batch reflected",
)
_sampler("speed_v1", "samplers.speed:SpeedV1", options.SpeedV1, "SpeeD's first public code: tanh threshold, reflected")
_sampler(
    "loss_second_moment", "samplers.losses:LossSecondMoment", options.LossSecondMoment, "improved DDPM's, reweighted"
)
_sampler(
    "loss_rms", "samplers.losses:LossRms", options.LossRms, "ours: loss_second_moment smoothed over t, with a floor"
)
_sampler(
    "loss_mean",
    "samplers.losses:LossMean",
    options.LossMean,
    "after VDM++: the mean weighted loss, in ln SNR or any time",
)
_sampler("info_rate", "samplers.losses:InfoRate", options.InfoRate, "after InfoNoise: the error of epsilon per ln SNR")
_sampler(
    "gradient_norm", "samplers.gradients:GradientNorm", options.GradientNorm, "ours: least noise of uniform's gradient"
)
_sampler(
    "auto", "samplers.gradients:Auto", options.Auto, "ours: least noise of the objective's gradient, nothing to choose"
)
_sampler(
    "gradient_variance", "samplers.gradients:GradientVariance", options.GradientVariance, "Kim et al. 2025, table 4"
)
_sampler(
    "first_order", "samplers.gradients:FirstOrder", options.FirstOrder, "ours: what a step at t takes off the target"
)
_sampler(
    "adaptive", "samplers.adaptive:Adaptive", options.Adaptive, "a learned Beta policy per image (Kim et al. 2025)"
)
_sampler(
    "adaptive_official",
    "samplers.adaptive_official:AdaptiveOfficial",
    options.AdaptiveOfficial,
    "its public code's choices",
)
SAMPLERS.refuse(
    "bs", "Wang et al. 2025 (SpeeD, table 11) publish its numbers but not its density, so it cannot be rebuilt"
)

_weighting("none", "weightings.fixed:Unweighted", NoOptions, "every timestep alike")
_weighting("vlb", "weightings.fixed:Vlb", NoOptions, "the variational bound's own c_t")
_weighting("p2", "weightings.fixed:P2", options.P2, "perception prioritised (Choi et al. 2022)")
_weighting("min_snr", "weightings.fixed:MinSnr", options.MinSnr, "Min-SNR-gamma (Hang et al. 2023)")
_weighting(
    "soft_min_snr", "weightings.fixed:SoftMinSnr", options.MinSnr, "Min-SNR without the kink (Crowson et al. 2024)"
)
_weighting("debiased", "weightings.fixed:Debiased", options.Debiased, "debiased estimation (Yu et al. 2023)")
_weighting("edm", "weightings.fixed:Edm", options.Edm, "EDM's, on the error of x0 (Karras et al. 2022)")
_weighting("sigmoid", "weightings.fixed:Sigmoid", options.Sigmoid, "of ln SNR, in its measure (VDM++, SiD2)")
_weighting(
    "auto",
    "weightings.fixed:Auto",
    NoOptions,
    "ours: the error of epsilon over ln SNR, less where little noise is left",
)
_weighting(
    "coarse_to_fine",
    "weightings.coarse_to_fine:CoarseToFine",
    NoOptions,
    "ours: auto, less where little can be predicted yet",
)
_weighting("snr", "weightings.fixed:Snr", options.Snr, "a power of the SNR, with bounds")
_weighting("linear", "weightings.fixed:Linear", options.Linear, "1 + 3 sigma (NeMo)")
_weighting("power", "weightings.fixed:Power", options.Power, "sigma^-2 (sigma_sqrt of diffusers)")
_weighting("cosmap_weight", "weightings.fixed:CosMap", NoOptions, "the density of a uniform angle as a weight (SD3)")
_weighting("bell", "weightings.fixed:Bell", options.Bell, "the middle (DiffSynth)")
_weighting("v_like_loss", "weightings.fixed:VLikeLoss", options.VLikeLoss, "v_pred_like_loss (kohya)")
_weighting(
    "table_weight", "weightings.fixed:Table", options.TableWeights, "weights by numbers: cells, lines or a spline"
)
_weighting("robust", "weightings.fixed:Robust", options.Robust, "1/(loss + c)^p (MeanFlow)")
_weighting(
    "edm2", "weightings.uncertainty:Uncertainty", options.Uncertainty, "EDM2's learned uncertainty (Karras et al. 2024)"
)
_weighting("change_aware", "samplers.speed:ChangeAware", options.ChangeAware, "SpeeD, section 2.4")
_weighting(
    "change_aware_official",
    "samplers.speed:ChangeAwareOfficial",
    options.ChangeAwareOfficial,
    "the same, 1 from tau on",
)

_CODE = "kairos_timesteps.couplings"
COUPLINGS.add("independent", f"{_CODE}:Coupling", help="every image its own noise")
COUPLINGS.add(
    "assignment", f"{_CODE}:Assignment", help="in the batch, least distance (immiscible, OT-CFM)", by_rank=True
)
COUPLINGS.add("nearest", f"{_CODE}:Nearest", options.Nearest, "of k noises the nearest (improved immiscible)")
COUPLINGS.add("antithetic", f"{_CODE}:Antithetic", help="neighbours in time have opposite noise", by_rank=True)
