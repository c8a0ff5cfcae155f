"""Numbers and lists as people read them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from kairos_timesteps.options import but_name

if TYPE_CHECKING:
    from kairos.report.ranking import Ratio

NONE = "–"


def template(file: Path, **filters: Any) -> jinja2.Template:
    """A template: what it puts into HTML is escaped, elsewhere what is not there is an error."""
    html = file.name.endswith(".html.jinja")
    rules: Any = {"autoescape": html, "undefined": jinja2.Undefined if html else jinja2.StrictUndefined}
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, **rules)
    environment.filters |= filters
    return environment.from_string(file.read_text(encoding="utf-8"))


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, thousands separated; a dash for none."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


def plus_minus(value: float | None, spread: float | None, digits: int = 4) -> str:
    """``21.3 ± 0.9``: two digits of the spread, and as many decimals of the value."""
    if value is None or not math.isfinite(value):
        return NONE
    if spread is None or not 1e-9 * abs(value) < spread < math.inf:  # or none but rounding
        return number(value, digits)
    decimals = min(max(0, 1 - math.floor(math.log10(spread))), 8)
    return f"{value:,.{decimals}f} ± {spread:.{decimals}f}"


def times(factor: "Ratio | None") -> tuple[str, str]:
    """A factor against uniform and its interval, or in how many seeds there is none."""
    if factor is None:
        return NONE, ""
    if factor.missed:
        return "not reached", f"in {factor.missed} of {factor.seeds} seeds" if factor.seeds > 1 else ""
    return f"{factor.value:.2f}×", f"{factor.low:.2f}–{factor.high:.2f}" if factor.low < factor.high else ""


def change(ratio: "Ratio | None") -> tuple[str, str]:
    """A ratio as a difference in per cent, and its interval."""
    if ratio is None or not math.isfinite(ratio.value):
        return NONE, ""
    value, low, high = (f"{100 * (part - 1):+,.1f}".replace("-", "−") for part in (ratio.value, ratio.low, ratio.high))
    return f"{value} %", f"{low} to {high} %" if ratio.low < ratio.high else ""


def probability(ratio: "Ratio | None") -> str:
    """The corrected p of a ratio's being 1."""
    return NONE if ratio is None or math.isnan(ratio.p) else "< 0.001" if ratio.p < 0.001 else f"{ratio.p:.3f}"


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def plural(count: int, unit: str, units: str | None = None) -> str:
    """``1 seed``, ``1,600 steps``."""
    return f"{count:,} {unit if count == 1 else units or unit + 's'}"


def sample_sets(evaluation: Any) -> str:
    """Return the number of samples of section `evaluation`, such as ``3 sets of 10,000 images``."""
    return f"{plural(evaluation.sets, 'set')} of {plural(evaluation.num_samples, 'image')}"


def seconds(value: float | None) -> str:
    """A span of time: 0.4 s, 75 s, 12.5 min, 3.2 h."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit, size in (("h", 3600), ("min", 60)):
        if value >= 3 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def component(named: dict[str, object]) -> str:
    """A sampler or weighting with its options in one line."""
    options = [f"{key} {value}" for key, value in but_name(named).items() if value not in (None, [])]
    return str(named["name"]) + (f" ({', '.join(options)})" if options else "")


def words(value: object) -> str:
    """Anything of a record: a list as ``a, b and c``."""
    return listed([str(item) for item in value]) if isinstance(value, list) and value else str(value)


def milliseconds(value: float) -> str:
    """Seconds as ``50 ms``."""
    return f"{value * 1000:.0f} ms" if math.isfinite(value) else NONE
