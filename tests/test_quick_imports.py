"""diffusers is imported without the packages of its pipelines in commands, and as usual in other processes."""

import os
import subprocess
import sys

import pytest

# imports diffusers, saves and loads an autoencoder; checks imported packages, and whether diffusers finds transformers
CODE = """
import sys
from kairos import quick_imports
if sys.argv[1] != "notebook":
    quick_imports.enable()
if sys.argv[1] == "plugin":
    from kairos.config.plugins import load_plugins
    open("my_plugin.py", "w").close()
    load_plugins(["my_plugin.py"])
from kairos.autoencoders.codec import load_model
from kairos.autoencoders.train import AutoencoderKL
import kairos.models.unet
import diffusers.utils
AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(sys.argv[2])
assert type(load_model(sys.argv[2])) is AutoencoderKL
finds_transformers = diffusers.utils.is_transformers_available()
if sys.argv[1] == "command":
    assert not finds_transformers and not {"transformers", "torchvision", "scipy"} & {*sys.modules}
else:
    assert finds_transformers
import transformers, torchvision, scipy
assert transformers.PreTrainedModel and torchvision.io and scipy.__version__
"""


def install_peft(folder):
    """Write a package peft, which diffusers imports; like the real one, it imports transformers."""
    (folder / "peft-0.21.2.dist-info").mkdir(parents=True)
    (folder / "peft-0.21.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.21.2\n")
    (folder / "peft").mkdir()
    (folder / "peft" / "__init__.py").write_text("import transformers\n")


@pytest.mark.long
@pytest.mark.parametrize("process", ["command", "notebook", "plugin"])
def test_only_commands_without_plugins_import_diffusers_without_packages_of_pipelines(process, tmp_path):
    command = [sys.executable, "-c", CODE, process, "model"]
    environment = dict(os.environ)
    if process == "command":
        install_peft(tmp_path / "packages")
        environment["PYTHONPATH"] = str(tmp_path / "packages")
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
