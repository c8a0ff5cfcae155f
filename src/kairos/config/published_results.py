"""Sections `published`, `claim` and `known`: what a recipe of a paper says beside the experiment itself.

None of them decides what is computed: the first two are numbers of others that the report puts beside ours, the third
is what `kairos plan` is told of data that are not here. Numbers of our own do not belong here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from kairos.section import Section, field
from kairos_timesteps.errors import demand


@dataclass(frozen=True)
class PublishedRow:
    """A published number: the row of its table, the method that stands for it (None: none does), steps as trained."""

    row: str
    method: str | None
    step: int
    printed: int | str
    value: float


class PublishedConfig(Section):
    """Numbers of one metric in a published table, and how they came about; null is what the paper does not say."""

    source: str = field(..., "the paper")
    table: str = field(..., "number of the table there")
    dataset: str = field(..., "data set, as lists of results name it")
    backbone: str = field(..., "network, likewise")
    schedule: str = field(..., "noise schedule, likewise")
    metric: str = field(..., "metric, likewise")
    column: str = field("fid", "the metric of ours that it is, a column of summary.csv; fid: the Fréchet distance")
    scale: float = field(1.0, "what a published number is multiplied with to be in the unit of ours", gt=0)
    steps: list[int] = field(..., "optimiser steps that the numbers of a row are of", min_length=1)
    printed: list[int | str] | None = field(None, "what the paper calls these steps, where that is something else")
    rows: dict[str, list[float | None]] = field(..., "numbers by row of the table, one for each of steps; null: none")
    methods: dict[str, str] = field({}, "methods that stand for rows of another name")
    missing: dict[str, str] = field({}, "rows that no method stands for, and why")
    best_so_far: bool = field(False, "the numbers are the lowest up to a step")
    extractor: str | None = field("inception", "network that the metric was computed with")
    samples: int | None = field(None, "images that it was computed of")
    sampling_steps: int | None = field(None, "steps that these were drawn in")
    reference: Literal["train", "all"] | None = field(None, "real images that they were compared with")
    differs: str | None = field(None, "why no number measured here compares with these, whatever the settings")

    def model_post_init(self, context: object) -> None:
        """Check that every row has one number for each step."""
        count = len(self.steps)
        for name, values in [*self.rows.items(), ("printed", self.printed or self.steps)]:
            where = "published.printed" if name == "printed" else f"published.rows.{name}"
            demand(len(values) == count, where, f"{len(values)} numbers", f"{count}, one for each of published.steps")

    def check_fits(self, methods: Collection[str]) -> None:
        """Raise ValueError unless every row has a method of the experiment, or a reason why there is none."""
        for row in self.rows:
            named = self.methods.get(row, row)
            allowed = f"one of {', '.join(methods)}, one that published.methods names, or a reason in published.missing"
            demand(named in methods or row in self.missing, "published.rows", row, allowed)

    def numbers(self) -> Iterator[PublishedRow]:
        """All published numbers, row by row, in the unit that the paper prints."""
        for row, values in self.rows.items():
            method = None if row in self.missing else self.methods.get(row, row)
            for step, printed, value in zip(self.steps, self.printed or self.steps, values):
                if value is not None:
                    yield PublishedRow(row, method, step, printed, value)


class ClaimConfig(Section):
    """Claim of a paper as a number: the factor by which a method is faster than the baseline."""

    factor: float = field(..., "the baseline's cost over the method's, for the baseline's final distance", gt=1)
    cost: Literal["steps", "time"] = field("steps", "what the factor counts")
    method: str = field(..., "the method that is claimed to be faster")
    baseline: str = field(..., "the method that it is compared with")

    def check_fits(self, methods: Collection[str]) -> None:
        """Raise ValueError unless `method` and `baseline` are methods of the experiment."""
        for name in ("method", "baseline"):
            demand(getattr(self, name) in methods, f"claim.{name}", getattr(self, name), f"one of {', '.join(methods)}")


class KnownConfig(Section):
    """Known properties of data that are not prepared here, which `kairos plan` assumes."""

    shape: list[int] | None = field(
        None, "channels, height and width of what is trained on", min_length=3, max_length=3
    )
    classes: int | None = field(None, "number of classes", ge=1)
    text: list[int] | None = field(None, "tokens and width of a text's states", min_length=2, max_length=2)
