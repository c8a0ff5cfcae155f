"""The commands of the tutorial ``docs/own-images.md`` end with a report."""

import re
import shlex
from pathlib import Path

import pytest

from test_beforehand import write_digits
from workflow_copy import Copy

PAGE = Path(__file__).parents[1] / "docs/own-images.md"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_commands_of_the_tutorial_end_with_a_report(tmp_path):
    copy = Copy(tmp_path / "copy")
    write_digits(copy.folder / "photos", [(8, 8)] * 20)
    consoles = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ran = []
    for line in "".join(consoles).splitlines():
        command = re.sub(r"\s+#.*", "", line.removeprefix("$ "))
        if "make setup" in command or "--serve" in command:  # the environment exists; the status page has its tests
            continue
        words = shlex.split(command)
        ended = copy.snakemake(config="mine.yaml") if words[0] == "make" else copy.run(*words)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        ran.append(words[1])
    assert ran == ["new", "check", "run"]
    assert (copy.folder / "results/mine/report.html").exists()
    assert "uniform" in copy.run("kairos", "compare", "mine.yaml").stdout
