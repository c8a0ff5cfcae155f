"""Test that a training run fails if the GPU that SLURM allocates is not usable."""

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs
from slurm import slurm, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def wait_for_end(pipeline: Pipeline, number: str) -> str:
    """Wait until a job has ended; return its state."""

    def state() -> str:
        """Return the state of the job."""
        return next(job.state for job in all_jobs(pipeline.folder) if job.number == number)

    wait_for(lambda: state() in ("COMPLETED", "FAILED"), 300, f"the end of job {number}")
    return state()


def test_an_unusable_gpu_is_an_error(pipeline: Pipeline) -> None:
    values = yaml.safe_load((pipeline.folder / CONFIG).read_text())
    values["training"]["device"] = "auto"
    (pipeline.folder / "auto.yaml").write_text(yaml.safe_dump(values))
    log = pipeline.folder / "auto.log"
    train = f"kairos train --config auto.yaml --method uniform --seed 0 --out auto --latents {RESULTS}/latents"
    options = ["--parsable", "--gpus=1", "--mem=3000", "--constraint=steady", f"--output={log}"]
    exports = ",".join(f"{key}={pipeline.copy.environment[key]}" for key in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS"))
    folder = f"--chdir={pipeline.folder}"
    number = slurm("sbatch", *options, folder, f"--export=ALL,{exports}", "--wrap", train)
    assert wait_for_end(pipeline, number) == "FAILED"
    lines = log.read_text().strip().splitlines()
    assert "training.device: got 'auto'" in lines[-1]
    assert "no usable GPU" in lines[-1]
    assert not any("Traceback" in line for line in lines)
