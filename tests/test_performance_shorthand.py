"""`performance: auto` in files, on the command line and in Python; and `dprc plan` and `dprc fit` picking the same."""

import json

import pytest
from llama_module import LlamaModule
from toy import privacy

from dprc_lightning import PerformanceConfig
from dprc_lightning.cli import main
from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.plan.file import FileSettings
from dprc_lightning.shorthand import spelled_out

GIB = 2**30

_FILE = """\
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, sample_rate: 0.25, steps: 2, estimator: exact, check_isolation: false}
PERFORMANCE
model: {class_path: llama_module.LlamaModule, init_args: {tokens: 520}}
data: {class_path: llama_module.LlamaData, init_args: {tokens: 520}}
trainer: {accelerator: cpu, enable_progress_bar: false, limit_val_batches: 0, logger: false, default_root_dir: RUN}
"""


@pytest.fixture
def write(tmp_path):
    def file(performance, name="settings.yaml"):
        text = _FILE.replace("PERFORMANCE", performance).replace("RUN", str(tmp_path / "run"))
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return file


class TestTheShortForm:
    @pytest.mark.parametrize(
        ("in_file", "arguments", "expected"),
        [
            ("performance: auto", [], {"memory": "auto"}),
            ("", ["--performance", "auto"], {"memory": "auto"}),
            ("", ["--performance=auto"], {"memory": "auto"}),
            ("performance: auto", ["--performance.num_workers", "1"], {"memory": "auto", "num_workers": 1}),
            (
                "",
                ["--performance.num_workers=1", "--performance", "auto", "--performance.physical_batch_size", "8"],
                {"memory": "auto", "physical_batch_size": 8, "num_workers": 1},
            ),
            ("performance: {num_workers: 1}", ["--performance", "auto"], {"memory": "auto", "num_workers": 1}),
            ("performance: {memory: 24, mlp_chunk: 512}", [], {"memory": 24.0, "mlp_chunk": 512}),
            ("performance: auto", ["--performance.memory", "null"], {"memory": None}),
        ],
    )
    def test_in_files_and_arguments(self, write, in_file, arguments, expected):
        assert FileSettings([write(in_file)], arguments).performance == PerformanceConfig(**expected)

    def test_of_two_files(self, write):
        first = write("performance: {physical_batch_size: 8}", "a.yaml")
        (second := write("performance: auto", "b.yaml"))
        expected = PerformanceConfig(physical_batch_size=8, memory="auto")
        assert FileSettings([first, second], []).performance == expected

    def test_in_python(self):
        assert LlamaModule(privacy(), "auto").performance == PerformanceConfig(memory="auto")

    def test_other_words_in_python(self):
        with pytest.raises(InvalidArgumentError, match="performance='off': expected a PerformanceConfig, or 'auto'"):
            LlamaModule(privacy(), "off")

    def test_other_arguments_are_left_alone(self):
        given = ["fit", "--config", "auto", "--trainer.accelerator", "auto", "--performance", "file.yaml", "--x=auto"]
        assert spelled_out(given) == given
        assert spelled_out(["--performance"]) == ["--performance"]

    def test_another_word(self, write, capsys):
        assert main(["fit", "--config", write("performance: fast")]) == 2
        error = capsys.readouterr().err
        assert "performance" in error and "fast" in error and error.count("\n") == 1


class TestPlanAndFit:
    def test_they_pick_the_same(self, write, capsys):
        file = write("performance: {memory: 1.0, physical_batch_size: 2}")
        assert main(["plan", "--config", file, "--memory", "0.000001", "--format", "json"]) == 1
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert len(rows) == 4, "on a CPU there is nothing to offload to"
        limit = (max(rows[1]["peak_bytes"], rows[1]["update_bytes"]) + rows[1]["optimizer_bytes"]) / GIB
        file = write(f"performance: {{memory: {limit!r}, physical_batch_size: 2}}")
        assert main(["fit", "--config", file]) == 0
        said = f"performance.memory={limit}: mlp_chunk=512: a step of 2 x 520 tokens takes {limit:.3g} GiB with Adam"
        assert said in capsys.readouterr().out
        # Without --memory the file's own; after the table of k.
        assert main(["plan", "--config", file, "--tokens", "520", "--sketch_dim", "4"]) == 0
        out = capsys.readouterr().out
        assert out.index("pick: exact norms") < out.index(f"pick: {said}")
        assert main(["plan", "--config", file, "--tokens", "520", "--sketch_dim", "4", "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["memory"]["pick"] == {"mlp_chunk": 512} and found["pick"]["sketch_dim"] is None
        assert found["memory"]["rows"] == rows[:2]

    def test_on_the_command_line(self, write, tmp_path, capsys):
        file = write("")
        assert main(["fit", "--config", file, "--performance", "auto", "--performance.physical_batch_size", "3"]) == 0
        assert "no flag added: a step of 3 x 520 tokens takes" in capsys.readouterr().out
        (report,) = tmp_path.glob("**/report.json")
        assert json.loads(report.read_text())["memory"]["setting"] == "auto"

    def test_what_a_gpu_could_offload(self, write, capsys):
        file = write("performance: {physical_batch_size: 2}")
        given = ["plan", "--config", file, "--trainer.accelerator", "auto", "--memory", "0.000001"]
        assert main([*given, "--trainer.strategy", "dprc_ddp", "--format", "json"]) == 1
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert rows[-1]["flags"] == {"checkpointing": True, "mlp_chunk": 512, "offload_checkpoints": True}
        assert main(given) == 1
        single = capsys.readouterr().out.split("\n")
        assert single[-2].startswith("performance.memory=1e-06: nothing fits; the least is ")
        assert single[2].split()[:3] == ["flags", "step", "GiB"] and len(single) == 11
        assert rows[0]["optimizer_bytes"] == 3 * 4 * sum(p.numel() for p in LlamaModule(privacy()).parameters())

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--memory", "nan"], "--memory=nan: expected GiB > 0"),
            (["--memory", "1", "--tokens", "8"], "--tokens=8: goes with --model"),
            (["--memory", "1", "--performance.mlp_chunk", "3"], "performance.mlp_chunk=3: expected a multiple of 512"),
            (
                ["--performance=auto", "--tokens=8", "--trainer.accelerator=gpu"],
                "memory=auto: trainer.accelerator=gpu, and",
            ),
        ],
    )
    def test_what_is_refused(self, write, arguments, says, capsys, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert main(["plan", "--config", write(""), *arguments]) == 2
        assert says in capsys.readouterr().err
