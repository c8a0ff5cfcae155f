"""accelerate: the loop of the page, on one process and on two ranks."""

import copy
import os

import pytest
import torch
from training_runs import (
    LOSSES,
    STRATEGIES,
    Run,
    blocks,
    differences,
    digits,
    explicit,
    measures,
    new_process,
    quicken,
    released,
    with_strategy,
)

import rank_groups
from kairos_timesteps import attach
from small_loop import TinyNetwork, equal_bits

accelerate = released("accelerate")

pytestmark = pytest.mark.trainers
ACCUMULATE, BATCH, STEPS = 2, 8, 20
IMAGES = digits(64)


class Recorded(TinyNetwork):
    """A network that records the times that it is trained at."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.times = []

    def forward(self, x_t, t):
        if torch.is_grad_enabled() and self.recording:
            self.times.append(t)
        return super().forward(x_t, t)

    recording = True


def train(name, batches, resume=None, save=None, evaluate=False):
    """Run the page, with the images of `batches` in their order and noise by number of the batch."""
    new_process()
    code, validation = blocks("accelerate")
    setup, loop = with_strategy(code, name).split("for x0 in loader:\n")
    loop = "def micro_batch(x0):\n" + loop.replace("    with", "    global loss\n    with", 1)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    network = Recorded()
    if measures(name):
        setup = setup.replace("accelerator=accelerator", "accelerator=accelerator, predict=predict")

    def predict(x_t, t):
        network.recording = False
        output = accelerator.unwrap_model(network)(x_t, t)
        network.recording = True
        return output

    names = {
        "torch": torch, "accelerator": accelerator, "network": network, "predict": predict, "loader": None,
        "optimizer": torch.optim.AdamW(network.parameters(), lr=1e-2), "held_out": IMAGES[:16],
    }  # fmt: skip
    exec(setup, names)
    exec(loop, names)
    quicken(names["strategy"].strategy)
    if resume:
        accelerator.load_state(resume)
    results, values = Run(), []
    for number, x0 in batches:
        torch.manual_seed(number)
        names["micro_batch"](x0)
        results.losses.append(names["loss"].detach())
        if evaluate and number % 7 == 2:
            names["network"].eval()
            names["strategy"](x0)
            exec(validation, names)
            names["network"].train()
            values.append([names["mlperf"], names["middle"]])
    if save:
        accelerator.save_state(save)
    results.t = network.times
    results.strategy = names["strategy"].state_dict()["strategy"]
    results.network = copy.deepcopy(network.state_dict())
    return results, values


def micro_batches(first=0, last=STEPS * ACCUMULATE):
    return [(number, IMAGES[number * BATCH % len(IMAGES) :][:BATCH]) for number in range(first, last)]


def plain_loop(name):
    network = Recorded()
    network.recording = False

    def errors(number, x0, t):
        torch.manual_seed(number)
        noise, at = torch.randn_like(x0), t.view(-1, 1, 1, 1)
        return (network((1 - at) * x0 + at * noise, t) - (noise - x0)).square().flatten(1).mean(1)

    batches = [x0 for _, x0 in micro_batches()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    predict = network if measures(name) else None
    return explicit(name, "flow", "noise_is_one", network, optimizer, batches, errors, ACCUMULATE, predict)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_trains_as_a_plain_loop_and_evaluation_changes_nothing(name):
    results, values = train(name, micro_batches(), evaluate=True)
    assert differences(results, plain_loop(name)) == [] and len(values) == 6


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    whole, _ = train(name, micro_batches())
    results, _ = train(name, micro_batches(0, 16), save=tmp_path / "state")
    resumed, _ = train(name, micro_batches(16), resume=tmp_path / "state")
    resumed.t, resumed.losses = results.t + resumed.t, results.losses + resumed.losses
    assert differences(resumed, whole) == []


def test_a_strategy_attached_before_prepare_counts_the_steps():
    """accelerate wraps the optimizer and does not copy it."""
    new_process()
    accelerator, network = accelerate.Accelerator(cpu=True), Recorded()
    optimizer = torch.optim.AdamW(network.parameters())
    strategy = attach(LOSSES, "flow", optimizer, network, time="noise_is_one")
    prepared, optimizer = accelerator.prepare(network, optimizer)
    for _, x0 in micro_batches(0, 5):
        accelerator.backward(strategy.loss(prepared(x0, strategy(x0)).square()))
        optimizer.step()
        optimizer.zero_grad()
    assert strategy.strategy.step == 5


def train_on_a_rank():
    """Train on every second sample of each batch, and validate; accelerate joins the ranks."""
    rank = int(os.environ["RANK"])
    halves = [(number, x0[rank::2]) for number, x0 in micro_batches(0, 16)]
    results, values = train(LOSSES, halves, evaluate=True)
    return {"t": results.t, "strategy": results.strategy, "network": results.network, "values": values}


def test_two_ranks_draw_the_halves_of_a_global_batch_and_validate_alike(tmp_path):
    modules = ("accelerate", "sklearn.datasets")
    first, second = rank_groups.run(train_on_a_rank, tmp_path, 2, join=False, preloaded=modules)
    assert first["values"] == second["values"] and len(first["values"]) == 2
    assert equal_bits(first["strategy"], second["strategy"]) and first["strategy"]["step"] == 8
    network = {key.removeprefix("module."): value for key, value in first["network"].items()}
    assert equal_bits(network, {key.removeprefix("module."): value for key, value in second["network"].items()})
    one, _ = train(LOSSES, micro_batches(0, 2))
    for number in range(2):  # before anything is learned
        in_turn = torch.stack([first["t"][number], second["t"][number]], 1).flatten()
        assert equal_bits(in_turn, one.t[number])
