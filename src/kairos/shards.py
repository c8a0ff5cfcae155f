"""Parts of a job that are jobs of their own: cut between batches, so that each batch is the one of the whole job."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos_timesteps.errors import ConfigError, KairosError

AGAIN = "delete this part and run again: the workflow makes it anew, by hand it is made with --shard"


@dataclass(frozen=True)
class Shard:
    """Part `number`, from 1, of `of`."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The part that ``KofN`` means.

        Raises:
            ConfigError: it means none.
        """
        found = re.fullmatch(r"(\d+)of(\d+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"--shard: got {text!r}, allowed: KofN, part K of N, such as 1of4")
        return cls(int(found[1]), int(found[2]))

    def rows(self, count: int, batch_size: int) -> range:
        """Return the images of the shard, of `count`; shards differ by at most one batch, and some may be empty."""
        batches = -(-count // batch_size)
        start, stop = (batches * k // self.of * batch_size for k in (self.number - 1, self.number))
        return range(min(start, count), min(stop, count))

    def record(self, count: int, batch_size: int) -> dict[str, int]:
        """Return the record of this shard; it contains images `first` ... `end` - 1 of the job's `count`."""
        rows = self.rows(count, batch_size)
        return {**vars(self), "batch_size": batch_size, "first": rows.start, "end": rows.stop}


def in_order(parts: list[tuple[Path, dict[str, Any]]], whole: dict[str, Any], count: int, batch_size: int) -> list[int]:
    """The places of the parts of a job in their list, in the order of their images.

    Args:
        parts: where each lies and what it says of itself: the fields of `whole`, and ``shard``.
        whole: what decides the result of the job.
        count: its images.
        batch_size: images per batch.

    Raises:
        KairosError: a part is of another job, is there twice or is not there; the message names it.
    """
    places: dict[int, int] = {}
    for place, (path, said) in enumerate(parts):
        shard = said.get("shard") or {}
        number = shard.get("number", 0)
        if shard.get("of", len(parts)) != len(parts):
            raise KairosError(f"{path}: is one of {shard['of']} parts, but {len(parts)} are given; give all of them")
        for name, value in {**whole, "shard": Shard(number, len(parts)).record(count, batch_size)}.items():
            if said.get(name) != value:
                raise KairosError(
                    f"{path}: is no part of this job: {name}: got {said.get(name)!r}, allowed: {value!r}; {AGAIN}"
                )
        if number in places:
            raise KairosError(
                f"{path}: holds part {number} of {len(parts)}, as {parts[places[number]][0]} does; {AGAIN}"
            )
        places[number] = place
    return [places[number] for number in sorted(places)]
