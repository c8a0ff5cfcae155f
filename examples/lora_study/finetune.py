"""Fine-tune a network with LoRA and a timestep strategy."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from fashion_mnist import Data
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from kairos_timesteps import attach
from kairos_timesteps.randomness import Stream


class AttachArguments(NamedTuple):
    """Arguments of `kairos_timesteps.attach` that select a timestep strategy.

    Attributes:
        name: name of the strategy.
        sampler: options of the sampler.
    """

    name: str
    sampler: Mapping[str, Any] = MappingProxyType({})


# README.md contains the reason for each
STRATEGIES = {
    "uniform": AttachArguments("uniform"),
    "log_normal": AttachArguments("log_normal"),
    "min_snr": AttachArguments("uniform+min_snr"),
    "speed": AttachArguments("speed+change_aware"),
    "high_noise": AttachArguments("log_normal", {"m": 3.0, "s": 1.0}),
    "low_noise": AttachArguments("beta", {"a": 1.0, "b": 2.0}),
    "loss_rms": AttachArguments("loss_rms"),
    "coarse_to_fine": AttachArguments("auto+coarse_to_fine"),
}


def finetune(
    setting: Any, strategy: AttachArguments, data: Data, rate: float, steps: int, batch: int, seed: int
) -> nn.Module:
    """Train a LoRA of the base on fine-tuning images, and return the network in evaluation mode.

    Everything random in step k is a function of seed and k, so strategies of a seed share initial weights, images and
    noise.
    """
    network = setting.load_network()
    torch.manual_seed(seed)  # of LoRA's initial weights
    inject_adapter_in_model(LoraConfig(**setting.lora), network)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
    timesteps = attach(
        strategy.name, setting.process, optimizer, network, time=setting.time, seed=seed, sampler=strategy.sampler,
        predict=partial(setting.predict, network),
    )  # fmt: skip
    process = timesteps.strategy.process
    network.train()
    for step in range(steps):
        index = Stream(seed, "images").integers(step, len(data.images), range(batch))
        noise = Stream(seed, "noise").normal(step, range(batch), tuple(data.images.shape[1:]), data.images.device)
        x0, labels = data.images[index], data.labels[index]
        t = timesteps(x0, conditions={"labels": labels})
        prediction = setting.predict(network, process.noised(x0, noise, t), t, labels)
        loss = timesteps.loss((prediction - process.target(x0, noise, t)).square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()
