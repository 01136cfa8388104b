"""`dprc plan`: costs against numbers worked out by hand and against a counter, the pick, and the command."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import ToyModule
from transformers import AutoModel, AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig

from dprc_lightning import PrivacyConfig
from dprc_lightning.accounting import EpsilonBounds, epsilon
from dprc_lightning.bench.step import flop_counter
from dprc_lightning.cli import main
from dprc_lightning.clipping import attach, causal_lm_loss
from dprc_lightning.errors import CalibrationError
from dprc_lightning.plan import table
from dprc_lightning.plan.choice import Limits, choose, percent, size
from dprc_lightning.plan.costs import Batch, NormCosts, norm_costs, step_flops
from dprc_lightning.plan.shapes import hugging_face_model, stand_in, weightless
from dprc_lightning.plan.table import Row

LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "use_cache": False,
}


def folder(tmp_path: Path, config: LlamaConfig) -> str:
    path = tmp_path / "llama"
    config.save_pretrained(path)
    return str(path)


def costs_of(model: nn.Module, batch: Batch, k: int, estimator: str = "auto", projection: str = "gaussian"):
    return norm_costs(model, batch, sketch_dim=k, estimator=estimator, projection=projection)


class TestCosts:
    """By hand: weights [10, 6] and [4, 10], biases [10] and [4]."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

    def test_sketched(self, model):
        found = costs_of(model, Batch(records=3, tokens=5), 2)
        # P [10, 2] twice, float32. Y of the first weight: 3 records x 6 x 2. A product: 2 k (n0 + n1) per token.
        assert found == NormCosts(2, 160, 144, 2 * 2 * (16 + 14) * 15, 100, 14)

    def test_one_matrix_is_exact(self, model):
        # 4 * 10 <= 3 * 14 but 10 * 6 > 3 * 16; with 5 rows the whole matrix is cheaper than its Gram matrices.
        found = costs_of(model, Batch(records=3, tokens=5), 3)
        dense = 2 * 5 * 40 * 3
        assert found == NormCosts(3, 120, max(3 * 6 * 3 * 4, 2 * 40 * 4), 2 * 3 * 16 * 15 + dense, 60, 54)

    def test_all_exact_is_accounted_as_exact(self, model):
        found = costs_of(model, Batch(records=3, tokens=2), 4)
        # Two tokens: Gram matrices, two of them per weight; float64.
        grams = 2 * 2 * 2 * (16 + 14) * 3
        assert found == NormCosts(None, 0, 8 * (2 * 2 * 2 + 2 * 16), grams, 0, 114)
        assert found == costs_of(model, Batch(records=3, tokens=2), 1, "exact")

    def test_random_signs_take_a_bit(self):
        model = nn.Linear(4096, 64, bias=False)
        gaussian, signs = (costs_of(model, Batch(1, 1), 32, projection=name) for name in ("gaussian", "rademacher"))
        assert gaussian.projection_bytes == 4096 * 32 * 4 == 32 * signs.projection_bytes
        assert replace(signs, projection_bytes=0) == replace(gaussian, projection_bytes=0)

    def test_the_step(self, model):
        # First layer: forward and weight gradient; second: input gradients in both backwards as well.
        assert step_flops(model, Batch(records=3, tokens=5)) == 2 * 60 * 15 * 2 + 2 * 40 * 15 * 4
        model[0].requires_grad_(False)
        assert step_flops(model, Batch(records=3, tokens=5)) == 2 * 60 * 15 + 2 * 40 * 15 * 2

    def test_the_model_is_left_as_it_was(self, model):
        kinds = [type(module) for module in model.modules()]
        costs_of(model, Batch(1, 1), 2)
        assert [type(module) for module in model.modules()] == kinds
        assert attach(model).plan()


def counted(model: nn.Module, batch: Batch, k: int) -> int:
    handle = attach(model, "hutchinson" if k else "exact", k or 1, check_isolation=False)
    ids = torch.randint(0, 96, (batch.records, batch.tokens), generator=torch.Generator().manual_seed(0))
    with flop_counter() as counter:
        handle.begin_step()
        handle.clipped_backward(causal_lm_loss(model(input_ids=ids).logits, ids), max_grad_norm=1.0)
    handle.detach()
    return counter.get_total_flops()


class TestAgainstACounter:
    """PyTorch's counter on a real step, which sees no attention on a CPU unless it is written out in products."""

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("k", [0, 3, 8])
    @pytest.mark.parametrize("tokens", [8, 48])
    def test_a_whole_step(self, tied, k, tokens):
        batch = Batch(records=2, tokens=tokens)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=tied))
        norms = costs_of(model, batch, k or 1, "hutchinson" if k else "exact")
        attention = 5 * 4 * (tokens * (tokens + 1) // 2) * 32 * 2 * 2
        assert counted(model, batch, k) == pytest.approx(step_flops(model, batch) - attention + norms.flops, rel=0.01)

    def test_attention(self):
        """Written out, it makes the products of all pairs, also of those that a causal mask hides."""
        batch, pairs = Batch(records=2, tokens=16), 16 * 17 // 2
        plain, eager = (
            AutoModelForCausalLM.from_config(LlamaConfig(**TINY), attn_implementation=name)
            for name in ("sdpa", "eager")
        )
        ours = 5 * 4 * pairs * 32 * 2 * 2
        assert counted(eager, batch, 4) - counted(plain, batch, 4) == pytest.approx(ours * 16 * 16 / pairs)

    def test_only_the_upper_layers_train(self):
        batch = Batch(records=2, tokens=16)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        norms = costs_of(model, batch, 4, "hutchinson")
        attention = 4 * (16 * 17 // 2) * 32 * 2 * (1 + 5)
        # The norm before the first matrix is registered after it, so that its input's gradients are overlooked.
        overlooked = 2 * 2 * 32 * 32 * 32
        assert counted(model, batch, 4) == step_flops(model, batch) - attention + norms.flops + overlooked

    def test_a_window_hides_pairs(self):
        shape = TINY | {"head_dim": 8, "layer_types": ["sliding_attention"] * 2}
        with torch.device("meta"):
            windowed, whole = (
                AutoModelForCausalLM.from_config(Gemma2Config(**shape, sliding_window=window)) for window in (4, 16)
            )
        # By brute force: token i sees itself and the three before it.
        pairs = sum(min(i + 1, 4) for i in range(16))
        hidden = 16 * 17 // 2 - pairs
        flops = [step_flops(model, Batch(1, 16)) for model in (whole, windowed)]
        assert flops[0] - flops[1] == 5 * 2 * 4 * hidden * 4 * 8

    def test_llama_1b_against_the_measured_step(self):
        """40.712 TFLOP without attention, by PyTorch's counter on the real shapes: T = 4096, k = 32."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LLAMA_1B)
        stand_in(model)
        batch = Batch(1, 4096)
        attention = 5 * 4 * (4096 * 4097 // 2) * 2048 * 16
        total = step_flops(model, batch) - attention + costs_of(model, batch, 32).flops
        assert total / 1e12 == pytest.approx(40.712, rel=1e-3)


class TestShapes:
    @pytest.mark.parametrize("config", [LLAMA_1B, Gemma2Config(), GPT2Config()], ids=["llama", "gemma2", "gpt2"])
    def test_as_the_real_model_with_no_memory(self, config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        stand_in(model)
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * len(shapes)
        assert {row.parameter for row in attach(model).plan()} == set(shapes)

    def test_without_a_file_of_weights(self, tmp_path):
        path = folder(tmp_path, LlamaConfig(**TINY))
        loader = AutoModel.from_pretrained
        with weightless():
            model, info = AutoModel.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
            # It runs.
            assert model(input_ids=torch.zeros(1, 3, dtype=torch.long)).last_hidden_state.shape == (1, 3, 32)
        assert not info["missing_keys"] and {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert AutoModel.from_pretrained == loader
        with pytest.raises(OSError, match="no file named"):
            AutoModel.from_pretrained(path)

    def test_lora_is_exact(self, tmp_path):
        model = hugging_face_model(folder(tmp_path, LlamaConfig(**TINY)), lora=2)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained and all("lora_" in name for name in trained)
        # [32, 2] and its like: 2 n0 <= k (n0 + 2) from k = 2 on.
        assert costs_of(model, Batch(1, 8), 2).sketch_dim is None
        assert costs_of(model, Batch(1, 8), 1).sketch_dim == 1


def row(k: int | None, noise: float, flops: int, mebibytes: int, bounds: EpsilonBounds | None = None) -> Row:
    return Row(k, NormCosts(k, mebibytes << 20, 0, flops, 1, 1), noise, bounds, True)


class TestThePick:
    """Synthetic rows of a step of 1000 FLOPs."""

    ROWS = [
        row(8, 2.0, 10, 1),
        row(16, 1.1, 20, 2),
        row(32, 1.02, 40, 4),
        row(64, 1.011, 80, 8),
        row(None, 1.0, 160, 900),
    ]

    def pick(self, rows=None, **limits: float):
        return choose(self.ROWS if rows is None else rows, Limits(**limits), 1000)

    @pytest.mark.parametrize(
        ("limits", "k"),
        [
            ({}, 32),
            ({"tolerance": 1.9}, 64),
            ({"tolerance": 0}, None),
            ({"tolerance": 200}, 8),
            # Against the least that the limits allow, 1.011 and then 1.02.
            ({"max_flops": 10, "tolerance": 0.5}, 64),
            ({"max_flops": 4}, 32),
            ({"max_flops": 3.9}, 16),
            ({"max_memory": 8 / 1024, "tolerance": 0}, 64),
            ({"max_memory": 2 / 1024}, 16),
        ],
    )
    def test_the_smallest_within_tolerance_and_limits(self, limits, k):
        choice = self.pick(**limits)
        assert choice.row is not None and choice.row.sketch_dim == k

    def test_it_says_what_the_next_would_buy_and_cost(self):
        why = self.pick().why
        assert "k = 32" in why and "within 2 %" in why and "k = 64, would buy back 0.9 %" in why
        assert "8.0 % of the step's FLOPs and 8.0 MiB in place of 4.0 % of the step's FLOPs and 4.0 MiB" in why
        assert "more than --max_flops 4 allows" in self.pick(max_flops=4).why

    def test_exact_norms_that_cost_no_more(self):
        cheap = row(None, 1.0, 40, 4)
        choice = self.pick([*self.ROWS[:-1], cheap])
        assert choice.row is cheap and "no more than k = 32" in choice.why and "2.0 % less" in choice.why
        dearer = row(None, 1.0, 41, 4)
        assert self.pick([*self.ROWS[:-1], dearer]).row is self.ROWS[2]

    def test_nothing_fits(self):
        choice = self.pick(max_flops=0.5)
        assert choice.row is None and "no row keeps within --max_flops 0.5" in choice.why

    def test_rows_without_numbers_are_passed_over(self):
        broken = replace(self.ROWS[0], noise_multiplier=None, problem="epsilon=8: no")
        assert self.pick([broken, *self.ROWS[1:]], tolerance=200).row is self.ROWS[1]
        infinite = row(8, 1.0, 10, 1, EpsilonBounds(1.0, 2.0, math.inf))
        assert self.pick([infinite]).row is None

    def test_where_the_noise_is_given_epsilon_decides(self):
        rows = [row(k, 1.0, 10, 1, EpsilonBounds(0.0, 0.0, upper)) for k, upper in ((8, 4.0), (16, 2.02), (32, 2.0))]
        choice = self.pick(rows)
        assert choice.row is rows[1] and "epsilon (2.02)" in choice.why


def test_numbers_for_people():
    assert [size(n) for n in (0, 512, 1024, 10 << 20, 3 << 29)] == ["0 B", "512 B", "1.0 KiB", "10 MiB", "1.5 GiB"]
    assert [percent(n, 10_000) for n in (0, 1, 480, 12_000)] == ["0.0 %", "0.01 %", "4.8 %", "120.0 %"]


PRIVACY = ["--delta", "1e-5", "--sample_rate", "0.5", "--steps", "1"]


@pytest.fixture
def unaccounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is not what the accountant says."""
    monkeypatch.setattr(table, "epsilon", lambda sketch_dim, **_: EpsilonBounds(1.0, 1.5, 2 + 1 / (sketch_dim or 99)))
    monkeypatch.setattr(table, "calibrate_noise_multiplier", lambda sketch_dim, **_: 1 + 1 / (sketch_dim or 99))


@pytest.mark.filterwarnings("ignore")
class TestTheCommand:
    def flags(self, tmp_path: Path) -> list[str]:
        return ["plan", "--model", folder(tmp_path, LlamaConfig(**TINY)), "--tokens", "64", *PRIVACY]

    def plan(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
        assert main([*arguments, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    def test_calibrated(self, tmp_path, capsys):
        found = self.plan([*self.flags(tmp_path), "--epsilon", "2", "--sketch_dim", "64", "16"], capsys)
        assert set(found) == {
            "model", "records", "tokens", "num_records", "mechanism", "step_flops", "rows", "limits", "pick", "why",
        }  # fmt: skip
        rows = found["rows"]
        assert all(
            set(row) == {
                "sketch_dim", "accounted_sketch_dim", "noise_multiplier", "epsilon", "certified", "over_exact", "flops",
                "flops_share", "projection_bytes", "norm_bytes", "sketched_parameters", "exact_parameters", "problem",
            }
            for row in rows
        )  # fmt: skip
        assert [row["sketch_dim"] for row in rows] == [16, 64, None]
        # The largest weight, [96, 32], is exact from k = 24 on, and with it all others.
        assert [row["accounted_sketch_dim"] for row in rows] == [16, None, None]
        noise = [row["noise_multiplier"] for row in rows]
        assert noise[0] > noise[1] == noise[2] and rows[2]["over_exact"] == 0
        assert rows[0]["over_exact"] == pytest.approx(noise[0] / noise[2] - 1)
        for row, k in zip(rows[:2], (16, None), strict=True):
            bounds = epsilon(
                noise_multiplier=row["noise_multiplier"], delta=1e-5, sample_rate=0.5, steps=1, sketch_dim=k
            )
            assert 1.99 < bounds.upper <= 2 and (row["sketched_parameters"] > 0) == (k is not None)
            numbers = 2 * 96 * 32 + 2 * (32 * 64 * 3 + 32 * 96 + 64) + 32
            assert row["sketched_parameters"] + row["exact_parameters"] == numbers
        # Nothing here breaks a limit but exact norms, at 64 tokens.
        assert 100 * rows[0]["flops_share"] <= 20 < 100 * rows[2]["flops_share"]
        assert found["pick"] == {"sketch_dim": 16, "estimator": "auto"} and "--max_flops" in found["why"]

    def test_the_table(self, tmp_path, capsys):
        assert main([*self.flags(tmp_path), "--noise_multiplier", "2", "--sketch_dim", "8", "16", "--lora", "20"]) == 0
        said = capsys.readouterr()
        lines = said.out.splitlines()
        assert "LoRA of rank 20" in lines[0] and lines[1] == (
            "noise multiplier 2, delta 1e-05, sample rate 0.5, 1 step"
        )
        assert lines[3].split()[:5] == ["k", "eps", "lower", "estimate", "upper"]
        uppers = [float(line.split()[3]) for line in lines[4:7]]
        assert [line.split()[0] for line in lines[4:7]] == ["8", "16", "exact"]
        assert uppers[0] > uppers[1] >= uppers[2] and len({len(line) for line in lines[3:7]}) == 1
        assert any(line.startswith("pick: ") for line in lines) and max(map(len, lines)) < 120
        # No factor is larger than [64, 20], exact from k = 16 on: accounted already, as exact norms.
        assert "accounting k = 8 (3 of 3)" in said.err and "k = 16" not in said.err

    def test_a_row_that_misses_the_target(self, tmp_path, capsys, monkeypatch, unaccounted):
        real = table.calibrate_noise_multiplier

        def fails(sketch_dim: int | None, **settings):
            if sketch_dim == 8:
                raise CalibrationError("epsilon=3.0: not reached")
            return real(sketch_dim=sketch_dim, **settings)

        monkeypatch.setattr(table, "calibrate_noise_multiplier", fails)
        assert main([*self.flags(tmp_path), "--epsilon", "3", "--sketch_dim", "8", "16"]) == 0
        out = capsys.readouterr().out
        assert "k = 8: epsilon=3.0: not reached" in out and "pick: " in out

    def test_random_signs(self, tmp_path, capsys):
        """With 4 columns a norm is missed too often for any noise; nothing of it is certified but exact norms."""
        flags = ["--noise_multiplier", "4", "--sketch_dim", "4", "20", "--projection", "rademacher"]
        first, second, exact = self.plan([*self.flags(tmp_path), *flags], capsys)["rows"]
        assert first["epsilon"] is None and "too few columns for projection='rademacher'" in first["problem"]
        assert [row["certified"] for row in (first, second, exact)] == [False, False, True]
        bounds = epsilon(
            noise_multiplier=4, delta=1e-5, sample_rate=0.5, steps=1, sketch_dim=20, projection="rademacher"
        )
        assert second["epsilon"] == {"lower": bounds.lower, "estimate": bounds.estimate, "upper": bounds.upper}
        assert second["epsilon"]["upper"] > exact["epsilon"]["upper"]

    def test_ctrl_c_shows_what_there_is(self, tmp_path, capsys, monkeypatch, unaccounted):
        real = table.calibrate_noise_multiplier

        def interrupted(sketch_dim: int | None, **settings):
            if sketch_dim == 8:
                raise KeyboardInterrupt
            return real(sketch_dim=sketch_dim, **settings)

        monkeypatch.setattr(table, "calibrate_noise_multiplier", interrupted)
        assert main([*self.flags(tmp_path), "--epsilon", "3", "--sketch_dim", "8", "16"]) == 130
        said = capsys.readouterr()
        shown = [line.split()[0] for line in said.out.splitlines()[4:6]]
        assert shown == ["16", "exact"] and "pick: none" in said.out and said.err.endswith("dprc: interrupted\n")

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ([], "--config or --model: give one of them"),
            (["--model", "LLAMA"], "--tokens, --delta, --sample_rate, --steps: needed with --model"),
            (["--model", "LLAMA", "--tokens", "8", *PRIVACY], "--epsilon or --noise_multiplier: neither is set"),
            (["--model", "LLAMA", "--tokens", "0", *PRIVACY], "--tokens=0: expected an integer >= 1"),
            (["--model", "LLAMA", "--tokens", "8", *PRIVACY, "--epsilon", "-1"], "--epsilon=-1.0: expected a finite"),
            (
                ["--model", "LLAMA", "--tokens", "8", *PRIVACY, "--epsilon", "1", "--num_records", "1000000"],
                "--delta=1e-05: above 1/1000000",
            ),
            (["--model", "LLAMA", "--tokens", "8", *PRIVACY, "--epsilon", "1", "--lora", "0"], "--lora=0: expected a"),
            (["--model", "EMPTY", "--tokens", "8", *PRIVACY, "--epsilon", "1"], "has no config.json"),
            (["--model", "no/such", "--tokens", "8", *PRIVACY, "--epsilon", "1"], "--model='no/such': cannot be"),
            (
                ["--model", "LLAMA", "--tokens", "8", *PRIVACY, "--epsilon", "1", "--projection", "haar"],
                "--projection=",
            ),
            (
                ["--config", "TOY", "--tokens", "8", "--bound", "envelope", "--projection", "rademacher"],
                "--bound='envelope': projection='rademacher' has no envelope",
            ),
            (
                ["--config", "TOY", "--tokens", "8", "--bound", "convex", "--noise_multiplier", "0.2"],
                "--noise_multiplier=0.2: bound='convex' is proved from",
            ),
            (["--model", "LLAMA", "--sketch_dim", "0"], "--sketch_dim=[0]: expected integers >= 1"),
            (["--model", "LLAMA", "--tolerance", "-1"], "--tolerance=-1.0: expected a finite value >= 0"),
            (["--config", "TOY"], "--tokens: needed, for the model has no max_length"),
            (["--config", "TOY", "--lora", "2"], "--lora=2: for --model alone"),
            (["--config", "TOY", "--privacy.stepps", "2"], "stepps"),
            (["--config", "TOY", "--tokens", "1", "--privacy.delta", "2"], "privacy.delta=2.0: expected a value in"),
            (["--config", "TOY", "--tokens", "1", "--delta", "2"], "--delta=2.0: expected a value in (0, 1)"),
            (["--config", "BATCH", "--tokens", "1"], "--num_records: needed, because privacy.expected_batch_size=8"),
        ],
    )
    def test_errors_are_one_line(self, arguments, error, tmp_path, capsys):
        places = {
            "LLAMA": folder(tmp_path, LlamaConfig(**TINY)),
            "EMPTY": str(tmp_path),
            "TOY": toy(tmp_path),
            "BATCH": toy(tmp_path, "batch.yaml", "sample_rate: 0.25", "expected_batch_size: 8"),
        }
        assert main(["plan", *(places.get(word, word) for word in arguments)]) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("dprc plan: ")]
        assert len(said) == 1 and said[0].startswith("dprc: error: ") and error in said[0], said

    def test_what_no_command_knows(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            main([*self.flags(tmp_path), "--epsilon", "3", "--privacy.steps", "2"])
        assert "unrecognized arguments: --privacy.steps 2" in capsys.readouterr().err

    def test_help_is_light(self):
        code = (
            "import sys; from dprc_lightning.cli import main\n"
            "try: main(['plan', '--help'])\n"
            "except SystemExit: pass\n"
            "assert not {'torch', 'lightning', 'transformers', 'scipy', 'dp_accounting'} & set(sys.modules), 'heavy'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "--max_memory" in done.stdout, done.stderr


TOY = """
seed_everything: 0
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, sample_rate: 0.25, steps: 4, estimator: exact}
performance: {physical_batch_size: 3}
model: {class_path: toy.ToyModule}
data: {class_path: toy.ToyData}
test_after_fit: true
trainer: {accelerator: cpu, strategy: dprc_single}
"""


def toy(tmp_path: Path, name: str = "toy.yaml", *change: str) -> str:
    path = tmp_path / name
    path.write_text(TOY.replace(*change) if change else TOY)
    return str(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unaccounted")
class TestTheSettingsOfFit:
    def plan(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
        assert main(["plan", *arguments, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    def test_read_from_the_file(self, tmp_path, capsys):
        found = self.plan(capsys, "--config", toy(tmp_path), "--tokens", "1", "--sketch_dim", "1", "2")
        assert found["model"] == "ToyModule" and found["records"] == 3 and found["num_records"] is None
        assert found["mechanism"] | {"estimator": "auto"} == {
            "delta": 1e-3,
            "sample_rate": 0.25,
            "steps": 4,
            "epsilon": None,
            "noise_multiplier": 1.0,
            "estimator": "auto",
            "projection": "gaussian",
            "bound": "best",
        }
        # [4, 3] and [2, 4]: 12 > 1 * 7 and 8 > 1 * 6, but 12 <= 2 * 7 and 8 <= 2 * 6.
        assert [row["accounted_sketch_dim"] for row in found["rows"]] == [1, None, None]
        assert list(tmp_path.iterdir()) == [tmp_path / "toy.yaml"], "nothing is left behind"

    def test_changed_on_the_command_line(self, tmp_path, capsys):
        changed = ["--privacy.steps", "2", "--model.width", "120", "--privacy.crash_allowance", "1"]
        flags = ["--tokens", "1", "--sketch_dim", "2", "--noise_multiplier", "3", "--num_records", "100"]
        found = self.plan(capsys, "--config", toy(tmp_path), *changed, *flags, "--records", "5")
        assert found["mechanism"]["steps"] == 3 and found["mechanism"]["noise_multiplier"] == 3
        assert found["records"] == 5 and found["num_records"] == 100
        # [2, 120] is exact: 240 <= 2 * 122.
        assert found["rows"][0]["sketched_parameters"] == 120 * 3

    def test_a_flag_replaces_the_setting_that_it_excludes(self, tmp_path, capsys):
        flags = ["--tokens", "1", "--sketch_dim", "2", "--epsilon", "2", "--sample_rate", "0.5"]
        batch = toy(tmp_path, "batch.yaml", "sample_rate: 0.25", "expected_batch_size: 8")
        found = self.plan(capsys, "--config", batch, *flags)
        assert found["mechanism"]["noise_multiplier"] is None and found["mechanism"]["sample_rate"] == 0.5

    def test_weights_that_the_model_needs_are_loaded_after_all(self, tmp_path, capsys):
        path = tmp_path / "weights"
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(path)
        text = TOY.replace("toy.ToyModule", f"test_plan.NeedsItsWeights, init_args: {{source: {path}}}")
        (tmp_path / "needs.yaml").write_text(text)
        assert main(["plan", "--config", str(tmp_path / "needs.yaml"), "--tokens", "8", "--sketch_dim", "4"]) == 0
        said = capsys.readouterr()
        assert "not possible without its weights (all weights are the same): loading them" in said.err
        assert f"NeedsItsWeights of {path}" in said.out

    @pytest.mark.data
    def test_the_quickstart(self, capsys):
        config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
        found = self.plan(capsys, "--config", str(config), "--sketch_dim", "32", "--noise_multiplier", "1")
        assert found["num_records"] == 1500 and found["tokens"] == 128 and found["records"] == 32
        assert found["mechanism"]["sample_rate"] == 128 / 1500
        # Those of the README.
        assert found["rows"][0]["sketched_parameters"] == 7_077_888 and found["rows"][0]["exact_parameters"] == 5_765


class NeedsItsWeights(ToyModule):
    def __init__(self, privacy: PrivacyConfig, source: str) -> None:
        super().__init__(privacy)
        self.net = AutoModel.from_pretrained(source)
        weight = self.net.layers[0].mlp.up_proj.weight
        if bool((weight == weight[0, 0]).all()):
            raise ValueError("all weights are the same")
