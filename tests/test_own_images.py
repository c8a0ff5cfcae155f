"""The commands of the tutorial ``docs/own-images.md`` end with a report, in about the time that was estimated."""

import re
import shlex
import time
from pathlib import Path

import pytest

from test_beforehand import write_digits
from test_new import estimated_seconds
from workflow_copy import Copy

PAGE = Path(__file__).parents[1] / "docs/own-images.md"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_commands_of_the_tutorial_end_with_a_report_in_the_estimated_time(tmp_path):
    copy = Copy(tmp_path / "copy")
    write_digits(copy.folder / "photos", [(8, 8)] * 20)
    consoles = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ran, estimate, seconds = [], 0, 0.0
    for line in "".join(consoles).splitlines():
        command = re.sub(r"\s+#.*", "", line.removeprefix("$ "))
        if "make setup" in command or "--serve" in command:  # the environment exists; the status page has its tests
            continue
        words = shlex.split(command)
        begun = time.monotonic()
        ended = copy.snakemake(config="mine.yaml") if words[0] == "make" else copy.run(*words)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        if words[1] == "new":
            estimate = estimated_seconds(ended.stdout)
        if words[1] == "run":
            seconds = time.monotonic() - begun
        ran.append(words[1])
    assert ran == ["new", "check", "run"]
    assert 0.2 < seconds / estimate < 5  # wide, because other processes may slow the estimate or the run several times
    assert (copy.folder / "results/mine/report.html").exists()
    assert "uniform" in copy.run("kairos", "compare", "mine.yaml").stdout
