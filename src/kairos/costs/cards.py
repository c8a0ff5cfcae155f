"""Peak speeds of cards by precision, and the hours that an experiment takes on one.

10^12 floating-point operations per second without sparsity, from NVIDIA's data sheets: of the SXM forms for H200, H100
and A100. fp32 and fp64 of the other precisions do not use tensor cores.
"""

from kairos_timesteps.errors import demand

PEAKS = {
    "H100": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp64": 67.0},
    "H200": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp64": 67.0},
    "A100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp64": 19.5},
}


def peak_of(card: str, precision: str, option: str = "--card") -> float:
    """Return the peak speed of a card at a precision, 10^12 floating-point operations per second.

    Args:
        card: key of `PEAKS`; upper and lower case are equivalent.
        precision: ``fp32``, ``tf32``, ``bf16``, or ``fp64``.
        option: name of the option for messages.

    Raises:
        ConfigError: the card, or its speed at the precision, is unknown.
    """
    demand(card.upper() in PEAKS, option, card, f"{', '.join(PEAKS)}; or --tflops with the peak of another card")
    peaks = PEAKS[card.upper()]
    allowed = f"{', '.join(peaks)} on {card.upper()}; or --tflops"
    demand(precision in peaks, "training.precision", precision, allowed)
    return peaks[precision]
