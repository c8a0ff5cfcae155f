"""Shards: slices of a job's images that separate jobs compute.

Images are split between batches, so that the shards compute exactly the batches of the whole job.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos_timesteps.errors import ConfigError, KairosError

# end of messages about a shard that cannot be used: what the user can do
AGAIN = "delete this shard if it exists, and run again: the workflow computes it again; by hand, use --shard"


@dataclass(frozen=True)
class Shard:
    """One shard of a job.

    Attributes:
        number: number of the shard, from 1.
        of: number of all shards.
    """

    number: int
    of: int

    @property
    def name(self) -> str:
        """Name of the shard in options and files, such as ``1of4``."""
        return f"{self.number}of{self.of}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard that a text ``KofN`` describes: shard K of N, such as ``1of4``.

        Raises:
            ConfigError: the text has another form, or K is not in 1 ... N.
        """
        match = re.fullmatch(r"(\d+)of(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--shard: got {text!r}, allowed: KofN, shard K of N, such as 1of4")
        return cls(number=int(match[1]), of=int(match[2]))

    def rows(self, count: int, batch_size: int) -> range:
        """Return the indices of the shard's images in the job, which are consecutive and form whole batches.

        Only the last batch of the job may be shorter. Shards differ by at most one batch. With fewer batches than
        shards, some shards are empty.

        Args:
            count: number of images of the job.
            batch_size: images per batch of the job.
        """
        batches = math.ceil(count / batch_size)
        # shard K has the batches from (K - 1)/N to K/N of all batches, rounded down
        first_batch = batches * (self.number - 1) // self.of
        end_batch = batches * self.number // self.of
        return range(min(first_batch * batch_size, count), min(end_batch * batch_size, count))

    def record(self, count: int, batch_size: int) -> dict[str, int]:
        """Return a record of this shard with keys ``number``, ``of``, ``batch_size``, ``first`` and ``end``.

        The shard contains images `first` ... `end` - 1 of the `count` images of the job.
        """
        rows = self.rows(count, batch_size)
        return {
            "number": self.number,
            "of": self.of,
            "batch_size": batch_size,
            "first": rows.start,
            "end": rows.stop,
        }


def order_shards(
    shards: list[tuple[Path, dict[str, Any]]], identity: dict[str, Any], count: int, batch_size: int
) -> list[int]:
    """Return the positions in `shards` of all shards of a job, in the order of their images, after checking the shards.

    Without shards the result is empty.

    Args:
        shards: path and record of each shard, in any order. The record must contain the fields of `identity`, and
            ``shard`` as `Shard.record` returns it. Other fields are not compared.
        identity: settings that determine the result of the job.
        count: number of images of the job.
        batch_size: images per batch.

    Raises:
        KairosError: a shard belongs to another job, occurs twice or is missing. The message contains the path of the
            shard, or of a present one if a shard is missing.
    """
    # A missing shard needs no check: N shards, all of `of` = N and with different numbers, are all shards.
    position_by_number: dict[int, int] = {}
    for position, (path, record) in enumerate(shards):
        shard = record.get("shard") or {}  # empty for the result of a whole job, which the comparison below rejects
        number = shard.get("number", 0)
        if "of" in shard and shard["of"] != len(shards):
            raise KairosError(
                f"{path}: belongs to {shard['of']} shards, got {len(shards)}; pass each of them with --merge"
            )
        expected = {**identity, "shard": Shard(number, len(shards)).record(count, batch_size)}
        for name, value in expected.items():
            if record.get(name) != value:
                raise KairosError(
                    f"{path}: is no shard of this job: {name}: got {record.get(name)!r}, allowed: {value!r}; {AGAIN}"
                )
        if number in position_by_number:
            other_path, _ = shards[position_by_number[number]]
            raise KairosError(
                f"{path}: contains shard {number} of {len(shards)}, which {other_path} also contains; {AGAIN}"
            )
        position_by_number[number] = position
    return [position_by_number[number] for number in sorted(position_by_number)]
