"""The plan as a table: what shares a line, what the numbers are, and that its words about ghost norms are true."""

import pytest
import torch
from cases import CASES, lm_losses, make, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from toy import ToyData, ToyModule, privacy, trainer
from transformers import LlamaConfig, LlamaForCausalLM

from dprc_lightning import attach
from dprc_lightning.clipping import PlanRow
from dprc_lightning.clipping.plan import plan_row
from dprc_lightning.clipping.plan_table import WIDTH, format_plan
from dprc_lightning.layers import ParameterTracker
from dprc_lightning.sketch import exact


def row(parameter, shape=(4, 3), estimator="hutchinson", side="output", modules=1, ghost_rows=None, floats=(1, 2, 3)):
    """Its ``floats``: bytes of P, numbers of the sketch, FLOPs."""
    return PlanRow(parameter, ("m",) * modules, shape, estimator, side, 0, *floats, ghost_rows)


def body(text):
    """Cells of the lines between head and sum."""
    return [line.split() for line in text.split("\n")[2:-1]]


def names(rows):
    return [cells[0] for cells in body(format_plan(rows))]


class TestGrouping:
    def test_layers_that_differ_in_their_number_alone(self):
        rows = [row(f"model.layers.{i}.mlp.{part}.weight") for i in range(30) for part in ("up", "down")]
        cells = body(format_plan(rows))
        assert [line[:2] for line in cells] == [
            ["model.layers.{0-29}.mlp.up.weight", "30"],
            ["model.layers.{0-29}.mlp.down.weight", "30"],
        ]

    @pytest.mark.parametrize(
        ("indices", "shown"),
        [
            ([0, 2, 5], "a.{0,2,5}.w"),
            ([0, 1], "a.{0,1}.w"),
            ([3, 1, 2], "a.{1-3}.w"),
            ([0, 1, 2, 3, 7, 9, 10], "a.{0-3,7,9,10}.w"),
            ([9, 10, 11], "a.{9-11}.w"),
            ([4], "a.4.w"),
        ],
    )
    def test_ranges(self, indices, shown):
        assert names([row(f"a.{i}.w") for i in indices]) == [shown]

    @pytest.mark.parametrize(
        "other",
        [
            {"shape": (3, 4)},
            {"estimator": "exact", "side": "-"},
            {"side": "input"},
            {"modules": 2},
            {"ghost_rows": 7},
        ],
    )
    def test_what_differs_in_more_stays_apart(self, other):
        assert names([row("a.0.w"), row("a.1.w", **other), row("a.2.w")]) == ["a.{0,2}.w", "a.1.w"]

    def test_two_numbers_in_a_name(self):
        rows = [row(f"blocks.{i}.experts.{j}.w") for i in range(3) for j in range(2)]
        assert names(rows) == ["blocks.{0-2}.experts.{0,1}.w"]
        # A line stands for exactly its parameters: without one of them there is no single product of ranges.
        cells = body(format_plan(rows[:-1]))
        assert [line[:2] for line in cells] == [["blocks.{0,1}.experts.{0,1}.w", "4"], ["blocks.2.experts.0.w", "1"]]

    def test_digits_that_are_no_index_of_their_own(self):
        assert names([row("conv1.w"), row("conv2.w"), row("a.01.w"), row("a.1.w")]) == [
            "conv1.w", "conv2.w", "a.01.w", "a.1.w",
        ]  # fmt: skip

    def test_without_any_number(self):
        assert names([row("head.weight"), row("norm.weight")]) == ["head.weight", "norm.weight"]


class TestNumbers:
    @pytest.mark.parametrize(
        ("count", "shown"),
        [
            (1, "1"), (999, "999"), (1000, "1.0k"), (9949, "9.9k"), (9950, "10k"), (123_456, "123k"),
            (999_499, "999k"), (999_500, "1.0M"), (7_077_888, "7.1M"), (1_235_814_400, "1.2G"), (8_030_261_248, "8.0G"),
        ],
    )  # fmt: skip
    def test_short(self, count, shown):
        table = format_plan([row("w", shape=(count,), floats=(count, 0, 0))])
        assert body(table)[0][-4:] == [shown, "-", "-", "-"]
        assert table.split("\n")[-1].startswith(f"{shown} parameters, {shown} of them sketched")

    def test_a_line_is_the_sum_of_its_parameters_and_the_last_line_of_all(self):
        rows = [row(f"a.{i}.w", floats=(10, 20, 30)) for i in range(5)]
        rows += [row("bias", shape=(7,), estimator="exact", side="-", floats=(0, 7, 0))]
        table = format_plan(rows)
        assert body(table) == [
            ["a.{0-4}.w", "5", "4x3", "hutchinson", "output", "50", "100", "150", "-"],
            ["bias", "1", "7", "exact", "-", "-", "7", "-", "-"],
        ]
        assert table.split("\n")[-1].split() == "67 parameters, 60 of them sketched 6 50 107 150".split()

    def test_of_a_model(self):
        model = tiny_llama(tied=False)
        rows = attach(model, "hutchinson", 4).plan()
        table = format_plan(rows)
        cells = {line[0]: line[1:] for line in body(table)}
        assert cells["model.layers.{0,1}.self_attn.k_proj.weight"] == "2 8x16 hutchinson input 512 64 384 -".split()
        assert cells["model.embed_tokens.weight"] == "1 40x16 hutchinson output 640 64 448 -".split()
        assert cells["model.norm.weight"] == "1 16 exact - - 16 - -".split()
        assert sum(int(line[0]) for line in cells.values()) == len(list(model.parameters()))
        trained = sum(p.numel() for p in model.parameters())
        vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
        assert f"{trained / 1000:.1f}k parameters, {(trained - vectors) / 1000:.1f}k of them sketched" in table

    def test_nothing_sketched(self):
        assert "parameters, none of them sketched" in format_plan(attach(tiny_llama(tied=True), "exact").plan())

    def test_the_weight_of_a_convolution_is_a_matrix(self):
        """Its second axis is all but the first."""
        weight = nn.Parameter(torch.zeros(6, 5, 3, 3))
        sketched = plan_row(ParameterTracker("w", weight, "matrix", "hutchinson", 1), 4)
        assert (sketched.side, sketched.projection_floats, sketched.sketch_floats) == ("input", 4 * 45, 4 * 6)
        assert sketched.flops_per_token == 2 * 4 * (6 + 45)
        assert plan_row(ParameterTracker("w", weight, "matrix", "exact", 1), 4).ghost_rows == 5


class TestGhost:
    @pytest.mark.parametrize("name", ["lm_untied", "lm_tied", "llama_tied"])
    def test_the_norms_are_made_as_the_plan_says(self, name, monkeypatch):
        """At T and at T + 1 tokens, for each exact matrix by itself."""
        ways = []
        for way in ("_gram_sum", "_dense_sum"):
            real = getattr(exact, way)
            monkeypatch.setattr(
                exact, way, lambda uses, record, way=way, real=real: (ways.append(way), real(uses, record))[1]
            )
        case = next(c for c in CASES if c.name == name)
        seen = set()
        for parameter in dict(case.build().named_parameters()):
            model, _ = make(case)
            for n, p in model.named_parameters():
                p.requires_grad_(n == parameter)
            handle = attach(model, "exact")
            (planned,) = handle.plan()
            if planned.ghost_rows is None:
                assert len(planned.shape) == 1
                continue
            tokens = planned.ghost_rows // len(planned.modules)
            for length, way in ((tokens, "_gram_sum"), (tokens + 1, "_dense_sum")):
                ids = torch.randint(1, 17, (2, length))
                ways.clear()
                handle.norms(
                    lm_losses(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
                )
                assert set(ways) == {way}, (parameter, length)
            assert body(format_plan([planned]))[0][-1] == str(tokens)
            seen.add(len(planned.modules))
        assert seen == ({1, 2} if "untied" not in name else {1})

    def test_neither_for_vectors_nor_for_sketches(self):
        rows = attach(tiny_llama(tied=False), "hutchinson", 4).plan()
        assert {r.ghost_rows for r in rows} == {None}

    @pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2), (16, 40), (49152, 576)])
    def test_the_bound_is_the_largest(self, shape):
        model = nn.Linear(shape[1], shape[0], bias=False)
        (planned,) = attach(model, "exact").plan()
        n0, n1 = shape
        cheaper = [rows for rows in range(0, min(shape) + 2) if rows * (n0 + n1) < n0 * n1]
        assert planned.ghost_rows == max(cheaper)


class TestWidth:
    def wide(self, text):
        return max(len(line) for line in text.split("\n"))

    def test_a_long_name_keeps_its_layer_number_and_its_end(self):
        rows = [row(f"{'outer.' * 12}layers.{i}.attention.query.lora_A.weight") for i in range(8)]
        text = format_plan(rows)
        assert self.wide(text) <= WIDTH < 120 - 2
        (name,) = names(rows)
        assert name.startswith("outer...") and name.endswith("{0-7}.attention.query.lora_A.weight")

    @pytest.mark.parametrize(
        "name", ["x" * 300, f"{'x' * 200}.weight", ".".join(["y" * 30] * 6), f"z.{'x' * 100}.{'y' * 100}.w"]
    )
    def test_names_that_nothing_helps(self, name):
        text = format_plan([row(name, shape=(128256, 12288), floats=(10**9,) * 3)])
        assert self.wide(text) <= WIDTH
        assert "..." in body(text)[0][0] and body(text)[0][0].endswith(name[-1:])

    def test_a_short_name_is_whole(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        assert names([row(name)]) == [name]

    def test_the_names_of_a_llama_are_whole(self):
        """Shapes of SmolLM2-135M."""
        rows = [row(f"model.layers.{i}.self_attn.q_proj.weight", (576, 576), floats=(18432,) * 3) for i in range(30)]
        assert names([row("model.embed_tokens.weight", (49152, 576)), *rows])[1] == (
            "model.layers.{0-29}.self_attn.q_proj.weight"
        )

    def test_lora_on_thirty_layers_is_short(self):
        config = LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=30, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=40,
        )  # fmt: skip
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(LlamaForCausalLM(config), lora)
        handle = attach(model, "hutchinson", 4)
        text = format_plan(handle.plan())
        assert len(text.split("\n")) == 2 + 4 + 1 and self.wide(text) <= WIDTH
        cells = body(text)
        assert len({line[0] for line in cells}) == 4 and all("{0-29}" in line[0] and line[1] == "30" for line in cells)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert text.split("\n")[-1].startswith(f"{trained / 1000:.1f}k parameters")

    def test_an_empty_plan(self):
        assert len(format_plan([]).split("\n")) == 3


@pytest.mark.filterwarnings("ignore")
def test_it_is_printed_at_the_start_of_a_private_run(tmp_path, capsys):
    def start(folder, **changes):
        trainer(tmp_path / folder).fit(ToyModule(privacy(**changes)), datamodule=ToyData())
        return capsys.readouterr().out

    out = start("private", estimator="hutchinson", sketch_dim=2)
    opening, _ = out.split("\nepsilon at delta")
    table = opening[opening.index("exact norms:") :].split("\n", 1)[1]
    model = ToyModule(privacy()).net
    plan = format_plan(attach(nn.ModuleDict({"net": model}), "hutchinson", 2).plan())
    assert table.rstrip() == "\n".join(f"  {line}" for line in plan.split("\n"))
    assert "net.0.weight" in plan and "hutchinson" in plan
    assert "ghost" not in start("baseline", baseline_without_privacy=True)
