"""Format numbers, durations, lists and settings for people, and load the templates that use these formats.

jinja2 and pandas have no format for a value with its standard deviation.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from kairos_timesteps.options import options_without_name

if TYPE_CHECKING:
    from kairos.report.ranking import Ratio

DASH = "–"
_MOST_NAMES = 12  # names that a sentence lists without leaving any out


def load_template(file: Path, **filters: Any) -> jinja2.Template:
    """Load a jinja2 template from a file, with additional `filters` by name.

    In ``.html.jinja`` templates, values are escaped and an undefined variable is an empty text. In all other templates
    nothing is escaped, and an undefined variable is an error when the template is rendered. Templates cannot include or
    extend others. A line with only a block tag leaves no text.
    """
    is_html = file.name.endswith(".html.jinja")
    undefined = jinja2.Undefined if is_html else jinja2.StrictUndefined
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=is_html, undefined=undefined)
    environment.filters |= filters
    return environment.from_string(file.read_text(encoding="utf-8"))


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, or as a whole number with separated thousands.

    Whole numbers, and numbers with at least `digits` digits before the point, have no decimals: 12,345.6 becomes
    ``12,346``. Numbers below 0.0001 have an exponent, such as ``1.20e-05``. None, NaN and infinity become a dash.
    """
    if value is None or not math.isfinite(value):
        return DASH
    has_digits_before_point = abs(value) >= 10 ** (digits - 1)  # at least `digits` of them
    if has_digits_before_point or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#,.{digits}g}".removesuffix(".")  # "#" keeps zeros, as in 0.500, and a point, as in 100. for 99.96


def format_plus_minus(value: float | None, std: float | None, digits: int = 4) -> str:
    """Format a value with its standard deviation, such as ``21.3 ± 0.9``.

    The standard deviation has two significant digits and at most eight decimals, and sets the decimals of the value. A
    standard deviation that is unknown, 0 or no more than a rounding error is left out; the value then has `digits`
    significant digits. A missing value is a dash.
    """
    if value is None or not math.isfinite(value):
        return DASH
    rounding_error = 1e-9 * abs(value)
    if std is None or not rounding_error < std < math.inf:  # "not" includes NaN
        return format_number(value, digits)
    order_of_magnitude = math.floor(math.log10(std))  # 0 for 1 to 9.9, -1 for 0.1 to 0.99
    # two significant digits: 0.12, of order -1, has 2 decimals, and 1.2, of order 0, has 1
    decimals = min(max(0, 1 - order_of_magnitude), 8)
    return f"{value:,.{decimals}f} ± {std:.{decimals}f}"


def format_factor(factor: "Ratio | None") -> tuple[str, str]:
    """Format a cost factor and its interval over seeds, such as ``1.52×`` and ``1.31–1.77``.

    If two of five seeds do not reach the baseline's final value, the texts are ``not reached`` and ``in 2 of 5 seeds``.
    The second text is empty with one seed. Without a factor, the texts are a dash and an empty text.
    """
    if factor is None:
        return DASH, ""
    if factor.missed_seed_count:
        if factor.seed_count <= 1:
            return "not reached", ""
        return "not reached", f"in {factor.missed_seed_count} of {factor.seed_count} seeds"
    # both ends are NaN with one seed
    interval = f"{factor.low:.2f}–{factor.high:.2f}" if factor.low < factor.high else ""
    return f"{factor.value:.2f}×", interval


def format_change(ratio: "Ratio | None") -> tuple[str, str]:
    """Format a ratio as a difference in per cent, and the interval of that difference.

    The texts are, for example, ``−12.5 %`` and ``−15.1 to −9.8 %``, always with a sign; the second one is empty with
    one seed. Without a known ratio, the texts are a dash and an empty text.
    """
    if ratio is None or not math.isfinite(ratio.value):
        return DASH, ""
    interval = ""
    if ratio.low < ratio.high:  # False with one seed: both are NaN
        interval = f"{_format_percentage(ratio.low)} to {_format_percentage(ratio.high)} %"
    return f"{_format_percentage(ratio.value)} %", interval


def _format_percentage(ratio: float) -> str:
    """Format the difference of a ratio from 1 in per cent, with a sign and without the unit."""
    return f"{100 * (ratio - 1):+,.1f}".replace("-", "−")  # a minus sign instead of the hyphen


def format_p_value(ratio: "Ratio | None") -> str:
    """Format the corrected p-value of the hypothesis that a ratio is 1, such as ``0.012`` or ``< 0.001``.

    The text is a dash without a ratio, and if nothing is tested.
    """
    if ratio is None or math.isnan(ratio.p_value):
        return DASH
    return "< 0.001" if ratio.p_value < 0.001 else f"{ratio.p_value:.3f}"


def join_names(names: Sequence[str]) -> str:
    """Join at least one name to a list in a sentence, such as ``a, b and c``."""
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]


def join_first_names(names: Sequence[str]) -> str:
    """Join names by `join_names`; of more than 12 names, the first five are followed by ``and N more``."""
    if len(names) <= _MOST_NAMES:
        return join_names(names)
    return f"{', '.join(names[:5])} and {len(names) - 5} more"


def format_count(count: int, unit: str, units: str | None = None) -> str:
    """Format a count with its unit, such as ``1 seed`` or ``1,600 steps``; `units` is an irregular plural."""
    if count == 1:
        return f"1 {unit}"
    return f"{count:,} {units or unit + 's'}"


def describe_sample_sets(evaluation: Any) -> str:
    """Describe the samples that section `evaluation` requests, such as ``3 sets of 10,000 images``."""
    return f"{format_count(evaluation.sets, 'set')} of {format_count(evaluation.num_samples, 'image')}"


def format_duration(seconds: float | None) -> str:
    """Format a duration, such as ``0.4 s``, ``75 s``, ``12.5 min`` or ``3.2 h``; a dash if it is unknown.

    Minutes begin at 3 min, and hours at 3 h. Seconds below 10 have a decimal.
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    for unit, unit_seconds in (("h", 3600), ("min", 60)):
        if seconds >= 3 * unit_seconds:
            return f"{seconds / unit_seconds:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_machine(machine: dict[str, Any]) -> str:
    """Format the kind of machine in an entry of timing.jsonl, such as ``AMD EPYC, 2 CPUs, 1 thread``.

    The name of the host is left out. More than one process is stated.
    """
    parts = [machine["gpu"]] if machine["gpu"] else []
    parts += [machine["cpu"], format_count(machine["cpus"], "CPU"), format_count(machine["threads"], "thread")]
    if machine["processes"] > 1:
        parts.append(format_count(machine["processes"], "process", "processes"))
    return ", ".join(parts)


def format_milliseconds(seconds: float) -> str:
    """Format a duration in seconds as whole milliseconds, such as ``50 ms``; a dash if it is not finite."""
    return f"{seconds * 1000:.0f} ms" if math.isfinite(seconds) else DASH


def describe_component(settings: dict[str, object]) -> str:
    """Describe a component, such as a sampler or a weighting, in one line: its name, and its options in brackets.

    Options with the value None or an empty list are left out, and so are the brackets if no option remains.
    """
    options = [f"{key} {value}" for key, value in options_without_name(settings).items() if value not in (None, [])]
    name = str(settings["name"])
    return f"{name} ({', '.join(options)})" if options else name


def format_record_value(value: object) -> str:
    """Format any value of a record; a list becomes ``a, b and c``, an empty list ``[]``, and None ``None``."""
    if isinstance(value, list) and value:
        return join_names([str(item) for item in value])
    return str(value)
