"""Export: what Hugging Face loads from the folder is what was trained, and the card says what was promised."""

from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from toy import ToyData, ToyModule, ZeroNoise, checkpointing, privacy, trainer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from dprc_lightning import DPRCDataModule, DPRCModule, PerformanceConfig, PrivacyConfig
from dprc_lightning.cli import main
from dprc_lightning.errors import DPRCError, ExportError, LedgerError
from dprc_lightning.export import export, find_checkpoint, find_parts
from dprc_lightning.report import read_report
from dprc_lightning.tasks.text_classifier import MeanPooledClassifier

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


class Language(DPRCModule):
    """A language model as a whole, or LoRA in it."""

    def __init__(
        self,
        privacy: PrivacyConfig,
        performance: PerformanceConfig = PerformanceConfig(physical_batch_size=8),  # noqa: B008
        lora: bool = False,
        norms_too: bool = False,
    ) -> None:
        super().__init__(privacy, performance)
        torch.manual_seed(3)
        model = LlamaForCausalLM(config())
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), eos_token="w0", unk_token="w1")
        if lora:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
        if norms_too:
            model.get_submodule("base_model.model.model.norm").requires_grad_(True)
        self.model = model

    def per_sample_loss(self, batch):
        logits = self.model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


class Sentences(DPRCDataModule):
    def train_dataset(self):
        return torch.randint(0, 12, (24, 6), generator=torch.Generator().manual_seed(5))


class Classifier(ToyModule):
    """A decoder without a head, and a head of one's own beside it."""

    def __init__(self, privacy: PrivacyConfig, performance: PerformanceConfig | None = None) -> None:
        super().__init__(privacy, performance)
        torch.manual_seed(4)
        del self.net
        self.classifier = MeanPooledClassifier(LlamaModel(config()), 3, trainable_blocks=1)
        self.classifier.public_mean.fill_(0.1)

    def per_sample_loss(self, batch):
        logits = self.classifier(batch, torch.full((len(batch),), batch.shape[1]))
        return nn.functional.cross_entropy(logits, batch[:, 0] % 3, reduction="none")


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(12)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


SETTINGS = {"steps": 2, "sample_rate": 0.5, "delta": 1e-2, "estimator": "exact", "check_isolation": False}


def trained(folder: Path, kind=Language, noise=None, **arguments):
    module = kind(privacy(**(SETTINGS | arguments.pop("privacy", {}))), **arguments)
    trainer(folder, noise, **checkpointing(folder)).fit(module, datamodule=Sentences())
    return module.eval(), folder / "checkpoints" / "step=2.ckpt"


def card_of(out: Path) -> tuple[dict, str]:
    _, head, body = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


class TestWholeModel:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("whole") / "run"
        return (folder, *trained(folder))

    def test_it_loads_and_computes_the_same(self, run, tmp_path):
        folder, module, checkpoint = run
        # The module at hand is one with other weights: those of the checkpoint count.
        fresh = Language(privacy(**SETTINGS))
        assert export(folder, tmp_path / "out", checkpoint=checkpoint, module=fresh) == tmp_path / "out"
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(loaded(IDS).logits, module.model(IDS).logits)
        assert not torch.equal(loaded(IDS).logits, Language(privacy(**SETTINGS)).model(IDS).logits)
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w4")["input_ids"] == [3, 4]
        assert not list(tmp_path.glob(".*")), "no temporary folder is left"
        (tmp_path / "usual").touch()
        usual = (tmp_path / "usual").stat().st_mode
        assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {usual}

    def test_an_earlier_checkpoint(self, run, tmp_path):
        folder, module, checkpoint = run
        export(folder, tmp_path / "out", checkpoint=checkpoint.with_name("step=1.ckpt"), module=module)
        _, body = card_of(tmp_path / "out")
        assert "checkpoint `step=1.ckpt`, after step 1" in body
        # All steps of the run are paid for, whichever checkpoint is shown.
        assert f"{read_report(folder)['epsilon']['upper']:.4f}" in body
        module.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])

    def test_the_card(self, run, tmp_path):
        folder, module, checkpoint = run
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=module)
        head, body = card_of(tmp_path / "out")
        report = read_report(folder)
        promised = head["differential_privacy"]
        assert head["library_name"] == "transformers" and promised["steps"] == 2
        assert promised["epsilon"] == report["epsilon"]["upper"] and promised["delta"] == 0.01
        for part in ("one training record, added or removed", "noise multiplier 1.0000", "N = 24", "q = 0.50000"):
            assert part in body, part
        assert all(line in body for line in report["assumptions"]) and "NOT" not in body
        assert str(folder) not in (tmp_path / "out" / "README.md").read_text(), "paths are nobody's business"

    def test_no_secret_leaves_the_run(self, run, tmp_path):
        folder, module, checkpoint = run
        secret = (folder / "secret.key").read_bytes()
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=module)
        files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
        assert {f.name for f in files} >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
        for file in files:
            content = file.read_bytes()
            assert secret not in content and secret.hex().encode() not in content, file

    def test_what_is_refused(self, run, tmp_path):
        folder, module, checkpoint = run
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine.txt").write_text("mine")
        for out, arguments, said in (
            ("full", {}, "exists; name a folder"),
            ("full/mine.txt", {}, "exists; name a folder"),
            ("out", {"adapter_only": True}, "--adapter_only: model is LlamaForCausalLM, no peft model"),
            ("out", {"merge": True}, "--merge: model is"),
            ("out", {"merge": True, "adapter_only": True}, "give one of them"),
            ("out", {"module": None}, "config.yaml: not found"),
            ("out", {"module": Language(privacy(**SETTINGS), lora=True)}, "does not fit Language"),
        ):
            with pytest.raises(ExportError, match=said) as caught:
                export(folder, tmp_path / out, **({"checkpoint": checkpoint, "module": module} | arguments))
            assert "\n" not in str(caught.value)
        assert sorted(f.name for f in tmp_path.iterdir()) == ["full"], "nothing is left of what failed"

    def test_an_empty_folder_gives_way(self, run, tmp_path):
        folder, module, checkpoint = run
        (tmp_path / "out").mkdir()
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=module)
        assert (tmp_path / "out" / "README.md").exists()

    def test_a_failure_leaves_nothing(self, run, tmp_path, monkeypatch):
        folder, module, checkpoint = run

        def full(*_, **__):
            raise OSError("no space left on device")

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(OSError, match="no space"):
            export(folder, tmp_path / "out", checkpoint=checkpoint, module=module)
        assert not list(tmp_path.iterdir())

    def test_weights_of_another_run_do_not_get_this_runs_statement(self, run, tmp_path):
        folder, module, _ = run
        _, other = trained(tmp_path / "other")
        with pytest.raises(LedgerError, match="does not contain the checkpoint's last entry"):
            export(folder, tmp_path / "out", checkpoint=other, module=module)
        torch.save({"state_dict": module.state_dict()}, tmp_path / "weights.ckpt")
        with pytest.raises(ExportError, match="not a checkpoint of a private run"):
            export(folder, tmp_path / "out", checkpoint=tmp_path / "weights.ckpt", module=module)


class TestAdapter:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("lora") / "run"
        return (folder, *trained(folder, lora=True, norms_too=True))

    def fresh(self):
        return Language(privacy(**SETTINGS), lora=True, norms_too=True)

    def base(self):
        torch.manual_seed(3)
        return LlamaForCausalLM(config()).eval()

    def test_the_adapter_and_what_else_trained(self, run, tmp_path):
        folder, module, checkpoint = run
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=self.fresh())
        assert not (tmp_path / "out" / "model.safetensors").exists(), "the base model is not copied"
        norm = "model.base_model.model.model.norm.weight"
        beside = load_file(tmp_path / "out" / "beside_the_model.safetensors")
        assert set(beside) == {norm}
        loaded = PeftModel.from_pretrained(self.base(), tmp_path / "out")
        assert not torch.equal(loaded(IDS).logits, module.model(IDS).logits)
        loaded.load_state_dict({norm.removeprefix("model."): beside[norm]}, strict=False)
        assert torch.equal(loaded(IDS).logits, module.model(IDS).logits)
        head, body = card_of(tmp_path / "out")
        assert head["library_name"] == "peft" and f"`{norm}` [8]" in body and "2 layers" in body

    def test_the_adapter_only_says_what_is_missing(self, run, tmp_path):
        folder, _, checkpoint = run
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=self.fresh(), adapter_only=True)
        assert not (tmp_path / "out" / "beside_the_model.safetensors").exists()
        _, body = card_of(tmp_path / "out")
        assert "NOT in this folder: what else the trained module has" in body and "norm.weight" in body

    def test_merged(self, run, tmp_path):
        folder, module, checkpoint = run
        export(folder, tmp_path / "out", checkpoint=checkpoint, module=self.fresh(), merge=True)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.allclose(loaded(IDS).logits, module.model(IDS).logits, atol=1e-6)
        assert not torch.allclose(loaded(IDS).logits, self.base()(IDS).logits, atol=1e-4)
        names = {file.name for file in (tmp_path / "out").iterdir()}
        assert not names & {"adapter_config.json", "beside_the_model.safetensors"}
        assert card_of(tmp_path / "out")[0]["library_name"] == "transformers"


class TestHeadBeside:
    def test_decoder_and_head(self, tmp_path):
        module, checkpoint = trained(tmp_path / "run", Classifier)
        export(tmp_path / "run", tmp_path / "out", checkpoint=checkpoint, module=Classifier(privacy(**SETTINGS)))
        beside = load_file(tmp_path / "out" / "beside_the_model.safetensors")
        assert set(beside) == {"classifier.head.weight", "classifier.head.bias", "classifier.public_mean"}
        rebuilt = MeanPooledClassifier(AutoModel.from_pretrained(tmp_path / "out"), 3, trainable_blocks=1).eval()
        rebuilt.load_state_dict({n.removeprefix("classifier."): t for n, t in beside.items()}, strict=False)
        lengths = torch.tensor([5, 3])
        assert torch.equal(rebuilt(IDS, lengths), module.classifier(IDS, lengths))
        _, body = card_of(tmp_path / "out")
        assert "`classifier.head.weight` [3, 8]" in body and "NOT in this folder: a tokenizer" in body


class TestNotPrivate:
    @pytest.mark.parametrize("how", ["baseline", "test stream"])
    def test_the_card_says_so(self, how, tmp_path):
        changes = {"baseline_without_privacy": True} if how == "baseline" else {}
        noise = None if changes else ZeroNoise()
        module, checkpoint = trained(tmp_path / "run", noise=noise, privacy=changes)
        export(tmp_path / "run", tmp_path / "out", checkpoint=checkpoint, module=module)
        head, body = card_of(tmp_path / "out")
        assert "**NOT PRIVATE**" in body and "**without** differential privacy" in body and "epsilon =" not in body
        assert head["differential_privacy"] is False and "differential-privacy" not in head["tags"]


class TestWhichCheckpoint:
    def test_the_only_one_or_the_one_that_the_report_names(self, tmp_path):
        report = {"paths": {"checkpoint": "/where/it/was/checkpoints/b.ckpt"}}
        with pytest.raises(ExportError, match="checkpoints: no checkpoint"):
            find_checkpoint(tmp_path, report)
        (tmp_path / "checkpoints").mkdir()
        for name in ("a.ckpt", "b.ckpt"):
            file = tmp_path / "checkpoints" / name
            file.touch()
            assert find_checkpoint(tmp_path, report) == file
        with pytest.raises(ExportError, match="has a.ckpt, b.ckpt; name one with --checkpoint"):
            find_checkpoint(tmp_path, {"paths": {}})


class TestWhichModel:
    def module(self, **models):
        module = ToyModule(privacy())
        for name, model in models.items():
            setattr(module, name, model)
        return module

    def test_none_or_two(self):
        with pytest.raises(ExportError, match="found none; write a method export_target"):
            find_parts(self.module())
        two = self.module(a=LlamaModel(config()), b=LlamaModel(config()))
        with pytest.raises(ExportError, match="found a, b; write a method export_target"):
            find_parts(two)
        two.export_target = lambda: two.b
        parts = find_parts(two)
        assert parts.model is two.b and any(name.startswith("a.") for name in parts.beside)
        two.export_target = lambda: nn.Linear(1, 1)
        with pytest.raises(ExportError, match="no part of the module"):
            find_parts(two)
        two.export_target = lambda: two.net
        with pytest.raises(ExportError, match="Sequential is no transformers or peft model"):
            find_parts(two)


CONFIG = """
seed_everything: 0
privacy: {{noise_multiplier: 1.0, delta: 1.0e-2, sample_rate: 0.5, steps: 2, estimator: exact, check_isolation: false}}
performance: {{physical_batch_size: 8}}
model: {{class_path: test_export.Language, init_args: {{lora: true}}}}
data: {{class_path: test_export.Sentences}}
trainer:
  accelerator: cpu
  enable_model_summary: false
  enable_progress_bar: false
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {{save_dir: {folder}, name: run, version: ""}}
"""


class TestCommand:
    def test_fit_then_export(self, tmp_path, capsys):
        (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
        assert main(["fit", "--config", str(tmp_path / "config.yaml")]) == 0
        run, out = tmp_path / "run", tmp_path / "out"
        capsys.readouterr()
        # A run folder may have moved.
        run = run.rename(tmp_path / "elsewhere")
        assert main(["export", str(run), str(out), "--merge"]) == 0
        assert "exported" in capsys.readouterr().out
        (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
        module = Language(privacy(**SETTINGS), lora=True)
        module.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert torch.allclose(loaded(IDS).logits, module.eval().model(IDS).logits, atol=1e-6)
        capsys.readouterr()
        assert main(["export", str(run), str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"dprc: error: {out}: exists") and error.count("\n") == 1

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("model: {class_path: test_export.Nowhere}", "cannot be built"),
            ("model: {class_path: test_export.Language, init_args: {nonsense: 1}}", "cannot be built"),
            ("model: [", "cannot be read"),
            ("just words", "cannot be built"),
        ],
    )
    def test_a_config_that_cannot_be_built(self, text, said, tmp_path):
        module, checkpoint = ToyModule(privacy()), checkpointing(tmp_path)
        trainer(tmp_path, **checkpoint).fit(module, datamodule=ToyData())
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ExportError, match=f"config.yaml: {said}") as caught:
            export(tmp_path, tmp_path / "out", checkpoint=tmp_path / "checkpoints" / "step=4.ckpt")
        assert "\n" not in str(caught.value) and issubclass(ExportError, DPRCError)
