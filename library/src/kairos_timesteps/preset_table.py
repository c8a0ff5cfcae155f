"""Table of presets, as data: timesteps and weights of other trainers in the terms of kairos.

A preset is one row of `TABLE`. Its sampler and its weighting are specifications: components of kairos with their
options, written as calls. Arguments are numbers, texts, lists, other components, options of the trainer by name, and
arithmetic of these.
"""

from typing import Any, NamedTuple


class Convention(NamedTuple):
    """Convention of a trainer: its unit of time, and the meaning of its signs.

    Attributes:
        time: unit of the times of a preset: ``t`` of a linear flow, ``sigma``, or ``step``, a timestep over 1000.
        prediction: prediction for which the weighting is built.
        meaning: direction of the trainer's time, and the sign of its options or the error that it weights.
    """

    time: str
    prediction: str
    meaning: str


STEP = "timestep/1000 of Stable Diffusion, 0.999 is noise"
CONVENTIONS = {
    "flow": Convention("t", "flow", "t = sigma of a linear flow, 1 is noise; a larger mean or shift gives more noise"),
    "reversed": Convention(
        "t", "flow", "u = 1 - t, an index into times that fall; a larger mean of u gives less noise"
    ),
    "log_snr": Convention("t", "flow", "t = sigmoid(-ln SNR/2), 1 is noise; a larger mean of ln SNR gives less noise"),
    "sigma": Convention("sigma", "x0", "sigma, infinity is noise; a larger mean of ln sigma gives more noise"),
    "epsilon": Convention("step", "epsilon", f"{STEP}; weights for epsilon"),
    "v": Convention("step", "v", f"{STEP}; weights for v"),
}

# Bounds of the trainers' options by name; options that are not here are above 0. Components check further bounds.
BOUNDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "loc": {},
    "bias": {},
    "weight": {},
    "values": {},
    "mode_scale": {"ge": -1, "le": 1.7519},
    "ratio": {"ge": 0, "le": 1},
    "boundary": {"gt": 0, "lt": 1},
}


class Row(NamedTuple):
    """Preset of the table.

    Attributes:
        name: ``trainer:option``, with the trainer's word for its option.
        help: formula or description, in one line.
        source: repository and file, or paper, that states the formula.
        options: options of the trainer with their defaults.
        sampler: specification of the sampler, on a linear flow.
        weighting: specification of the weighting.
        convention: name in `CONVENTIONS`.
    """

    name: str
    help: str
    source: str
    options: dict[str, Any]
    sampler: str
    weighting: str = "none()"
    convention: str = "flow"

    @property
    def trainer(self) -> str:
        """Name of the trainer or of the paper, the first part of the preset's name."""
        return self.name.partition(":")[0]


DIFFUSERS = "huggingface/diffusers: src/diffusers/training_utils.py"
IDEOGRAM = "huggingface/diffusers: examples/dreambooth/train_dreambooth_lora_ideogram4.py"
KOHYA_FLOW = "kohya-ss/sd-scripts: library/flux_train_utils.py"
KOHYA_LOSS = "kohya-ss/sd-scripts: library/custom_train_functions.py"
MUSUBI = "kohya-ss/musubi-tuner: src/musubi_tuner/training/trainer_base.py"
SIMPLETUNER = "bghira/SimpleTuner: simpletuner/helpers/models/common.py"
ONETRAINER = "Nerogar/OneTrainer: modules/modelSetup/mixin/ModelSetupNoiseMixin.py"
ONETRAINER_LOSS = "Nerogar/OneTrainer: modules/modelSetup/mixin/ModelSetupDiffusionLossMixin.py"
AI_TOOLKIT = "ostris/ai-toolkit: jobs/process/BaseSDTrainProcess.py"
AI_TOOLKIT_SNR = "ostris/ai-toolkit: toolkit/train_tools.py"
AI_TOOLKIT_FLOW = "ostris/ai-toolkit: toolkit/samplers/custom_flowmatch_sampler.py"
DIFFSYNTH = "modelscope/DiffSynth-Studio: diffsynth/diffusion/flow_match.py"
NEMO = "NVIDIA-NeMo/Automodel: nemo_automodel/components/flow_matching/pipeline.py"
NEMO_SHIFT = "NVIDIA-NeMo/Automodel: nemo_automodel/components/flow_matching/time_shift_utils.py"
CHROMA = "lodestone-rock/flow: src/trainer/train_chroma.py"
WAN = "Wan-Video/Wan2.2: wan/configs/wan_t2v_A14B.py"
SANA = "NVlabs/Sana: diffusion/model/respace.py"
OPEN_SORA = "hpcaitech/Open-Sora: scripts/diffusion/train.py"
EDM = "NVlabs/edm: training/loss.py"
EDM2 = "NVlabs/edm2: train_edm2.py"
K_DIFFUSION = "crowsonkb/k-diffusion: k_diffusion/utils.py"
SD3 = "Esser et al. 2024, arXiv:2403.03206"
RAE = "Zheng et al. 2025, arXiv:2510.11690"
MEANFLOW = "Geng et al. 2025, arXiv:2505.13447"
RFPP = "Lee et al. 2024, arXiv:2405.20320"
LAPLACE = "Hang et al. 2025, arXiv:2407.03297"

# fmt: off
TABLE = (
    Row("diffusers:logit_normal", "sigmoid(N(-mean, std²))", DIFFUSERS, {"mean": 0.0, "std": 1.0},
        "log_normal(m=-mean, s=std)", convention="reversed"),
    Row("diffusers:mode", "SD3's mode sampling", DIFFUSERS, {"mode_scale": 1.29},
        "mode(m=mode_scale)", convention="reversed"),
    Row("diffusers:cosmap", "weight 2/(pi (1 - 2t + 2t²))", DIFFUSERS, {},
        "uniform()", "cosmap_weight()"),
    Row("diffusers:sigma_sqrt", "weight t^-2", DIFFUSERS, {},
        "uniform()", "power(power=-2)"),
    Row("diffusers:ideogram4", "sigmoid(N(mean, std²))", IDEOGRAM, {"mean": 0.0, "std": 1.5},
        "log_normal(m=mean, s=std)"),

    Row("kohya:sigmoid", "sigmoid(sigmoid_scale N(0, 1))", KOHYA_FLOW, {"sigmoid_scale": 1.0},
        "log_normal(s=sigmoid_scale)"),
    Row("kohya:shift", "sigmoid, shifted", KOHYA_FLOW, {"shift": 3.0, "sigmoid_scale": 1.0},
        "shift(alpha=shift, density=log_normal(s=sigmoid_scale))"),
    Row("kohya:min_snr", "weight min(SNR, gamma)/SNR", KOHYA_LOSS, {"gamma": 5.0},
        "uniform()", "min_snr(gamma=gamma)", "epsilon"),
    Row("kohya:debiased", "weight 1/sqrt(min(SNR, 1000))", KOHYA_LOSS, {},
        "uniform()", "debiased(largest_snr=1000)", "epsilon"),
    Row("kohya:debiased_v", "weight 1/(min(SNR, 1000) + 1)", KOHYA_LOSS, {},
        "uniform()", "debiased(largest_snr=1000)", "v"),
    Row("kohya:scale_v_pred_loss", "weight SNR/(SNR + 1), SNR at most 1000", KOHYA_LOSS, {},
        "uniform()", "snr(largest_snr=1000)", "v"),
    Row("kohya:v_pred_like_loss", "weight 1 + c (SNR + 1)/SNR, SNR at most 1000", KOHYA_LOSS, {"c": 0.1},
        "uniform()", "v_like_loss(c=c, largest_snr=1000)", "epsilon"),

    Row("musubi:flux_shift", "sigmoid, shifted by tokens", MUSUBI, {"sigmoid_scale": 1.0},
        "shift(law='exponential', first=256, last=4096, low=0.5, high=1.15, density=log_normal(s=sigmoid_scale))"),
    Row("musubi:flux2_shift", "flux_shift with the h w tokens of the latent", MUSUBI, {"sigmoid_scale": 1.0},
        "shift(law='exponential', first=256, last=4096, low=0.5, high=1.15, density=log_normal(s=sigmoid_scale))"),
    Row("musubi:qwen_shift", "sigmoid, shifted by tokens", MUSUBI, {"sigmoid_scale": 1.0},
        "shift(law='exponential', first=256, last=8192, low=0.5, high=0.9, density=log_normal(s=sigmoid_scale))"),
    Row("musubi:krea2_shift", "sigmoid, shifted by tokens", MUSUBI, {"sigmoid_scale": 1.0},
        "shift(law='exponential', first=256, last=6400, low=0.5, high=1.15, density=log_normal(s=sigmoid_scale))"),
    Row("musubi:ideogram4_shift", "sigmoid(N(ln sqrt(tokens/1024), 1.5²))", MUSUBI, {},
        "shift(law='root', alpha=1, last=1024, low=0, density=log_normal(s=1.5))"),
    Row("musubi:logsnr", "ln SNR ~ N(mean, std²)", MUSUBI, {"mean": 0.0, "std": 1.0},
        "log_normal(m=-mean / 2, s=std / 2)", convention="log_snr"),
    Row("musubi:qinglong_flux", "79 % flux_shift, 11 % logsnr, 10 % logsnr of 5.36, 1", MUSUBI,
        {"mean": 0.0, "std": 1.0},
        "mixture(parts=["
        "shift(law='exponential', first=256, last=4096, low=0.5, high=1.15, density=log_normal(), share=79), "
        "log_normal(m=-mean / 2, s=std / 2, share=11), "
        "log_normal(m=-5.36 / 2, s=1 / 2, share=10)])", convention="log_snr"),
    Row("musubi:qinglong_qwen", "95 % qwen_shift, 5 % logsnr of 5.36, 1", MUSUBI, {},
        "mixture(parts=["
        "shift(law='exponential', first=256, last=8192, low=0.5, high=0.9, density=log_normal(), share=95), "
        "log_normal(m=-5.36 / 2, s=1 / 2, share=5)])", convention="log_snr"),

    Row("simpletuner:beta", "Beta(alpha, beta), shifted", SIMPLETUNER, {"alpha": 2.0, "beta": 2.0, "shift": 3.0},
        "shift(alpha=shift, density=beta(a=alpha, b=beta))"),
    Row("simpletuner:mixflow", "1 - sqrt(U), shifted", SIMPLETUNER, {"shift": 3.0},
        "shift(alpha=shift, density=beta(a=1, b=2))"),
    Row("simpletuner:fast_schedule", "t = 1 in 7 of 10 draws, else 0.75, 0.5 or 0.25", SIMPLETUNER, {},
        "listed(times=[1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])"),
    Row("simpletuner:cubic", "monotone cubic through knots, shifted", SIMPLETUNER, {"values": [1.0, 1.0], "shift": 3.0},
        "shift(alpha=shift, density=table(values=values, between='spline'))"),

    Row("onetrainer:cos_map", "p = 2/(pi (1 - 2t + 2t²)), shifted", ONETRAINER, {"timestep_shift": 1.0},
        "shift(alpha=timestep_shift, density=cosmap())"),
    Row("onetrainer:inverted_parabola", "p ~ 2 - weight (t - 1/2 - bias)²", ONETRAINER, {"weight": 0.0, "bias": 0.0},
        "parabola(weight=weight, bias=bias)"),
    Row("onetrainer:sigmoid", "p ~ sigmoid(weight (t - 1/2 - bias))", ONETRAINER, {"weight": 0.0, "bias": 0.0},
        "slope(weight=weight, bias=bias)"),
    Row("onetrainer:heavy_tail", "SD3's mode sampling", ONETRAINER, {"mode_scale": 0.0},
        "mode(m=mode_scale)"),
    Row("onetrainer:sigma", "weight t", ONETRAINER_LOSS, {},
        "uniform()", "linear(offset=0, slope=1)"),
    Row("onetrainer:debiased_v", "weight 1/sqrt(min(SNR, 1000) + 1)", ONETRAINER_LOSS, {},
        "uniform()", "p2(gamma=0.5, convert=False, largest_snr=1000)", "v"),
    Row("onetrainer:p2_v", "weight (2 + SNR)^-gamma", ONETRAINER_LOSS, {"gamma": 1.0},
        "uniform()", "p2(k=2, gamma=gamma, convert=False)", "v"),

    Row("ai_toolkit:content", "rank 1 - U³ among logit-normal times", AI_TOOLKIT, {},
        "warp(density=beta(a=1, b=1 / 3))", convention="reversed"),
    Row("ai_toolkit:style", "rank U³ among logit-normal times", AI_TOOLKIT, {},
        "warp(density=beta(a=1 / 3, b=1))", convention="reversed"),
    Row("ai_toolkit:snr_gamma", "weight gamma/SNR", AI_TOOLKIT_SNR, {"gamma": 5.0},
        "uniform()", "snr(power=-1, scale=gamma)", "epsilon"),
    Row("ai_toolkit:half_bell", "weight of a bell, flat below 1/2", AI_TOOLKIT_FLOW, {},
        "uniform()", "bell(flat=True)"),

    Row("diffsynth:bell", "weight exp(-2 (t - 1/2)²) - exp(-1/2), mean 1", DIFFSYNTH, {},
        "uniform()", "bell()"),

    Row("nemo:linear", "weight 1 + 3t", NEMO, {},
        "uniform()", "linear(offset=1, slope=3)"),
    Row("nemo:time_shift_linear", "logit-normal, shifted by tokens", NEMO_SHIFT, {},
        "shift(law='exponential', first=1024, last=4096, low=0.6625, high=1.15, density=log_normal())"),
    Row("nemo:time_shift_sqrt", "logit-normal, shifted by the root of tokens", NEMO_SHIFT, {},
        "shift(law='root', alpha=3, last=16384, low=1, density=log_normal())"),
    Row("nemo:mix", "a share of batches uniform, the others logit-normal; shifted", NEMO, {"ratio": 0.1, "shift": 3.0},
        "mixture(per='batch', parts=["
        "shift(alpha=shift, density=log_normal(), share=1 - ratio), "
        "shift(alpha=shift, density=uniform(), share=ratio)])"),

    Row("chroma:parabola", "p ~ 2 - 7.7 (t - 1/2)²", CHROMA, {},
        "parabola(weight=7.7, bias=0)"),
    Row("wan:high_noise", "uniform, shifted, from boundary to 1", WAN, {"boundary": 0.875, "shift": 5.0},
        "range(low=boundary, high=1, density=shift(alpha=shift, density=uniform()))"),
    Row("wan:low_noise", "uniform, shifted, from 0 to boundary", WAN, {"boundary": 0.875, "shift": 5.0},
        "range(low=0, high=boundary, density=shift(alpha=shift, density=uniform()))"),
    Row("sana:stretched", "logit-normal between quantiles, stretched", SANA, {"p_low": 0.005, "p_high": 0.999},
        "log_normal(low=p_low, high=p_high)"),
    Row("sana_sprint:log_normal", "ln sigma ~ N(mean, std²)", SANA, {"mean": 0.2, "std": 1.6},
        "edm_log_normal(mean=mean, std=std)", convention="sigma"),
    Row("open_sora:shift", "logit-normal, shifted by tokens and frames", OPEN_SORA, {},
        "shift(law='linear', first=256, last=4096, low=1, high=3, density=log_normal())"),
    Row("sd3:shift", "logit-normal, shifted by sqrt(tokens/base)", SD3, {"base": 256.0},
        "shift(law='root', alpha=1, last=base, low=0, density=log_normal())"),
    Row("rae:shift", "uniform, shifted by sqrt(dim/4096)", RAE, {"dim": 196608.0},
        "shift(alpha=(dim / 4096) ** 0.5, density=uniform())"),
    Row("meanflow:logit_normal", "sigmoid(N(mean, std²))", MEANFLOW, {"mean": -0.4, "std": 1.0},
        "log_normal(m=mean, s=std)"),
    Row("rfpp:u_shape", "p ~ e^(a t) + e^(a (1 - t))", RFPP, {"a": 4.0},
        "u_shape(a=a)"),

    Row("edm:log_normal", "ln sigma ~ N(mean, std²)", EDM, {"mean": -1.2, "std": 1.2, "sigma_data": 0.5},
        "edm_log_normal(mean=mean, std=std)", "edm(sigma_data=sigma_data)", "sigma"),
    Row("edm2:img512", "ln sigma ~ N(-0.4, 1)", EDM2, {"sigma_data": 0.5},
        "edm_log_normal(mean=-0.4, std=1)", "edm(sigma_data=sigma_data)", "sigma"),
    Row("edm2:img64", "ln sigma ~ N(-0.8, 1.6²)", EDM2, {"sigma_data": 0.5},
        "edm_log_normal(mean=-0.8, std=1.6)", "edm(sigma_data=sigma_data)", "sigma"),
    Row("laplace:log_snr", "ln SNR ~ Laplace(mean, scale)", LAPLACE, {"mean": 0.0, "scale": 0.5},
        "log_snr(distribution='laplace', location=mean, scale=scale)", convention="log_snr"),
    Row("cauchy:log_snr", "ln SNR ~ Cauchy(mean, scale)", LAPLACE, {"mean": 0.0, "scale": 1.0},
        "log_snr(distribution='cauchy', location=mean, scale=scale)", convention="log_snr"),

    Row("k_diffusion:loglogistic", "ln sigma ~ Logistic(loc, scale)", K_DIFFUSION, {"loc": 0.0, "scale": 0.5},
        "log_snr(distribution='logistic', location=-2 * loc, scale=2 * scale)", convention="sigma"),
    Row("k_diffusion:v_diffusion", "sigma = tan(pi u/2), 1e-3 to 1e3", K_DIFFUSION, {},
        "cosine_interpolated(image=64, low=64, high=64)", convention="sigma"),
    Row("k_diffusion:split_lognormal", "ln sigma normal, with a scale below and one above loc", K_DIFFUSION,
        {"loc": -1.2, "scale_1": 1.2, "scale_2": 1.2},
        "log_snr(distribution='normal', location=-2 * loc, scale=2 * scale_2, scale_above=2 * scale_1)",
        convention="sigma"),
    Row("k_diffusion:cosine", "cosine schedules of two resolutions, interpolated", K_DIFFUSION, {"side": 64.0},
        "cosine_interpolated(image=side, low=32, high=side)", convention="sigma"),
)
# fmt: on
