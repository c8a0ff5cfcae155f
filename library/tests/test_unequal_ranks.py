"""Two ranks that train differently: batches of unequal sizes, a state saved on one rank, wrappers of the network."""

import pytest
import torch
from torch import nn

import rank_groups
from attached_training import COUNT, LEARNED, LOSS_RMS_EDM2, MEASURING, Trainer
from kairos_timesteps import Strategy, attach
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.distributed import rank
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, TinyNetwork, equal_bits
from specifications import Call, Specification, context_of
from test_attach_ranks import small_sampler

# samples of the micro-batches of each step, on the first and on the second rank
STEPS = [((4,), (4,)), ((4,), (2,)), ((1, 4), (3, 4)), ((2, 1), (4, 4)), ((4,), (4,))]
SPECIFICATIONS = [
    *(Specification(small_sampler(name)) for name in LEARNED),
    LOSS_RMS_EDM2,
    Specification({"name": "uniform"}, {"name": "coarse_to_fine"}),
]


def draw_unequal_batches():
    """Return the fractions that every sampler draws in steps of unequal batches."""
    fractions = {}
    for name in sorted(SAMPLERS):
        specification = Specification(small_sampler(name))
        strategy, context = specification.build(), context_of(specification, Call(), COUNT).arguments
        samples = []
        for counts_by_rank in STEPS[:4]:
            count = counts_by_rank[rank()][0]
            values = {
                key: value[:count] if hasattr(value, "__len__") and len(value) == COUNT else value
                for key, value in context.items()
            }
            samples.append(strategy.draw(IMAGES[:count], **values).fractions)
        fractions[name] = torch.cat(samples)
    return fractions


def train_on_unequal_batches():
    """Train with every strategy that learns; the first rank alone saves its state and reads values to log."""
    states = []
    for specification in SPECIFICATIONS:
        for scaled in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None

            def optimizer(parameters, lr, fused=scaled):
                return torch.optim.AdamW(parameters, lr, fused=fused)

            trainer = Trainer(specification, True, optimizer=optimizer, scaler=scaler)
            for counts_by_rank in STEPS:
                for count in counts_by_rank[rank()]:
                    trainer.batch(count=count)
                for parameter in trainer.network.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                trainer.step()
                if rank() == 0:
                    trainer.timesteps.state_dict()
                    trainer.timesteps.strategy.sampler.statistics()
            states.append(trainer.timesteps.state_dict())
    return states


def call_wrappers():
    """Return the messages of strategies that measure a network through DistributedDataParallel, and a sharded one."""
    messages = []
    wrapper = nn.parallel.DistributedDataParallel(TinyNetwork())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    options = {"frequency": 1, "feature_timesteps": 5, "width": 4}
    timesteps = attach(
        "adaptive", "linear", optimizer, wrapper, predict=lambda x_t, t: wrapper(x_t, t), sampler=options
    )
    timesteps.loss(wrapper(IMAGES, timesteps(IMAGES)).square().mean((1, 2, 3))).backward()
    with pytest.raises(ConfigError) as error:
        optimizer.step()
    messages.append(str(error.value))
    strategy = Strategy("adaptive", "linear", sampler=options)
    draw = strategy.draw(IMAGES)
    with pytest.raises(ConfigError) as error, strategy.observe(draw, lambda x_t, t: wrapper(x_t, t), optimizer):
        pass
    messages.append(str(error.value))
    import torch.distributed.fsdp as fsdp  # takes a second

    if hasattr(fsdp, "fully_shard"):
        network = nn.Conv2d(1, 1, 1)
        fsdp.fully_shard(network, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        strategy = Strategy("adaptive", "linear", sampler=options)
        draw = strategy.draw(IMAGES)
        with pytest.raises(ConfigError) as error, strategy.observe(draw, lambda x_t, t: network(x_t), optimizer):
            pass
        messages.append(str(error.value))
        for name in MEASURING:
            with pytest.raises(ConfigError) as error:
                attach(name, "linear", optimizer, network, predict=network)
            messages.append(str(error.value))
            with pytest.raises(ConfigError) as error:
                strategy = Specification(small_sampler(name)).build()
                with strategy.observe(strategy.draw(IMAGES), network, optimizer):
                    pass
            messages.append(str(error.value))
    return messages


class FlatNetwork(TinyNetwork):
    """Network that accepts no empty batch."""

    def forward(self, x_t, t):
        return super().forward(x_t, t).view(len(x_t), -1).view(x_t.shape)


def learn_from_one_rank():
    """Return the state of samplers that measure, after steps in which one rank or none has samples to learn from."""
    states = []
    for name in MEASURING:
        strategy, network = Specification(small_sampler(name)).build(), FlatNetwork()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for learning_ranks in ({0}, set(), {1}):
            draw = strategy.draw(IMAGES[: 4 - 2 * rank()])
            mask = torch.full((len(draw.t),), rank() in learning_ranks)
            strategy.loss(draw, 1 + draw.fractions.float(), mask)
            with strategy.observe(draw, network, optimizer):
                pass
        states.append(strategy.state_dict())
    return states


def train_on_two_ranks():
    Strategy("log_normal", "flow").draw(IMAGES[: 4 * rank()])  # one rank has no samples
    return {
        "fractions": draw_unequal_batches(),
        "states": train_on_unequal_batches() + learn_from_one_rank(),
        "messages": call_wrappers(),
    }


@pytest.mark.timeout(180)
def test_ranks_may_have_unequal_batches(tmp_path):
    first, second = rank_groups.run(train_on_two_ranks, tmp_path, 2)
    del first["fractions"]["listed"]  # it draws four times alone
    for name, samples in first["fractions"].items():
        with rank_groups.case(name):
            assert not set(samples.tolist()) & set(second["fractions"][name].tolist())
    names = [repr(specification) for specification in SPECIFICATIONS for _ in range(2)] + MEASURING
    for name, one, other in zip(names, first["states"], second["states"], strict=True):
        with rank_groups.case(name):
            assert equal_bits(one, other)
    for messages in (first["messages"], second["messages"]):
        through_wrapper, sharded = messages[:2], messages[2:]
        assert all("predict" in message and "model.module" in message for message in through_wrapper)
        assert all("FSDPModule" in message and "2 ranks" in message for message in sharded)
