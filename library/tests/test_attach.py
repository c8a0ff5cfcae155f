"""attach: a strategy in a trainer by hooks on its optimiser, compared with the explicit form."""

import copy
import io
import logging
import math
import pickle
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kairos_timesteps
import rank_groups
from kairos_timesteps import Attached, Strategy, attach
from kairos_timesteps.base import Learned, MeasuresNetwork
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.distributed import rank, ranks
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.integrations.distributed_checkpoint import PackedState
from kairos_timesteps.time_convention import TimeConvention
from marks import mark_long
from small_loop import IMAGES, TinyNetwork, equal_bits
from specifications import Call, Specification, but_name, context_of, examples, specifications

LEARNED = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, Learned))
MEASURING = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, MeasuresNetwork))
COUNT = 4  # samples of a micro-batch


class Trainer:
    """Training loop with micro-batches, validations, steps, skipped steps and checkpoints.

    Args:
        specification: options of the strategy.
        attached: use `attach`; otherwise the explicit form.
        time: convention of the trainer's t.
        late: clear gradients between the loss and its backward pass, not after the step.
        optimizer: class and arguments.
        scaler: GradScaler, or None.
        to_none: True if `zero_grad` removes gradients.
        more: further arguments of `attach` and `Strategy`.
    """

    def __init__(
        self, specification, attached, time=None, late=False, optimizer=None, scaler=None, to_none=True, **more
    ):
        torch.manual_seed(0)
        self.network, self.late, self.scaler, self.to_none = TinyNetwork(), late, scaler, to_none
        self.optimizer = (optimizer or torch.optim.Adam)(self.network.parameters(), lr=1e-2)
        self.strategy = specification.build(**more)
        self.time = TimeConvention(self.strategy.process, time)
        self.context = context_of(specification, Call(), COUNT).arguments
        self.timesteps, self.draws, self.cleared, self.batches = None, [], True, 0
        self.t, self.losses = [], []
        if attached:
            options = dict(sampler=but_name(specification.sampler), weighting=but_name(specification.weighting))
            name, process = self.strategy.name, self.strategy.process
            predict = self.predict if name.split("+")[0] in MEASURING else None
            self.timesteps = attach(
                name, process, self.optimizer, self.network, time=time, predict=predict, **options, **more
            )  # fmt: skip
            self.strategy = self.timesteps.strategy

    def predict(self, x_t, t):
        return Strategy("uniform", self.time.process).process.predict(self.network, x_t, t)

    def batch(self, train=True, weights=None, mask=None, factor=1.0, backward=True):
        """Run one micro-batch, forward and backward."""
        self.batches += train
        x0 = IMAGES[(self.batches % 2) * COUNT :][:COUNT]
        context = {**self.context, **({"epoch": self.batches} if "item" in self.context else {})}
        if self.timesteps:
            self.network.train(train)
            t = self.timesteps(x0, **context)
        else:
            draw = self.strategy.draw(x0, **context)
            t = self.time.to_trainer(draw.t)
        process, at = self.time.process, self.time.to_process(t)
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(self.batches))
        output = process.predict(self.network, process.noised(x0, noise, at), at)
        errors = factor * (output - process.target(x0, noise, at)).square().mean((1, 2, 3))
        if self.timesteps:
            loss = self.timesteps.loss(errors, weights=weights, mask=mask)
        else:
            terms = self.strategy.weighted(draw, errors, mask)
            loss = (terms if weights is None else terms * weights).mean()
        if train:
            self.t.append(t)
            self.losses.append(loss.detach())
        if train and backward:
            if self.late and self.cleared:
                self.optimizer.zero_grad()
            self.cleared = False
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not self.timesteps:
                self.draws.append(draw)

    def step(self, skipped=False):
        """Run the optimizer's step; the explicit form does not observe a skipped step."""

        def call():
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif not skipped:
                self.optimizer.step()

        if self.timesteps or skipped:
            call()
        else:
            with self.strategy.observe(self.draws, self.network, self.optimizer):
                call()
        if skipped and not self.timesteps:
            self.strategy.weighting.zero_grad()
        self.draws, self.cleared = [], True
        if not self.late:
            self.optimizer.zero_grad(self.to_none)

    def checkpoint(self):
        file = io.BytesIO()
        parts = (self.timesteps, self.network, self.optimizer, self.scaler or nn.Identity())
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, content, previous):
        state = torch.load(io.BytesIO(content), weights_only=True)
        for part, values in zip((self.timesteps, self.network, self.optimizer, self.scaler or nn.Identity()), state):
            part.load_state_dict(values)
        self.batches, self.t, self.losses = previous.batches, previous.t, previous.losses
        return self

    def results(self):
        state = self.timesteps.state_dict()["strategy"] if self.timesteps else self.strategy.state_dict()
        return {"t": self.t, "losses": self.losses, "state": state, "network": self.network.state_dict()}


EVENTS = st.lists(
    st.sampled_from(["train", "train", "masked", "weighted", "lost", "evaluation", "skip", "step", "step", "resume"]),
    min_size=6,
    max_size=14,
)
MASK, WEIGHTS = torch.tensor([True, False, True, False]), torch.tensor([0.5, 1.0, 2.0, 0.0])
ARGUMENTS = {
    "train": {},
    "masked": {"mask": MASK},
    "weighted": {"weights": WEIGHTS, "mask": torch.zeros(COUNT, dtype=torch.bool)},
    "lost": {"backward": False},
}


def run(specification, events, attached, build):
    """Train with a sequence of events; only the attached form validates and resumes, which must change nothing."""
    trainer = build(specification, attached)
    pending = 0
    for event in [*events, "train", "step"]:
        if event == "evaluation" and attached:
            trainer.batch(train=False)
        elif event == "resume" and attached and not pending:
            trainer = build(specification, attached).load(trainer.checkpoint(), trainer)
        elif event in ARGUMENTS:
            trainer.batch(**ARGUMENTS[event])
            pending += event != "lost"
        elif event in ("step", "skip") and pending:
            trainer.step(skipped=event == "skip")
            pending = 0
    return trainer.results()


def check_events(specification, events, late, time):
    def build(specification, attached):
        return Trainer(specification, attached, time, late)

    try:
        explicit = run(specification, events, False, build)
    except ConfigError:  # the options do not fit
        return
    results = run(specification, events, True, build)
    for key, values in explicit.items():
        assert equal_bits(results[key], values), key


def draw_time_convention(data, specification):
    """Draw one of the conventions of time of a specification's process."""
    if specification.process in ("flow", "vp"):
        return data.draw(st.sampled_from(["noise_is_one", "data_is_one"]))
    return None


@pytest.mark.parametrize("name", mark_long(sorted(SAMPLERS), [*LEARNED, "uniform", "speed", "mixture"]))
@examples(3)
@given(data=st.data())
def test_a_sampler_attached_equals_the_explicit_form(name, data):
    specification = data.draw(specifications(sampler=name, discrete=name in MEASURING))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


@pytest.mark.parametrize("name", mark_long(sorted(WEIGHTINGS), ["none", "min_snr", "coarse_to_fine", "edm2"]))
@examples(2)
@given(data=st.data())
def test_a_weighting_attached_equals_the_explicit_form(name, data):
    specification = data.draw(specifications(sampler="loss_rms", weighting=name))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(40)
@given(data=st.data())
def test_a_sampler_attached_equals_the_explicit_form_in_many_combinations(name, data):
    weighting = data.draw(st.sampled_from(["none", "min_snr", "edm2", "coarse_to_fine"]))
    specification = data.draw(specifications(name, weighting, discrete=name in MEASURING))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


# Mixed precision

OPTIMIZERS = {
    f"{cls.__name__}, fused={fused}": lambda parameters, lr, cls=cls, fused=fused: cls(parameters, lr, fused=fused)
    for cls in (torch.optim.Adam, torch.optim.AdamW)
    for fused in (True, False)
}
LEARNS = Specification({"name": "loss_rms", "frequency": 1, "start": 1}, {"name": "edm2", "channels": 8})
MEASURES = Specification({"name": "gradient_norm", "frequency": 1, "start": 1, "bins": 4})
ADAPTS = Specification({"name": "adaptive", "frequency": 1, "feature_timesteps": 5, "width": 4})
OVERFLOWS = [True, True, False, False, True, False, False]


def sampler_name(specification):
    return specification.sampler["name"]


def mixed_precision(specification, optimizer, attached, scaled, resume=None, to_none=True):
    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        return Trainer(specification, attached, optimizer=OPTIMIZERS[optimizer], scaler=scaler, to_none=to_none)

    trainer = build()
    for number, overflow in enumerate(OVERFLOWS):
        for _ in range(2):
            trainer.batch(factor=math.inf if overflow and scaled else 1.0)
        trainer.step(skipped=overflow and scaled)
        if number == resume:
            trainer = build().load(trainer.checkpoint(), trainer)
    return trainer.results()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("specification", [LEARNS, MEASURES, ADAPTS], ids=sampler_name)
def test_a_step_that_grad_scaler_skips_is_not_observed(specification, optimizer, scaled):
    explicit = mixed_precision(specification, optimizer, False, scaled)
    results = mixed_precision(specification, optimizer, True, scaled)
    assert results["state"]["step"] == (4 if scaled else 7)
    assert equal_bits(results, explicit)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("resume", range(len(OVERFLOWS)))
def test_a_resume_after_any_attempt_is_exact(fused, resume):
    optimizer = f"AdamW, fused={fused}"
    whole, resumed = (mixed_precision(LEARNS, optimizer, True, True, at) for at in (None, resume))
    assert equal_bits(whole, resumed)


def test_fused_and_unfused_optimizers_draw_the_same():
    results = [mixed_precision(LEARNS, f"Adam, fused={fused}", True, True) for fused in (True, False)]
    assert equal_bits(results[0]["t"], results[1]["t"]) and equal_bits(results[0]["losses"], results[1]["losses"])


def test_a_fused_step_is_skipped_whether_or_not_gradients_are_set_to_none():
    explicit, results = (
        mixed_precision(LEARNS, "Adam, fused=True", attached, True, to_none=False) for attached in (False, True)
    )
    assert results["state"]["step"] == 4 and equal_bits(results, explicit)


class ValueReads(TorchDispatchMode):
    """Counts values that are read from tensors, which would synchronise with a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), by_name=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(by_name or {}))


@pytest.mark.parametrize("name", ["uniform", "loss_rms", "info_rate+min_snr"])
@pytest.mark.parametrize("fused", [True, False])
def test_one_number_is_read_per_fused_step_and_only_by_the_next_draw(name, fused):
    network, scaler = TinyNetwork(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    timesteps = attach(name, "linear", optimizer, network)
    t = timesteps(IMAGES)
    for _ in range(3):
        errors = (network(IMAGES, t) - 1).square().mean((1, 2, 3))
        with ValueReads() as within:
            loss = timesteps.loss(errors)
            if fused:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        with ValueReads() as between:
            t = timesteps(IMAGES)
        assert (within.count, between.count) == (0, int(fused))


# Observed losses and steps


class Plain:
    """Network, optimiser and a strategy that learns, without a loop."""

    def __init__(self, name="loss_rms", process="linear", **arguments):
        self.network = TinyNetwork()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.timesteps = attach(name, process, self.optimizer, self.network, **arguments)

    def errors(self, t):
        return (self.network(IMAGES[: len(t)], t) - 1).square().mean((1, 2, 3))

    @property
    def state(self):
        return self.timesteps.state_dict()["strategy"]

    def step(self, count=8, **arguments):
        self.timesteps.loss(self.errors(self.timesteps(IMAGES[:count])), **arguments).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def observed(self):
        """Number of losses that the sampler has learned from, if none has decayed."""
        return self.timesteps.strategy.sampler._sums[1].sum().item()


def test_two_losses_of_one_backward_pass_are_both_observed():
    plain = Plain(sampler={"decay": 1 - 1e-16})
    first = plain.timesteps.loss(plain.errors(plain.timesteps(IMAGES[:3])))
    second = plain.timesteps.loss(plain.errors(plain.timesteps(IMAGES[3:8])))
    (first + second).backward()
    plain.optimizer.step()
    assert plain.observed == pytest.approx(8) and plain.state["step"] == 1


def test_micro_batches_may_have_different_shapes_and_a_graph_may_be_used_twice():
    plain = Plain(sampler={"decay": 1 - 1e-16})
    for images in (torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 6, 3), torch.zeros(3, 1, 2, 4, 4)):
        t = plain.timesteps(images.bfloat16())
        assert t.dtype == torch.int64
        loss = plain.timesteps.loss(plain.errors(t))
        loss.backward(retain_graph=True)
        loss.backward()
    plain.optimizer.step()
    assert plain.observed == pytest.approx(6)


def test_a_micro_batch_that_raises_an_error_is_not_observed():
    plain = Plain(sampler={"decay": 1 - 1e-16})
    with pytest.raises(RuntimeError, match="expected input"):
        plain.network(torch.zeros(8, 3, 4, 4), plain.timesteps(IMAGES))
    plain.step(count=4)
    assert plain.observed == pytest.approx(4) and plain.state["step"] == 1


def test_a_step_that_raises_an_error_is_not_counted():
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"frequency": 1, "feature_timesteps": 5, "width": 4}
    timesteps = attach("adaptive", "linear", optimizer, network, predict=network, sampler=options, timesteps=20)
    for fails in (True, False):
        timesteps.loss((network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3))).backward()
        optimizer.param_groups[0]["lr"] = "no number" if fails else 0.1
        if fails:
            with pytest.raises(TypeError):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert timesteps.state_dict()["strategy"]["step"] == 1
    assert len(timesteps.strategy.sampler.changes) == 1


def test_a_step_without_a_draw_is_not_counted():
    """torch.distributed.checkpoint creates the optimizer's state by such a step."""
    plain = Plain()
    plain.optimizer.step()
    assert plain.state["step"] == 0
    plain.step()
    assert plain.state["step"] == 1


def test_a_fixed_sampler_needs_no_loss():
    plain = Plain("log_normal")
    explicit = Strategy("log_normal")
    for _ in range(3):
        t = plain.timesteps(IMAGES)
        draw = explicit.draw(IMAGES)
        assert equal_bits(t, draw.t)
        plain.errors(t).mean().backward()
        plain.optimizer.step()
        with explicit.observe(draw):
            pass


def test_a_learned_sampler_needs_the_loss():
    plain = Plain()
    plain.errors(plain.timesteps(IMAGES)).mean().backward()
    with pytest.raises(ConfigError, match=r"losses of a step: got none, allowed: .*timesteps.loss"):
        plain.optimizer.step()


def test_a_closure_draws_within_the_step():
    plain, other = Plain(), Plain()
    other.network.load_state_dict(plain.network.state_dict())

    def closure():
        plain.optimizer.zero_grad()
        loss = plain.timesteps.loss(plain.errors(plain.timesteps(IMAGES)))
        loss.backward()
        return loss

    for _ in range(3):
        plain.optimizer.step(closure)
        other.step()
    assert plain.state["step"] == 3 and equal_bits(plain.state, other.state)


def measured_in_closures(attached, accumulated):
    """Measure the network around steps whose last micro-batch is in the optimizer's closure, as in Lightning."""
    torch.manual_seed(0)
    network, options = TinyNetwork(), {"frequency": 1, "start": 1, "bins": 4}
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    strategy, timesteps, draws = Strategy("gradient_norm", sampler=options), None, []
    if attached:
        timesteps = attach("gradient_norm", "linear", optimizer, network, predict=network, sampler=options)

    def micro_batch():
        if timesteps is None:
            draws.append(strategy.draw(IMAGES))
        t = timesteps(IMAGES) if attached else draws[-1].t
        errors = (network(IMAGES, t) - 1).square().mean((1, 2, 3))
        (timesteps.loss(errors) if attached else strategy.loss(draws[-1], errors)).backward()

    for _ in range(4):
        for _ in range(accumulated):
            micro_batch()
        if attached:
            optimizer.step(micro_batch)
        else:
            micro_batch()
            with strategy.observe(draws, network, optimizer):
                optimizer.step()
        draws.clear()
        optimizer.zero_grad()
    return (timesteps.strategy if attached else strategy).state_dict(), network.state_dict()


@pytest.mark.parametrize("accumulated", [0, 1])
def test_strategies_that_measure_work_with_a_closure(accumulated):
    assert equal_bits(measured_in_closures(True, accumulated), measured_in_closures(False, accumulated))


def test_strategies_that_measure_reject_closures_that_are_called_again():
    network = TinyNetwork()
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1)
    timesteps = attach("gradient_norm", "linear", optimizer, network, predict=network)

    def closure():
        optimizer.zero_grad()
        loss = timesteps.loss((network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3)))
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match=r"several calls of its closure.*explicit form"):
        optimizer.step(closure)


def test_loading_a_state_discards_the_current_step():
    plain = Plain()
    plain.step()
    state = plain.timesteps.state_dict()
    plain.timesteps.loss(plain.errors(plain.timesteps(IMAGES))).backward()
    plain.timesteps.load_state_dict(state)
    plain.optimizer.step()
    assert equal_bits(plain.timesteps.state_dict(), state)


def test_after_detach_training_draws_are_an_error_and_validations_work():
    plain = Plain()
    plain.step()
    times = validation(plain, batches=1, count=8)[0]
    plain.timesteps(IMAGES)  # later validations begin anew
    plain.timesteps.detach()
    for timesteps in (plain.timesteps, copy.deepcopy(plain.timesteps)):
        with pytest.raises(ConfigError, match="detached"):
            timesteps(IMAGES)
    assert equal_bits(validation(plain, batches=1, count=8)[0], times)
    plain.optimizer.step()
    assert plain.timesteps.strategy.step == 1
    again = attach("loss_rms", "linear", plain.optimizer, plain.network)
    again.load_state_dict(plain.timesteps.state_dict())
    plain.timesteps.detach()  # a second call changes nothing, for the new hooks neither
    again.loss(plain.errors(again(IMAGES))).backward()
    plain.optimizer.step()
    assert again.strategy.step == 2 and plain.timesteps.strategy.step == 1


# Weights and masks


def test_the_loss_of_uniform_without_weights_is_the_plain_mean_to_the_last_bit():
    plain = Plain("uniform+none")
    plain.timesteps(IMAGES)
    for seed in range(20):
        errors = torch.rand(8, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        assert equal_bits(plain.timesteps.loss(errors), errors.mean())
        assert equal_bits(plain.timesteps.loss(errors, weights=WEIGHTS.repeat(2)), (errors * WEIGHTS.repeat(2)).mean())


def test_errors_of_elements_are_averaged():
    plain = Plain("uniform+min_snr")
    plain.timesteps(IMAGES)
    elements = torch.rand(8, 3, 4, 5)
    torch.testing.assert_close(plain.timesteps.loss(elements), plain.timesteps.loss(elements.mean((1, 2, 3))))


def test_several_times_of_a_sample_have_weights_of_samples_or_of_times():
    plain = Plain("log_normal+min_snr")
    t = plain.timesteps(IMAGES, times=(3,))
    errors, weights = torch.rand(8, 3), torch.rand(8)
    explicit = Strategy("log_normal+min_snr")
    draw = explicit.draw(IMAGES, times=(3,))
    assert equal_bits(t, draw.t)
    expected = (explicit.weighted(draw, errors) * weights[:, None]).mean()
    assert equal_bits(plain.timesteps.loss(errors, weights=weights), expected)
    assert equal_bits(plain.timesteps.loss(errors, weights=weights[:, None].expand(8, 3)), expected)


def test_the_weights_attribute_contains_the_weights_of_the_loss():
    plain = Plain("log_normal+min_snr", sampler={"importance": True})
    with pytest.raises(ConfigError, match="weights: got no draw"):
        _ = plain.timesteps.weights
    plain.timesteps(IMAGES)
    errors = torch.rand(8)
    assert equal_bits(plain.timesteps.loss(errors), (errors * plain.timesteps.weights).mean())
    plain.network.eval()
    plain.timesteps(IMAGES)
    assert equal_bits(plain.timesteps.weights, torch.ones(()))


@pytest.mark.parametrize("name", ["loss_rms", "info_rate+coarse_to_fine", "loss_second_moment"])
def test_weights_change_only_the_gradient_and_masks_only_the_statistics(name):
    """The statistics ignore samples whose mask is False; the gradient is that of all samples."""
    mask, weights = torch.arange(8) < 5, torch.rand(8)
    plain, masked, weighted, fewer = (Plain(name) for _ in range(4))
    errors = torch.rand(8, generator=torch.Generator().manual_seed(0))
    losses = {}
    for trainer, arguments in ((plain, {}), (masked, {"mask": mask}), (weighted, {"weights": weights})):
        t = trainer.timesteps(IMAGES)
        scale = trainer.network.layer.bias * 0 + 1
        losses[trainer] = trainer.timesteps.loss(errors * scale, **arguments)
        losses[trainer].backward()
        trainer.optimizer.step()
    assert equal_bits(losses[plain], losses[masked])
    assert equal_bits(plain.state, weighted.state) and not equal_bits(plain.state["sampler"], masked.state["sampler"])
    draw = fewer.timesteps.strategy.draw(IMAGES).rows(0, 5)
    fewer.timesteps.strategy.loss(draw, errors[:5])
    with fewer.timesteps.strategy.observe(draw):
        pass
    assert equal_bits(fewer.state["sampler"], masked.state["sampler"]) and len(t) == 8
    assert equal_bits(fewer.state["weighting"], masked.state["weighting"])


@pytest.mark.parametrize(
    ("errors", "arguments", "words"),
    [
        (torch.ones(7), {}, r"got shape \(7,\)"),
        (torch.ones(()), {}, r"got shape \(\)"),
        (torch.ones(8), {"weights": torch.ones(7)}, r"weights: got shape \(7,\), allowed: \(8,\)"),
        (torch.ones(8), {"weights": torch.ones(8, 1, 1)}, r"weights: got shape \(8, 1, 1\), allowed: \(8,\)"),
        (torch.ones(8), {"mask": torch.ones(8)}, r"mask: got torch.float32, shape \(8,\), allowed: bool, \(8,\)"),
        (torch.ones(8), {"mask": torch.ones(7, dtype=torch.bool)}, r"mask: got .*\(7,\), allowed: bool, \(8,\)"),
    ],
)
def test_losses_weights_and_masks_of_wrong_shapes_are_rejected(errors, arguments, words):
    plain = Plain()
    plain.timesteps(IMAGES)
    with pytest.raises(ConfigError, match=words):
        plain.timesteps.loss(errors, **arguments)


def test_a_loss_needs_a_draw():
    with pytest.raises(ConfigError, match=r"loss: got no draw"):
        Plain().timesteps.loss(torch.ones(8))


# Validation


def validation(plain, batches=4, count=5):
    """Run a validation; returns its times and its loss."""
    plain.network.eval()
    with torch.no_grad():
        times = torch.cat([plain.timesteps(IMAGES[:count]) for _ in range(batches)])
        loss = plain.timesteps.loss(plain.errors(times[-count:]))
    plain.network.train()
    return times, loss


@pytest.mark.parametrize(("process", "time"), [("linear", None), ("flow", "data_is_one"), ("edm", None)])
def test_validations_have_equal_even_times_and_change_nothing(process, time):
    plain, other = Plain("loss_rms+min_snr", process, time=time), Plain("loss_rms+min_snr", process, time=time)
    other.network.load_state_dict(plain.network.state_dict())
    seen = []
    for _ in range(3):
        plain.step()
        other.step()
        seen.append(validation(plain, batches=10)[0])
        assert equal_bits(plain.state, other.state)
    assert equal_bits(seen[0], seen[1]) and equal_bits(seen[0], seen[2])
    fractions = plain.timesteps.time.process.fractions(plain.timesteps.time.to_process(seen[0]))
    counts = torch.histc(fractions, bins=8, min=0, max=1)
    assert counts.sum() == 50 and counts.min() >= 4 and counts.max() <= 9


def test_a_validation_loss_is_the_plain_mean():
    plain = Plain("loss_rms+min_snr")
    times, loss = validation(plain)
    assert equal_bits(loss, plain.errors(times[-5:]).mean().detach())


@pytest.mark.parametrize("index", [range(8), torch.arange(8)])
def test_indices_without_a_total_are_those_of_the_batch_also_in_a_validation(index):
    timesteps = Plain("uniform").timesteps
    timesteps.network.eval()
    t, later = timesteps(IMAGES, index=index), timesteps(IMAGES, index=index)
    other = Plain("uniform").timesteps
    other.network.eval()
    assert equal_bits(t, other(IMAGES)) and equal_bits(later, other(IMAGES))


def test_indices_beyond_the_total_are_rejected_in_a_validation():
    timesteps = Plain("uniform").timesteps
    timesteps.network.eval()
    with pytest.raises(ConfigError, match=r"index: got range\(8, 16\), allowed: .* 0 to 7"):
        timesteps(IMAGES, index=range(8, 16))
    slices = [timesteps(IMAGES, index=range(start, start + 8), total=16) for start in (0, 8)]
    assert len({*torch.cat(slices).tolist()}) == 16


class Wrapped(nn.Module):
    """A wrapper such as DistributedDataParallel, whose modes the network inside follows."""

    def __init__(self):
        super().__init__()
        self.module = TinyNetwork()

    def forward(self, x_t, t):
        return self.module(x_t, t)


@pytest.mark.parametrize(
    ("attached", "evaluated", "gradients", "validation"),
    [
        # network given to attach, network whose method eval is called, gradients: is it a validation
        ("network", None, torch.enable_grad, False),
        ("network", None, torch.no_grad, False),
        ("network", "network", torch.no_grad, True),
        ("network", "network", torch.enable_grad, True),
        ("network", "wrapper", torch.no_grad, True),
        ("wrapper", "wrapper", torch.no_grad, True),
        ("wrapper", "network", torch.no_grad, False),
        (None, None, torch.enable_grad, False),
        (None, None, torch.no_grad, True),
        (None, None, torch.inference_mode, True),
        (None, "network", torch.enable_grad, False),
        ("function", "network", torch.enable_grad, False),
        ("function", None, torch.no_grad, True),
    ],
)
def test_the_mode_of_the_given_network_decides_what_a_validation_is(attached, evaluated, gradients, validation):
    """A training draw counts as used even if its loss has no gradient; a draw of a validation changes nothing."""
    wrapper = Wrapped()
    networks = {"network": wrapper.module, "wrapper": wrapper, "function": lambda x_t, t: wrapper(x_t, t), None: None}
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    timesteps = attach("loss_rms+min_snr", "linear", optimizer, networks[attached])
    before = copy.deepcopy(timesteps.strategy.state_dict())
    if evaluated:
        networks[evaluated].eval()
    with gradients():
        t = timesteps(IMAGES)
        errors = (wrapper(IMAGES, t) - 1).square().mean((1, 2, 3))
        loss = timesteps.loss(errors)
    draw = Strategy("loss_rms+min_snr").draw(IMAGES)
    assert equal_bits(t, draw.t) is not validation
    assert equal_bits(loss.detach(), errors.mean().detach()) is validation
    assert equal_bits(timesteps.strategy.state_dict(), {**before, "drawn": [0 if validation else len(IMAGES), 0]})
    wrapper.train()
    later = timesteps(IMAGES)
    assert equal_bits(later, draw.t) is validation
    timesteps.loss((wrapper(IMAGES, later) - 1).square().mean((1, 2, 3))).backward()
    optimizer.step()
    taken = timesteps.strategy.sampler._sums[1].sum().item()
    assert taken == pytest.approx(len(IMAGES), rel=0.1)  # the loss without a gradient is not learned from


def test_training_with_draws_in_evaluation_mode_alone_is_an_error():
    plain = Plain()
    plain.network.eval()
    plain.errors(plain.timesteps(IMAGES)).mean().backward()
    with pytest.raises(ConfigError, match=r"draws of a validation alone, allowed: a training draw"):
        plain.optimizer.step()


# Conventions of time

SHIFTED = kairos_timesteps.Flow(shift=3.0, time_scale=1000.0)
CONVENTIONS = {
    "noise_is_one": lambda x0, noise, t: (1 - t) * x0 + t * noise,
    "data_is_one": lambda x0, noise, t: t * x0 + (1 - t) * noise,
}


def batch_of(time, process="flow", name="log_normal", dtype=torch.float32):
    timesteps = attach(name, process, torch.optim.SGD(TinyNetwork().parameters(), lr=0.1), time=time)
    x0 = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return timesteps, x0, noise, timesteps(x0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainer", CONVENTIONS)
@pytest.mark.parametrize("time", CONVENTIONS)
def test_a_wrong_convention_is_caught(time, trainer, dtype):
    timesteps, x0, noise, t = batch_of(time, dtype=dtype)
    assert t.dtype == torch.float32
    x_t = CONVENTIONS[trainer](x0, noise, t.view(-1, 1, 1, 1)).to(dtype)
    if time == trainer:
        timesteps.check(x0, noise, x_t, t)
    else:
        with pytest.raises(ConfigError, match=rf"check: x_t: .*with time='{time}'; time='{trainer}' fits"):
            timesteps.check(x0, noise, x_t, t)


def test_conventions_of_flow_are_mirror_images():
    first, second = batch_of("noise_is_one")[3], batch_of("data_is_one")[3]
    torch.testing.assert_close(first, 1 - second)


def test_an_index_of_a_flow_matching_scheduler_selects_its_sigma():
    """Diffusers' scripts look up timesteps[index]: sigmas fall from 1, shift included."""
    sigmas = torch.linspace(1000, 1, 1000, dtype=torch.float64) / 1000
    sigmas = 3 * sigmas / (1 + 2 * sigmas)
    timesteps, x0, noise, index = batch_of("index", SHIFTED)
    assert index.dtype == torch.int64
    continuous = batch_of("noise_is_one", SHIFTED)[3]
    assert (sigmas[index] - continuous).abs().max() < 3.1e-3  # a cell is up to 3/1000 wide
    sigma = sigmas[index].float().view(-1, 1, 1, 1)
    timesteps.check(x0, noise, (1 - sigma) * x0 + sigma * noise, index)
    with pytest.raises(ConfigError, match="check: x_t"):
        timesteps.check(x0, noise, sigma * x0 + (1 - sigma) * noise, index)


def test_another_schedule_is_caught():
    timesteps, x0, noise, t = batch_of(None, "scaled_linear", "uniform")
    for schedule, fits in (("scaled_linear", True), ("linear", False), ("cosine", False)):
        x_t = Strategy("uniform", schedule).process.noised(x0, noise, t)
        if fits:
            timesteps.check(x0, noise, x_t, t)
            timesteps.check(x0, noise, 3 * x_t, t)
        else:
            with pytest.raises(ConfigError, match="check: x_t: got ln SNR"):
                timesteps.check(x0, noise, x_t, t)


def test_other_images_are_caught():
    timesteps, x0, noise, t = batch_of(None, "cosine", "uniform")
    with pytest.raises(ConfigError, match=r"check: x_t: got \d+%"):
        timesteps.check(x0.flip(0), noise, timesteps.strategy.process.noised(x0, noise, t), t)


@pytest.mark.parametrize(
    ("process", "time", "words"),
    [
        ("flow", None, r"time of process Flow: got None, allowed: noise_is_one \(kohya.*data_is_one \(SiT"),
        ("vp", None, "time of process Vp: got None, allowed: noise_is_one"),
        ("flow", "index", "time of process Flow: got 'index', allowed: noise_is_one"),
        ("linear", "noise_is_one", "time of process Discrete: got 'noise_is_one', allowed: index"),
        ("edm", "index", "time of process Edm: got 'index', allowed: sigma"),
    ],
)
def test_conventions_that_the_process_lacks_are_rejected(process, time, words):
    with pytest.raises(ConfigError, match=words):
        attach("uniform", process, torch.optim.SGD(TinyNetwork().parameters(), lr=0.1), time=time)


def test_the_time_convention_and_the_noise_levels_are_logged(caplog):
    with caplog.at_level(logging.INFO, "kairos_timesteps"):
        Plain("log_normal+min_snr", "flow", time="data_is_one")
    first, second = (record.getMessage() for record in caplog.records)
    assert "t = 0.1 (data_is_one) is x_t = 0.1 x0 + 0.9 noise, ln SNR -4.39" in first
    normal = 1.2815515655446004  # 0.9 quantile; ln SNR of log_normal is -2 logit(t)
    low, high = (float(word) for word in second.split("ln SNR ")[1].split(",")[0].split(" to "))
    assert low == pytest.approx(-2 * normal, abs=0.02) and high == pytest.approx(2 * normal, abs=0.02)
    strategy = Strategy("log_normal+min_snr", "flow")
    table = strategy.table()
    assert float(second.rpartition("mean weight ")[2]) == pytest.approx((table["p"] * table["w"]).sum(), rel=1e-2)


def test_noise_levels_that_depend_on_context_are_logged_with_the_first_draw(caplog):
    with caplog.at_level(logging.INFO, "kairos_timesteps"):
        density = {"density": "log_normal", "law": "exponential"}
        plain = Plain("shift", "flow", time="noise_is_one", sampler=density)
        assert len(caplog.records) == 1
        plain.timesteps(IMAGES, tokens=torch.full((8,), 4096))
        plain.timesteps(IMAGES, tokens=4096)
    assert len(caplog.records) == 2 and "80 % of the draws" in caplog.records[1].getMessage()


# Strategies that measure the network


class Conditional(nn.Module):
    """Network with the call signature of a trainer and a condition for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Conv2d(1, 1, 3, padding=1), nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        shift = self.factor * encoder_hidden_states[:, :1].mean(1) + 0.1 * timestep.float()
        return {"sample": self.layer(hidden_states) + shift.view(-1, 1, 1, 1)}


@pytest.mark.parametrize("mask", [None, torch.arange(4) < 3])
def test_a_measurement_calls_the_network_as_the_trainer_does(mask):
    """The trainer's t = 1 is data and its output x0 - noise; a process converts both for the explicit form."""
    text = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))

    class Reversed(kairos_timesteps.Flow):
        def predict(self, network, x_t, t, conditions=None):
            return -network(x_t, (1 - t).float(), conditions["text"])["sample"]

    def train(attached):
        network = Conditional()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        options = {"frequency": 1, "start": 1, "bins": 4}
        time = TimeConvention(kairos_timesteps.Flow(), "data_is_one")
        if attached:
            timesteps = attach(
                "gradient_norm", "flow", optimizer, network, time="data_is_one", sampler=options,
                predict=lambda x_t, t, text: network(x_t, timestep=t, encoder_hidden_states=text)["sample"],
            )  # fmt: skip
            strategy = timesteps.strategy
        else:
            strategy = Strategy("gradient_norm", Reversed(), sampler=options)
        for step in range(4):
            draws = []
            for half in (slice(0, 4), slice(4, 8)):
                x0, noise = IMAGES[half], torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(step))
                if attached:
                    t = timesteps(x0, conditions={"text": text[half]})
                else:
                    draws.append(strategy.draw(x0))
                    t = time.to_trainer(draws[-1].t)
                x_t = CONVENTIONS["data_is_one"](x0, noise, t.view(-1, 1, 1, 1))
                errors = (network(x_t, t, text[half])["sample"] - (x0 - noise)).square().mean((1, 2, 3))
                loss = timesteps.loss(errors, mask=mask) if attached else strategy.loss(draws[-1], errors, mask)
                loss.backward(retain_graph=True)
                loss.backward()  # two passes through one loss are one micro-batch
            if attached:
                optimizer.step()
            else:
                with strategy.observe(draws, network, optimizer, {"text": text}):
                    optimizer.step()
            optimizer.zero_grad()
        return strategy.state_dict(), network.state_dict()

    assert equal_bits(train(True), train(False))


@pytest.mark.parametrize(
    ("first", "second"),
    [(("text", "size"), ("text",)), (("text",), ("text", "size")), (("text",), ("size",)), (("text",), None)],
)
def test_micro_batches_with_conditions_of_different_names_are_rejected(first, second):
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    timesteps = attach(
        "gradient_norm", "linear", optimizer, network, sampler={"start": 1, "frequency": 1},
        predict=lambda x_t, t, **conditions: network(x_t, t),
    )  # fmt: skip
    for names in (first, second):
        conditions = None if names is None else {name: torch.zeros(8, 2) for name in names}
        t = timesteps(IMAGES, conditions=conditions)
        timesteps.loss((network(IMAGES, t) - 1).square().mean((1, 2, 3))).backward()
    with pytest.raises(ConfigError, match=r"conditions.*got .*text.*allowed: .*same names"):
        optimizer.step()


@pytest.mark.parametrize("name", MEASURING)
def test_without_predict_a_strategy_that_measures_is_rejected(name):
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for arguments in ({"network": network}, {"predict": network}, {}):
        with pytest.raises(ConfigError, match=rf"{name} measures the network.*predict=.*conditions"):
            attach(name, "linear", optimizer, **arguments)
    assert isinstance(attach(name, "linear", optimizer, network, predict=network), Attached)


# Trainers whose steps do not run the hooks


@pytest.mark.parametrize(
    ("optimizer", "network", "words"),
    [
        ([1, 2], None, "got 2 optimizers, allowed: one torch.optim.Optimizer; use the explicit form"),
        (types.SimpleNamespace(), None, "got SimpleNamespace, allowed: one torch.optim.Optimizer; use the explicit"),
        (None, type("Engine", (), {"__module__": "deepspeed.runtime.engine"})(), "got DeepSpeed.*explicit form"),
    ],
)
def test_optimizers_that_run_no_hooks_are_rejected(optimizer, network, words):
    optimizer = optimizer or torch.optim.SGD(TinyNetwork().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        attach("uniform", "linear", optimizer, network)


def test_a_step_within_the_backward_pass_is_rejected():
    network = TinyNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network.time.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"steps within the backward pass .*Strategy.draw"):
        attach("uniform", "linear", optimizer, network)


def test_many_losses_without_an_observed_step_are_an_error():
    plain = Plain()
    with pytest.raises(ConfigError, match="explicit form"):
        for _ in range(300):
            plain.timesteps.loss(plain.errors(plain.timesteps(IMAGES))).backward()
            plain.optimizer.zero_grad()


def trained_by(optimizer, plain, steps, name="loss_rms", accumulate=1):
    """Train a network by an optimizer that is not the attached one."""
    for number in range(steps * accumulate):
        errors = plain.errors(plain.timesteps(IMAGES))
        (plain.timesteps.loss(errors) if name == "loss_rms" else errors.mean()).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["uniform", "loss_rms"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_a_rebuilt_optimizer_are_an_error(name, accumulate):
    """A trainer that builds its optimizer again, or copies it without its parameters."""
    plain = Plain(name)
    plain.step()
    for optimizer in (torch.optim.Adam(plain.network.parameters()), copy.copy(plain.optimizer)):
        with pytest.raises(ConfigError, match=r"another (Adam|SGD) took steps of its parameters.*copy.deepcopy"):
            trained_by(optimizer, plain, 4, name, accumulate)
        plain.timesteps.load_state_dict(plain.timesteps.state_dict())


def copied(plain):
    """Return a network and an optimizer that were copied together."""
    network, optimizer = copy.deepcopy((plain.network, plain.optimizer))
    other = copy.copy(plain)
    other.network, other.optimizer = network, optimizer
    return other


def test_a_network_and_an_optimizer_that_were_copied_together_are_an_error_or_a_warning(caplog):
    """Their losses leave no gradient in the attached optimizer; without losses, steps of others remain as evidence."""
    learned, fixed = copied(Plain("loss_rms")), copied(Plain("uniform"))
    with pytest.raises(ConfigError, match=r"gradients of 200 steps vanished.*copy.deepcopy"):
        trained_by(learned.optimizer, learned, 250)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kairos_timesteps"):
        trained_by(fixed.optimizer, fixed, 250, "uniform")
    (record,) = caplog.records
    assert "SGD took steps of other parameters" in record.getMessage() and "copy.deepcopy" in record.getMessage()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_copied_strategy_evaluates_but_draws_no_training_timesteps(duplicate):
    """Copies for an exponential moving average contain the strategy of a network that has it as an attribute."""
    plain = Plain()
    plain.step()
    network, optimizer, timesteps = duplicate((plain.network, plain.optimizer, plain.timesteps))
    network.eval()
    assert equal_bits(timesteps(IMAGES), validation(plain, batches=1, count=8)[0])
    network.train()
    with pytest.raises(ConfigError, match=r"copy of an attached strategy.*load_state_dict"):
        timesteps(IMAGES)
    again = attach("loss_rms", "linear", optimizer, network)
    again.load_state_dict(timesteps.state_dict())
    assert equal_bits(again(IMAGES), plain.timesteps(IMAGES))


@pytest.mark.parametrize("fused", mark_long([True, False], [True]))
def test_other_optimizers_and_skipped_steps_are_no_copies(fused, caplog):
    """No error and no warning, although other optimizers take steps between the draws of an accumulated step.

    The attached optimizer is a wrapper whose inner optimizer has its parameters. A discriminator is trained on every
    micro-batch, and GradScaler skips 60 successive steps.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    network, discriminator = TinyNetwork(), nn.Linear(1, 1)
    inner = torch.optim.AdamW(network.parameters(), fused=fused)
    discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    optimizer = inner if fused else Wrapper(inner)
    timesteps = attach("loss_rms+edm2", "linear", optimizer, network, weighting={"channels": 8})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    with caplog.at_level(logging.WARNING, "kairos_timesteps"):
        for step in range(100):
            for _ in range(5):
                errors = (network(IMAGES, timesteps(IMAGES)) - 1).square().mean((1, 2, 3))
                scaler.scale(timesteps.loss(errors * (math.inf if step < 60 else 1.0))).backward()
                discriminator(torch.ones(1, 1)).sum().backward()
                discriminator_optimizer.step()
            network.eval()
            timesteps(IMAGES)
            network.train()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    timesteps.state_dict()
    assert timesteps.strategy.step == 40 and not caplog.records


def test_a_state_of_another_strategy_or_convention_is_rejected():
    state = Plain("loss_rms", "flow", time="data_is_one").timesteps.state_dict()
    with pytest.raises(ConfigError, match="state: time: got 'data_is_one', allowed: 'noise_is_one'"):
        Plain("loss_rms", "flow", time="noise_is_one").timesteps.load_state_dict(state)
    with pytest.raises(ConfigError, match="state: name: got 'loss_rms', allowed: 'uniform'"):
        Plain("uniform", "flow", time="data_is_one").timesteps.load_state_dict(state)


def test_attach_stays_a_function_when_its_module_is_imported():
    assert kairos_timesteps.attach is attach and callable(kairos_timesteps.attach)


# torch.distributed.checkpoint


POLICY = Specification({"name": "adaptive", "frequency": 1, "feature_timesteps": 5, "width": 4}, {"name": "edm2"})
NOISE = Specification({"name": "info_noise", "frequency": 1, "start": 1})


IN_ONE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(values, folder):
    import torch.distributed.checkpoint as checkpoint  # takes a second

    checkpoint.save(values, storage_writer=checkpoint.FileSystemWriter(folder))


def load(values, folder):
    import torch.distributed.checkpoint as checkpoint

    checkpoint.load(values, storage_reader=checkpoint.FileSystemReader(folder))


@IN_ONE_PROCESS
@pytest.mark.parametrize("without_backward", [True, False])
@pytest.mark.parametrize("specification", [LEARNS, POLICY, NOISE], ids=sampler_name)
def test_a_distributed_checkpoint_within_a_step_contains_the_last_complete_step(
    specification, without_backward, tmp_path
):
    """A resume equals the training that drops the unfinished step, which a draw alone or a micro-batch began."""
    trainer = Trainer(specification, True)
    for _ in range(2):
        trainer.batch()
        trainer.step()
    learned = copy.deepcopy(trainer.timesteps.state_dict()["strategy"])
    trainer.batch(backward=not without_backward)
    save({"timesteps": PackedState(trainer.timesteps), "network": trainer.network.state_dict()}, tmp_path)
    resumed = Trainer(specification, True)
    network = resumed.network.state_dict()
    load({"timesteps": PackedState(resumed.timesteps), "network": network}, tmp_path)
    resumed.network.load_state_dict(network)
    state = resumed.timesteps.state_dict()["strategy"]
    assert equal_bits({**state, "drawn": 0}, {**learned, "drawn": 0}) and state["drawn"] == [COUNT, 2 * COUNT]
    resumed.batches = trainer.batches
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    trainer.optimizer.zero_grad()
    trainer.t, trainer.losses = [], []
    for continued in (trainer, resumed):
        for _ in range(2):
            continued.batch()
            continued.step()
    assert equal_bits(resumed.results(), trainer.results())


@IN_ONE_PROCESS
def test_a_distributed_checkpoint_without_values_that_were_learned_is_rejected(tmp_path):
    """torch.distributed.checkpoint restores only values that exist before the load: here no policy of `adaptive`."""
    trainer, resumed = Trainer(POLICY, True), Trainer(POLICY, True)
    trainer.batch()
    trainer.step()
    save({"timesteps": trainer.timesteps}, tmp_path)
    with pytest.raises(ConfigError, match=r"state: got no .*sampler.policy.*PackedState"):
        load({"timesteps": resumed.timesteps}, tmp_path)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("specification", [Specification(), LEARNS, MEASURES], ids=sampler_name)
def test_the_step_that_creates_the_optimizers_state_is_not_counted(specification, train):
    """torch.distributed.checkpoint calls `step` with gradients and learning rates of 0 before the first save."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # takes a second

    results = []
    for saved in (True, False):
        trainer = Trainer(
            specification,
            True,
            optimizer=lambda *arguments, **options: torch.optim.SGD(*arguments, **options, momentum=0.9),
        )
        trainer.batch(train=train, backward=False)
        if saved:
            assert get_optimizer_state_dict(trainer.network, trainer.optimizer)["state"]
        for _ in range(2):
            trainer.batch()
            trainer.step()
        results.append(trainer.results())
    assert results[0]["state"]["step"] == 2 and equal_bits(*results)


# accelerate


@pytest.mark.trainers
@pytest.mark.parametrize("resume", [None, 1, 3])
def test_accelerate_accumulates_and_stores_the_state(tmp_path, resume):
    accelerate = pytest.importorskip("accelerate")

    def build():
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        network = TinyNetwork()
        network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.1))
        options = {"frequency": 1, "start": 1}
        timesteps = attach("loss_rms", "linear", optimizer, network, sampler=options, accelerator=accelerator)
        return accelerator, network, optimizer, timesteps

    accelerator, network, optimizer, timesteps = build()
    explicit = Strategy("loss_rms", "linear", sampler={"frequency": 1, "start": 1})
    draws = []
    for number in range(10):
        x0 = IMAGES[number % 2 * 4 :][:4]
        with accelerator.accumulate(network):
            t = timesteps(x0)
            draws.append(explicit.draw(x0))
            assert equal_bits(t, draws[-1].t)
            errors = (network(x0, t) - 1).square().mean((1, 2, 3))
            loss = timesteps.loss(errors)
            assert equal_bits(loss, explicit.loss(draws[-1], errors))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:
            with explicit.observe(draws):
                draws = []
            if number // 2 == resume:
                accelerator.save_state(tmp_path / "state")
                accelerator, network, optimizer, timesteps = build()
                accelerator.load_state(tmp_path / "state")
        assert equal_bits(timesteps.strategy.state_dict(), explicit.state_dict())


# Several ranks


def train_with_fsdp(attached, synchronised):
    """Accumulate two micro-batches with fully_shard, which reduces gradients once or twice a step."""
    import torch.distributed.fsdp  # takes a second

    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        return {}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    torch.distributed.fsdp.fully_shard(network, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"frequency": 1, "start": 1}
    strategy = Strategy("loss_rms", sampler=options)
    timesteps = attach("loss_rms", "linear", optimizer, network, sampler=options) if attached else None
    for _ in range(3):
        for micro_batch in range(2):
            network.set_requires_gradient_sync(synchronised or micro_batch == 1)
            x0 = IMAGES[rank() * 4 :][:4].flatten(1)
            draw = None if attached else strategy.draw(x0)
            t = timesteps(x0) if attached else draw.t
            errors = (network(x0 + t[:, None] / 1000) - x0).square().mean(1)
            (timesteps.loss(errors) if attached else strategy.loss(draw, errors)).backward()
        if attached:
            optimizer.step()
        else:
            with strategy.observe(draw):
                optimizer.step()
        optimizer.zero_grad()
    return timesteps.state_dict()["strategy"] if attached else strategy.state_dict()


def train_with_masks():
    """Train with masks on one rank or two; returns the state."""
    strategy = Strategy("loss_rms", sampler={"frequency": 1, "start": 1})
    mask = torch.tensor([True, False, False, True, False, True, True, True])
    count = 8 // ranks()
    rows = slice(rank() * count, (rank() + 1) * count)
    for _ in range(3):
        draw = strategy.draw(IMAGES[rows])
        strategy.loss(draw, 1 + draw.fractions.float(), mask[rows])
        with strategy.observe(draw):
            pass
    return strategy.state_dict()


def resume_on_two_ranks(specification, group, folder):
    """Compare a training run with its resume from a distributed checkpoint; returns the state at the checkpoint."""

    def train_two_steps(trainer):
        for _ in range(2):
            trainer.batch()
            for parameter in trainer.network.parameters():
                torch.distributed.all_reduce(parameter.grad)
            trainer.step()

    trainer, resumed = (Trainer(specification, True, process_group=group) for _ in range(2))
    trainer.batches = rank()
    train_two_steps(trainer)
    save({"timesteps": PackedState(trainer.timesteps), "network": trainer.network.state_dict()}, folder)
    saved = copy.deepcopy(trainer.timesteps.state_dict())
    network = resumed.network.state_dict()
    load({"timesteps": PackedState(resumed.timesteps), "network": network}, folder)
    resumed.network.load_state_dict(network)
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    resumed.batches = trainer.batches
    trainer.t, trainer.losses = [], []
    for continued in (trainer, resumed):
        train_two_steps(continued)
    return {"equal": equal_bits(resumed.results(), trainer.results()), "saved": saved}


def train_on_two_ranks(specifications, resumed, folder):
    """Train each specification attached and explicit; ranks have different images and masks.

    The specifications `resumed` are trained once more with a resume from a checkpoint in `folder`.
    """
    group = torch.distributed.new_group([0, 1])
    results = []
    for specification in specifications:
        pair = []
        for attached in (True, False):
            trainer = Trainer(specification, attached, process_group=group)
            trainer.batches = rank()
            for step in range(3):
                for micro_batch in range(2):
                    mask = torch.arange(COUNT) <= rank() + micro_batch if step == 1 else None
                    trainer.batch(mask=mask)
                for parameter in trainer.network.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                if step == 1 and attached:
                    trainer.batch(train=False)
                    trainer.network.train()
                trainer.step()
            pair.append(trainer.results())
        results.append({"equal": equal_bits(*pair), "state": pair[0]["state"], "t": torch.stack(pair[0]["t"])})
    sharded = []
    for synchronised in (True, False):
        sharded.append(equal_bits(train_with_fsdp(True, synchronised), train_with_fsdp(False, synchronised)))
    resumes = []
    for number, specification in enumerate(resumed):
        resumes.append(resume_on_two_ranks(specification, group, folder / str(number)))
    return {"trainings": results, "sharded": sharded, "masked": train_with_masks(), "resumes": resumes}


def small_sampler(name):
    """Return a sampler with options for a few steps."""
    small_options = {
        "frequency": 1,
        "start": 1,
        "history": 1,
        "feature_timesteps": 5,
        "width": 4,
        "bins": 4,
        "min_count": 1,
    }
    if name in ("loss_rms", "loss_mean", "info_rate"):
        small_options["width"] = 0.1
    if name == "by_group":
        small_options["parts"] = [{"name": "uniform", "group": "all"}]
    fields = SAMPLERS[name].component.options
    return {"name": name, **{key: value for key, value in small_options.items() if key in fields}}


@pytest.mark.long
@IN_ONE_PROCESS
def test_two_ranks_equal_the_explicit_form_and_each_other(tmp_path):
    cases = [Specification(small_sampler(name)) for name in sorted(SAMPLERS)]
    cases += [Specification(weighting={"name": name}) for name in ("min_snr", "edm2", "coarse_to_fine")]
    resumed = [LEARNS, POLICY, NOISE]
    first, second = rank_groups.run(train_on_two_ranks, tmp_path, 2, cases, resumed, tmp_path / "checkpoints")
    assert first["sharded"] == second["sharded"] == [True, True]
    assert equal_bits(first["masked"], train_with_masks()) and equal_bits(second["masked"], train_with_masks())
    for case, one, other in zip(cases, first["trainings"], second["trainings"]):
        with rank_groups.case(repr(case)):
            assert one["equal"] and other["equal"]
            assert equal_bits(one["state"], other["state"])
            assert not equal_bits(one["t"], other["t"])
    for number, (case, one, other) in enumerate(zip(resumed, first["resumes"], second["resumes"], strict=True)):
        with rank_groups.case(f"resume of {case!r}"):
            assert one["equal"] and other["equal"]
            on_one_rank = Trainer(case, True)
            load({"timesteps": PackedState(on_one_rank.timesteps)}, tmp_path / "checkpoints" / str(number))
            assert equal_bits(on_one_rank.timesteps.state_dict(), one["saved"])


def test_a_scheduler_that_changes_its_prediction_type_after_attach_is_rejected():
    """Scripts of diffusers set ``--prediction_type`` in the loop, between the draw and the target."""
    config = types.SimpleNamespace(prediction_type="epsilon")
    scheduler = types.SimpleNamespace(config=config, alphas_cumprod=torch.linspace(0.99, 0.01, 20))
    network = TinyNetwork()
    timesteps = attach("uniform+min_snr", scheduler, torch.optim.Adam(network.parameters()), network)
    for prediction_type in ("epsilon", "v_prediction"):
        timesteps(IMAGES[:COUNT])
        config.prediction_type = prediction_type
        errors = network(IMAGES[:COUNT], torch.zeros(COUNT)).square().flatten(1).mean(1)
        if prediction_type == "epsilon":
            timesteps.loss(errors).backward()
        else:
            with pytest.raises(ConfigError, match=r"prediction_type.*v_prediction.*epsilon"):
                timesteps.loss(errors)


def test_a_range_of_every_second_sample_draws_for_these_samples():
    strategy = Strategy("uniform", "cosine")
    whole = strategy.draw(IMAGES, index=range(8), total=8).t
    strategy = Strategy("uniform", "cosine")
    odd = strategy.draw(IMAGES[1::2], index=range(1, 8, 2), total=8).t
    assert torch.equal(odd, whole[1::2])
    assert len(Strategy("uniform", "cosine").draw(IMAGES[:0], index=range(8, 8, 2), total=8).t) == 0


def test_a_loss_without_a_gradient_is_not_observed():
    states = []
    for logged in (False, True):
        trainer = Trainer(LEARNS, True)
        for _ in range(3):
            trainer.network.train()
            trainer.timesteps(IMAGES[:COUNT])
            errors = trainer.network(IMAGES[:COUNT], torch.zeros(COUNT)).square().flatten(1).mean(1)
            loss = trainer.timesteps.loss(errors)
            if logged:
                trainer.timesteps.loss(errors.detach() * 0 + 7)
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        states.append(trainer.timesteps.state_dict()["strategy"]["sampler"])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("other", [{"seed": 1}, {"sampler": {"decay": 0.5}}, {"weighting": {"channels": 4}}])
def test_a_state_of_other_settings_is_rejected(other):
    def attached(seed=0, sampler=None, weighting=None):
        network = TinyNetwork()
        optimizer = torch.optim.Adam(network.parameters())
        options = {"sampler": sampler, "weighting": weighting or {"channels": 8}}
        return attach("loss_rms+edm2", "cosine", optimizer, network, seed=seed, **options)

    state = attached().state_dict()
    attached().load_state_dict(state)
    with pytest.raises(ConfigError, match=f"state: {next(iter(other))}"):
        attached(**other).load_state_dict(state)
    with pytest.raises(ConfigError, match="state: name"):
        attached().load_state_dict({})


def test_weights_of_frames_apply_in_a_validation():
    network = TinyNetwork()
    timesteps = attach("uniform", "cosine", torch.optim.Adam(network.parameters()), network)
    network.eval()
    t = timesteps(torch.zeros(4, 3, 2, 2), times=(3,))
    assert t.shape == (4, 3)
    errors, weights = torch.rand(4, 3, 2, 2), torch.rand(4, 3)
    expected = (errors.mean((2, 3)) * weights).mean()
    torch.testing.assert_close(timesteps.loss(errors, weights=weights), expected)


@pytest.mark.parametrize("t", [torch.full((4,), 1000.0), torch.full((4,), -0.1), torch.rand(4, 3)])
def test_check_rejects_times_outside_the_convention(t):
    convention = TimeConvention(kairos_timesteps.Flow(), "noise_is_one")
    with pytest.raises(ConfigError, match="check: t"):
        convention.check(torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3), t)


@pytest.mark.parametrize("name", ["uniform", "loss_rms"])
def test_a_validation_between_a_draw_and_its_loss_is_an_error(name):
    network = TinyNetwork()
    timesteps = attach(name, "cosine", torch.optim.Adam(network.parameters()), network)
    timesteps(IMAGES[:COUNT])
    network.eval()
    timesteps(IMAGES[:COUNT])
    network.train()
    with pytest.raises(ConfigError, match="draw of a validation"):
        timesteps.loss(torch.ones(COUNT, requires_grad=True))
