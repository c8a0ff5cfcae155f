"""Sections `published`, `claim` and `known` of a recipe, which have no influence on what an experiment computes.

The report compares the numbers in `published` and `claim`, which are from a paper, with the results of kairos. `kairos
plan` assumes the properties in `known` for data that are not on this machine.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from kairos.section import Section, field
from kairos_timesteps.errors import demand


@dataclass(frozen=True)
class PublishedNumber:
    """A number of a published table.

    Attributes:
        row: name of the row in the paper.
        method: method of the experiment that reproduces the row; None: there is none.
        step: training step that the number belongs to.
        printed: the training length as the paper prints it.
        value: the number.
    """

    row: str
    method: str | None
    step: int
    printed: int | str
    value: float


class PublishedConfig(Section):
    """Numbers of one metric in a published table, and how they were measured; null if the paper does not report it."""

    source: str = field(..., "the paper")
    table: str = field(..., "number of the table in the paper")
    dataset: str = field(..., "data set, by its name in lists of published results")
    backbone: str = field(..., "network, by its name in lists of published results")
    schedule: str = field(..., "noise schedule, by its name in lists of published results")
    metric: str = field(..., "metric, by its name in lists of published results")
    column: str = field("fid", "column of summary.csv with the same metric; fid: the Fréchet distance")
    scale: float = field(1.0, "factor that converts a published number to the unit of the column", gt=0)
    steps: list[int] = field(..., "optimizer steps of the numbers in a row", min_length=1)
    printed: list[int | str] | None = field(None, "the steps as the paper prints them, if different")
    rows: dict[str, list[float | None]] = field(..., "numbers by row of the table, one per step; null: no number")
    methods: dict[str, str] = field({}, "methods that reproduce rows with another name")
    missing: dict[str, str] = field({}, "rows that no method reproduces, with the reason")
    best_so_far: bool = field(False, "each number is the lowest of all steps up to its step")
    extractor: str | None = field("inception", "network that computes the features of the metric")
    samples: int | None = field(None, "number of generated images")
    sampling_steps: int | None = field(None, "solver steps per generated image")
    guidance: float | None = field(
        None,
        "scale of classifier-free guidance, 1: none; null: not stated, not comparable if the network has conditions",
    )
    reference: Literal["train", "all", "heldout"] | None = field(
        None, "real images of the metric: train, all or heldout"
    )
    differs: str | None = field(None, "reason why no result of kairos is comparable, whatever the settings")

    def model_post_init(self, context: object) -> None:
        """Check that every row, and `printed` if it is not empty, has one entry for each step; null is an entry.

        Raises:
            ValueRejected: a row or `printed` has another length than `steps`.
        """
        count = len(self.steps)
        length_by_field = {f"published.rows.{name}": len(values) for name, values in self.rows.items()}
        if self.printed:
            length_by_field["published.printed"] = len(self.printed)
        for where, length in length_by_field.items():
            demand(length == count, where, f"{length} numbers", f"{count}, one for each of published.steps")

    def check_methods(self, methods: Collection[str]) -> None:
        """Check that every row has a method, or a reason in `missing` why there is none.

        The method of a row has the name in `self.methods`, or by default the name of the row.

        Args:
            methods: names of the experiment's methods.

        Raises:
            ConfigError: a row has neither.
        """
        for row in self.rows:
            method = self.methods.get(row, row)
            allowed = f"one of {', '.join(methods)}, a row in published.methods, or a reason in published.missing"
            demand(method in methods or row in self.missing, "published.rows", row, allowed)

    def numbers(self) -> Iterator[PublishedNumber]:
        """Yield all published numbers, row by row, in the paper's unit, without `scale`; nulls are left out.

        The numbers of rows in `missing` have no method, even if `methods` contains one. Without `printed`, the printed
        length of a number is its step.
        """
        printed_lengths = self.printed or self.steps
        for row, values in self.rows.items():
            method = None if row in self.missing else self.methods.get(row, row)
            for step, printed, value in zip(self.steps, printed_lengths, values):
                if value is not None:
                    yield PublishedNumber(row, method, step, printed, value)


class ClaimConfig(Section):
    """A paper's claim that a method needs less training than a baseline."""

    sentence: str = field(..., "sentence of the paper, quoted, with its place", min_length=1)
    factor: float = field(..., "least cost of the baseline over cost of the method", ge=1)
    quantity: Literal["final_distance", "highest_ratio"] = field(
        ..., "distance at which costs are compared: the baseline's final one, or the one of the highest ratio"
    )
    cost: Literal["steps", "time"] = field("steps", "unit of the cost: training steps or time")
    overhead: float = field(1.0, "published time of the method's step over the baseline's, for cost time", gt=0)
    method: str = field(..., "the faster method")
    baseline: str = field(..., "the slower method")

    def model_post_init(self, context: object) -> None:
        """Check that the highest ratio is of steps, and that steps have no overhead.

        Raises:
            ValueRejected: one of them does not hold.
        """
        if self.quantity == "highest_ratio":
            demand(self.cost == "steps", "claim.cost", self.cost, "steps with quantity highest_ratio")
        demand(self.overhead == 1 or self.cost == "time", "claim.overhead", self.overhead, "1 with cost steps")

    def check_methods(self, methods: Collection[str]) -> None:
        """Check that `method` and `baseline` are methods of the experiment.

        Raises:
            ConfigError: one of them is not.
        """
        for field_name in ("method", "baseline"):
            method = getattr(self, field_name)
            demand(method in methods, f"claim.{field_name}", method, f"one of {', '.join(methods)}")


class KnownConfig(Section):
    """Properties that `kairos plan` assumes for data that are not on this machine."""

    shape: list[int] | None = field(
        None, "channels, height and width of the network's input", min_length=3, max_length=3
    )
    classes: int | None = field(None, "number of classes", ge=1)
    text: list[int] | None = field(None, "tokens and width of an encoded text", min_length=2, max_length=2)
