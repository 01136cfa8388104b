"""One layer kind at a time against one backward per record, and rules of one's own."""

import pytest
import torch
from cases import Case, IdentityProjections, brute_force, brute_force_norms, check_against_brute_force, make
from torch import nn

from dprc_lightning import attach
from dprc_lightning.errors import InvalidArgumentError, LossShapeError, UnsupportedModuleError
from dprc_lightning.layers import BroadcastRule, LayerRule, PerRecordRule, register_rule, unregister_rule

# The norm's floor is twice as many units of rounding as there are positions, here up to 72.
RELATIVE = 5e-5


class Wrapped(nn.Module):
    """A layer between two others, whose gradients depend on it."""

    def __init__(self, layer, inputs, outputs):
        super().__init__()
        self.before = nn.Linear(inputs, inputs)
        self.layer = layer
        self.after = nn.Linear(outputs, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, x):
        return self.after(torch.sin(self.layer(torch.sin(self.before(x)))))


def layer_case(layer, *shape, outputs=None, by_channel=False):
    def build():
        model = Wrapped(layer(), shape[-1], outputs or shape[-1])
        if by_channel:
            inner = model.layer
            model.layer = nn.Sequential(Transposed(), inner, Transposed())
        return model

    return Case(
        "layer",
        build,
        lambda: {"x": torch.randn(5, *shape)},
        lambda model, batch: model(batch["x"]).square().flatten(1).sum(1),
    )


class Transposed(nn.Module):
    """[B, T, c] to [B, c, T] and back."""

    def forward(self, x):
        return x.mT


class Images(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.sin(self.conv(x)).flatten(2).mT)


def image_case(conv):
    return Case(
        "image",
        lambda: Images(conv()),
        lambda: {"x": torch.randn(4, 3, 9, 8)},
        lambda model, batch: model(batch["x"]).square().flatten(1).sum(1),
    )


def check(case, **attachment):
    check_against_brute_force(case, RELATIVE, **attachment)


def _identity():
    return [{"estimator": "exact"}, {"estimator": "hutchinson", "projections": IdentityProjections()}]


@pytest.mark.parametrize("way", [0, 1], ids=["exact", "sketch"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.LayerNorm(6), (6,)),
        (lambda: nn.LayerNorm(6), (3, 6)),
        (lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
        (lambda: nn.LayerNorm(6, bias=False), (2, 4, 6)),
        (lambda: nn.RMSNorm(6), (2, 4, 6)),
        (lambda: nn.RMSNorm((4, 6), eps=1e-3), (3, 4, 6)),
        (lambda: nn.Linear(6, 6), (6,)),
        (lambda: nn.Linear(6, 6), (3, 6)),
        (lambda: nn.Linear(6, 6), (2, 3, 6)),
        (lambda: nn.Linear(6, 6), (70, 6)),
    ],
)
def test_layers(layer, shape, way):
    check(layer_case(layer, *shape), **_identity()[way])


@pytest.mark.parametrize("way", [0, 1], ids=["exact", "sketch"])
@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(3, 6, 3),
        lambda: nn.Conv2d(3, 6, (2, 3), stride=2, padding=1, dilation=(1, 2), bias=False),
        lambda: nn.Conv2d(3, 6, 4, stride=4),
    ],
)
def test_conv2d(conv, way):
    check(image_case(conv), **_identity()[way])


@pytest.mark.parametrize("way", [0, 1], ids=["exact", "sketch"])
@pytest.mark.parametrize("conv", [lambda: nn.Conv1d(6, 6, 3), lambda: nn.Conv1d(6, 6, 2, 2, 1, 2, bias=False)])
def test_conv1d(conv, way):
    check(layer_case(conv, 9, 6, by_channel=True), **_identity()[way])


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "groups=2"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
        (nn.Conv1d(4, 4, 3, padding="same"), "padding='same'"),
    ],
)
def test_convolutions_that_are_refused(conv, reason):
    with pytest.raises(UnsupportedModuleError, match=reason):
        attach(nn.Sequential(conv))


class Positions(nn.Module):
    """Positions once for all records, [1, T] or one row [T]."""

    def __init__(self, one_dimension=False):
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.places = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 3)
        self.one_dimension = one_dimension

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        h = self.words(ids) + self.places(places if self.one_dimension else places.unsqueeze(0))
        return self.head(torch.sin(h))


def model_without_mask(model):
    plain = Positions()
    plain.load_state_dict(model.state_dict())
    return plain


def position_case(records, tokens, **options):
    return Case(
        "positions",
        lambda: Positions(**options),
        lambda: {"ids": torch.randint(0, 11, (records, tokens))},
        lambda model, batch: model(batch["ids"]).square().flatten(1).sum(1),
    )


class TestPositions:
    @pytest.mark.parametrize(("records", "tokens"), [(5, 7), (7, 7), (1, 7), (5, 1)])
    @pytest.mark.parametrize("way", [0, 1], ids=["exact", "sketch"])
    def test_ids_that_come_once_for_all_records(self, records, tokens, way):
        check(position_case(records, tokens), **_identity()[way])

    @pytest.mark.parametrize(("records", "tokens"), [(5, 8), (8, 8)])
    def test_positions_in_one_dimension_are_refused(self, records, tokens):
        """With as many positions as records nothing else would tell them apart."""
        model, batch = make(position_case(records, tokens, one_dimension=True))
        attach(model)
        with pytest.raises(UnsupportedModuleError, match=r"module 'places'.*\[1, T\]"):
            model(batch["ids"])

    @pytest.mark.parametrize("records", [1, 3, 9])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
    def test_a_mask_beside_the_ids(self, records, dtype):
        """A mask [T, T] must not pass for a batch of T."""

        class Masked(Positions):
            def forward(self, ids, mask):
                return super().forward(ids) * mask.float().mean()

        case = position_case(records, 7)
        model, batch = make(Case("masked", Masked, case.batch, case.losses))
        gradients = brute_force(case, model_without_mask(model), batch)
        handle = attach(model, "exact")
        losses = model(batch["ids"], torch.ones(7, 7, dtype=dtype)).square().flatten(1).sum(1)
        assert losses.shape == (records,)
        assert torch.allclose(handle.norms(losses).double(), brute_force_norms(gradients), rtol=RELATIVE)

    def test_one_id_per_record(self):
        case = Case(
            "one id",
            lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 2)),
            lambda: {"ids": torch.randint(0, 11, (5,))},
            lambda model, batch: model(batch["ids"]).square().sum(1),
        )
        check(case, estimator="exact")

    def test_broadcast_without_a_parent_that_tells(self):
        model = nn.Embedding(5, 3)
        handle = attach(model)
        losses = (model(torch.tensor([[0, 1]])) * torch.randn(4, 2, 3)).sum((1, 2))
        with pytest.raises(LossShapeError, match="first dimension"):
            handle.norms(losses)

    def test_micro_batches_of_other_sizes_and_forwards_that_fail(self):
        case = position_case(5, 7)
        model, batch = make(case)
        gradients = brute_force(case, model, batch)
        handle = attach(model, "exact")
        handle.begin_step()
        norms = []
        for rows in (slice(0, 3), slice(3, 4), slice(4, 5)):
            with pytest.raises(IndexError):
                model(batch["ids"][:4] + 100)
            norms.append(handle.norms(case.losses(model, {"ids": batch["ids"][rows]})))
        assert torch.allclose(torch.cat(norms).double(), brute_force_norms(gradients), rtol=RELATIVE)
        assert handle._state.batch_hints == []

    def test_detach_takes_the_hooks_away(self):
        model, _ = make(position_case(2, 3))
        attach(model).detach()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return x * self.weight + self.shift


class ScaleRule(LayerRule):
    module_class = Scale
    kinds = {"weight": "vector", "shift": "vector"}

    def gradient(self, module, name, output_gradient, x):
        return output_gradient * x if name == "weight" else output_gradient


class LowRank(nn.Module):
    """y = x U V, with U and V parameters of the module itself."""

    def __init__(self, width):
        super().__init__()
        self.u = nn.Parameter(torch.randn(width, 2))
        self.v = nn.Parameter(torch.randn(2, width))

    def forward(self, x):
        return x @ self.u @ self.v


class LowRankRule(LayerRule):
    module_class = LowRank
    kinds = {"u": "matrix", "v": "matrix"}

    def gradient(self, module, name, output_gradient, x):
        if name == "v":
            return x @ module.u, output_gradient
        return x, output_gradient @ module.v.mT


@pytest.fixture
def registered():
    rules = []

    def register(rule):
        register_rule(rule)
        rules.append(rule)

    yield register
    for rule in rules:
        unregister_rule(rule)


class Mixer(nn.Module):
    """Something no rule knows: a bilinear form and a softmax, with dropout that is off."""

    def __init__(self, width):
        super().__init__()
        self.form = nn.Parameter(torch.randn(width, width) * 0.3)
        self.temperature = nn.Parameter(torch.randn(1))

    def forward(self, x, *, scale=1.0):
        scores = torch.einsum("...ti,ij,...sj->...ts", x, self.form, x) * self.temperature
        return scores.softmax(-1) @ x * scale


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x, gate, bias=0.0):
        return x * self.weight * gate + bias


class GateRule(LayerRule):
    module_class = Gate
    kinds = {"weight": "vector"}

    def gradient(self, module, name, output_gradient, x, gate, bias=0.0):
        return output_gradient * x * gate


class TestOwnRules:
    def test_keywords_in_any_order(self, registered):
        registered(GateRule())
        model = Gate(4)
        x, gate = torch.randn(2, 3, 4)
        handle = attach(model, "exact")
        first = handle.norms(model(x, gate).square().sum(1))
        assert torch.equal(first, handle.norms(model(gate=gate, x=x).square().sum(1)))
        assert torch.equal(first, handle.norms(model(x, gate=gate, bias=0.0).square().sum(1)))

    @pytest.mark.parametrize("way", [0, 1], ids=["exact", "sketch"])
    @pytest.mark.parametrize(("layer", "rule"), [(Scale, ScaleRule), (LowRank, LowRankRule)])
    def test_a_formula(self, registered, layer, rule, way):
        case = layer_case(lambda: layer(6), 4, 6)
        with pytest.raises(UnsupportedModuleError, match="register_rule"):
            attach(case.build())
        registered(rule())
        check(case, **_identity()[way])

    def test_any_layer_record_by_record(self, registered):
        registered(PerRecordRule(Mixer))
        check(layer_case(lambda: Mixer(6), 4, 6), estimator="exact")

    def test_what_goes_record_by_record_is_refused_in_one_line(self, registered):
        registered(PerRecordRule(nn.GRU))
        registered(PerRecordRule(nn.Transformer))
        model = nn.Sequential(nn.GRU(6, 4, batch_first=True))
        attach(model)
        with pytest.raises(UnsupportedModuleError, match=r"module '0': torch\.vmap"):
            model(torch.randn(3, 4, 6))
        with pytest.raises(UnsupportedModuleError, match="no rule|without child modules"):
            attach(nn.Sequential(nn.Transformer(4, 2, 1, 1, 8)))

    @pytest.mark.parametrize("layer", [nn.PReLU, lambda: nn.GroupNorm(2, 4)])
    def test_torch_layers_record_by_record(self, registered, layer):
        registered(PerRecordRule(type(layer())))
        check(layer_case(layer, 4, 4), estimator="exact")
        model = nn.Sequential(nn.Linear(4, 4), layer())
        handle = attach(model)
        assert handle.norms(model(torch.randn(0, 4)).sum(1)).shape == (0,)

    def test_a_token_before_each_record(self, registered):
        class Tokens(nn.Module):
            def __init__(self):
                super().__init__()
                self.token = nn.Parameter(torch.randn(1, 1, 6))
                self.places = nn.Parameter(torch.randn(1, 5, 6))

            def forward(self, x):
                return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places

        registered(BroadcastRule(Tokens, ("token", "places")))
        check(layer_case(Tokens, 4, 6), estimator="exact")

    def test_broadcast_needs_a_first_axis_of_one(self, registered):
        registered(BroadcastRule(Scale, ("weight", "shift")))
        with pytest.raises(UnsupportedModuleError, match=r"first axis must be 1"):
            attach(nn.Sequential(Scale(4)))

    def test_a_wrong_formula_is_found_by_brute_force(self, registered):
        class Wrong(ScaleRule):
            def gradient(self, module, name, output_gradient, x):
                return super().gradient(module, name, output_gradient, x) * 1.01

        registered(Wrong())
        with pytest.raises(AssertionError):
            check(layer_case(lambda: Scale(6), 4, 6), estimator="exact")

    def test_in_place_operations_may_follow(self, registered):
        registered(ScaleRule())
        model = nn.Sequential(nn.Linear(6, 6), Scale(6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.ReLU(inplace=True))
        handle = attach(model, "exact")
        handle.clipped_backward(model(torch.randn(3, 6)).sum(1), max_grad_norm=1.0)

    def test_an_output_that_is_no_tensor(self, registered):
        class Pair(Scale):
            def forward(self, x):
                return (super().forward(x),)

        class PairRule(ScaleRule):
            module_class = Pair

        registered(PairRule())
        model = nn.Sequential(Pair(3))
        attach(model)
        with pytest.raises(UnsupportedModuleError, match="'0'.*returns a tuple"):
            model(torch.randn(2, 3))

    def test_factors_of_other_shapes(self, registered):
        class Swapped(LowRankRule):
            def gradient(self, module, name, output_gradient, x):
                return super().gradient(module, name, output_gradient, x)[::-1]

        registered(Swapped())
        model = nn.Sequential(LowRank(6))
        handle = attach(model, "exact", check_isolation=False)
        with pytest.raises(UnsupportedModuleError, match=r"'0\.[uv]' of shape .*expected left \[B, \.\.\., [26]\]"):
            handle.norms(model(torch.randn(3, 4, 6)).square().sum((1, 2)))

    def test_only_rules(self):
        with pytest.raises(InvalidArgumentError, match="rule="):
            register_rule(ScaleRule)


class TestFreezing:
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))

    def step(self, model, handle, x):
        handle.begin_step()
        model.zero_grad()
        losses = model(x).square().sum(1)
        norms = handle.norms(losses)
        handle.clipped_backward(losses, max_grad_norm=0.1, norms=norms)
        return norms

    def test_between_steps(self):
        x = torch.randn(3, 4)
        model = self.build()
        model[0].requires_grad_(False)
        model[3].bias.requires_grad_(False)
        handle = attach(model, "exact")
        for part, trains in ((model[0], True), (model[3].bias, True), (model[3].weight, False), (model[0], False)):
            self.step(model, handle, x)
            part.requires_grad_(trains)
            fresh = self.build()
            for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
                p.requires_grad_(q.requires_grad)
            expected = self.step(fresh, attach(fresh, "exact"), x)
            assert torch.allclose(self.step(model, handle, x), expected, rtol=1e-6)
            for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-8)
            assert {id(p) for p in handle.parameters} == {id(p) for p in model.parameters() if p.requires_grad}
        handle.detach()
        assert type(model[0]) is nn.Linear

    def test_what_needs_a_sketch_cannot_join_an_exact_run(self):
        model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100))
        model[1].requires_grad_(False)
        handle = attach(model, "auto", 8)
        assert handle.sketch_dim is None
        model[1].requires_grad_(True)
        with pytest.raises(UnsupportedModuleError, match=r"'1\.weight' was unfrozen and needs a sketch"):
            handle.begin_step()

    def test_lora_that_is_added_later(self):
        model = self.build()
        handle = attach(model, "exact")
        model.append(nn.Linear(2, 2))
        x = torch.randn(3, 4)
        with pytest.raises(UnsupportedModuleError, match=r"'4\.weight' became trainable"):
            handle.norms(model(x).square().sum(1))
        self.step(model, handle, x)
        assert model[4].weight.grad is not None
