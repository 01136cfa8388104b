"""A run's model as a plain Hugging Face folder, with a model card that says what the training promises.

The folder needs nothing of this package. It holds weights, configuration, tokenizer and card; never a secret, a ledger,
a path of the training data, or anything else of the run folder.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.checkpoint import CHECKPOINT_KEY
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import ExportError
from dprc_lightning.model_card import Contents, model_card
from dprc_lightning.module import DPRCModule
from dprc_lightning.report import read_report
from dprc_lightning.whole_checkpoint import load_whole

CONFIG_NAME = "config.yaml"
BESIDE_NAME = "beside_the_model.safetensors"
CARD_NAME = "README.md"


@dataclass(frozen=True)
class Parts:
    """What a module is made of, from the point of view of Hugging Face.

    Attributes:
        model: The model that has a folder format of its own.
        name: Its name in the module; empty if it is the module's own target.
        beside: Tensors of the module that are no part of it, such as a task head, under their names in the module.
        tokenizer: The tokenizer; None if there is none.
    """

    model: Any
    name: str
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None


def export(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str | Path | None = None,
    adapter_only: bool = False,
    merge: bool = False,
    module: DPRCModule | None = None,
    trust_checkpoint: bool = False,
) -> Path:
    """Write a run's model as a plain folder.

    Guarantee: the card's epsilon is that of every step in the run's ledger, and the weights are those of a checkpoint
    that this ledger knows. Whatever is written follows from the checkpoint and public settings alone.

    Args:
        run: Run folder.
        out: The new folder; it must not exist, or be empty. It appears complete or not at all.
        checkpoint: The run's checkpoint to take; needed if it has several.
        adapter_only: Write the adapter of a peft model and nothing beside it.
        merge: Merge the adapter of a peft model into its base model, and write the whole model.
        module: A module like the one that was trained; None to build it from the run's ``config.yaml``.
        trust_checkpoint: Read a folder of shards that this run's secret did not sign: its files can run code.

    Returns:
        ``out``.

    Raises:
        ExportError: What was asked for does not fit.
    """
    run, out = Path(run), Path(out)
    if adapter_only and merge:
        raise ExportError("--adapter_only, --merge: the first leaves out what the second needs; give one of them")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out}: exists; name a folder that does not exist, or is empty")
    report = read_report(run)
    file = find_checkpoint(run, report) if checkpoint is None else Path(checkpoint)
    content = load_whole(file, trust=trust_checkpoint)
    _refuse_foreign(run, file, content)
    tokenizer = None
    if module is None:
        module, tokenizer = build(run)
    try:
        module.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise ExportError(f"{file}: does not fit {type(module).__name__} ({' '.join(str(error).split())})") from None
    parts = find_parts(module, tokenizer)
    if (adapter_only or merge) and not isinstance(parts.model, PeftModel):
        option = "--merge" if merge else "--adapter_only"
        raise ExportError(f"{option}: {parts.name or 'the model'} is {type(parts.model).__name__}, no peft model")
    remembered = content.get(CHECKPOINT_KEY) or {}
    with _new_folder(out) as folder:
        contents = write_parts(folder, parts, adapter_only=adapter_only, merge=merge)
        step = remembered.get("applied_steps", remembered.get("global_step", content.get("global_step")))
        card = model_card(report, contents, checkpoint=file.name, step=step)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
    return out


def find_checkpoint(run: Path, report: Mapping[str, Any]) -> Path:
    """The checkpoint to take where none was named.

    Args:
        run: Run folder, wherever it lies now.
        report: Its report.

    Returns:
        The only one, or the one that the report names.

    Raises:
        ExportError: There is none, or no telling which.
    """
    found = sorted((run / "checkpoints").glob("*.ckpt"))
    named = Path(report["paths"].get("checkpoint", "")).name
    chosen = found if len(found) == 1 else [file for file in found if file.name == named]
    if len(chosen) == 1:
        return chosen[0]
    if not found:
        raise ExportError(f"{run / 'checkpoints'}: no checkpoint; name one with --checkpoint FILE")
    raise ExportError(f"{run}: has {', '.join(file.name for file in found)}; name one with --checkpoint FILE")


def _refuse_foreign(run: Path, file: Path, content: Mapping[str, Any]) -> None:
    """Weights that this run's ledger does not account for must not get its statement."""
    if not os.path.lexists(run / LEDGER_NAME):
        # A baseline: its card says that nothing is protected.
        return
    head = (content.get(CHECKPOINT_KEY) or {}).get("ledger_head")
    if head is None:
        raise ExportError(f"{file}: not a checkpoint of a private run; name one of {run} with --checkpoint")
    Ledger.open(run / LEDGER_NAME, read_only=True, must_contain=head)


def build(run: Path) -> tuple[DPRCModule, PreTrainedTokenizerBase | None]:
    """Build what the run's ``config.yaml`` names, without trainer and data.

    Args:
        run: Run folder.

    Returns:
        The module, with its weights as its ``__init__`` has them, and the data module's tokenizer, if it has one.

    Raises:
        ExportError: There is no such file, or it names what cannot be built.
    """
    path = run / CONFIG_NAME
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(
            f"{path}: not found: the run was not made by dprc fit; call dprc_lightning.export.export(run, out, "
            "module=...) with a module like the one that was trained"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ExportError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PrivacyConfig, "privacy")
    parser.add_class_arguments(PerformanceConfig, "performance")
    parser.add_subclass_arguments(DPRCModule, "model", required=True)
    parser.add_subclass_arguments(DPRCDataModule, "data", required=False)
    parser.link_arguments("privacy", "model.init_args.privacy")
    parser.link_arguments("performance", "model.init_args.performance")
    wanted = ("privacy", "performance", "model", "data")
    try:
        parsed = parser.parse_object({name: config[name] for name in wanted if name in config})
    except (ArgumentError, TypeError) as error:
        raise ExportError(f"{path}: cannot be built ({' '.join(str(error).split())})") from None
    made = parser.instantiate_classes(parsed)
    tokenizer = getattr(made.get("data"), "tokenizer", None)
    return made["model"], tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def find_parts(module: DPRCModule, tokenizer: PreTrainedTokenizerBase | None = None) -> Parts:
    """Find the Hugging Face model in a module.

    Args:
        module: It may say itself which one is meant, by a method ``export_target()`` that returns it.
        tokenizer: Used if the module has no attribute ``tokenizer``.

    Returns:
        The outermost transformers or peft model, and what lies beside it.

    Raises:
        ExportError: There is none, or more than one.
    """
    target = getattr(module, "export_target", None)
    if target is not None:
        model = target()
        found = [(name, m) for name, m in module.named_modules() if m is model]
        if not found:
            raise ExportError(f"{type(module).__name__}.export_target: returned what is no part of the module")
    else:
        found = _outermost(module)
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise ExportError(
            f"{type(module).__name__}: one transformers or peft model is exported, found {names}; write a method "
            "export_target() that returns the one that is meant"
        )
    name, model = found[0]
    if not isinstance(model, PreTrainedModel | PeftModel):
        raise ExportError(
            f"{type(module).__name__}.export_target: {type(model).__name__} is no transformers or peft model"
        )
    beside = {key: value for key, value in module.state_dict().items() if not key.startswith(f"{name}.")}
    if isinstance(model, PeftModel):
        beside |= {f"{name}.{key}": value for key, value in _trained_outside_adapter(model).items()}
    own = getattr(module, "tokenizer", None)
    return Parts(model, name, beside, own if isinstance(own, PreTrainedTokenizerBase) else tokenizer)


def _outermost(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(part, PreTrainedModel | PeftModel) and not inside:
            found.append((name, part))
    return found


def _trained_outside_adapter(model: PeftModel) -> dict[str, Tensor]:
    """Parameters of a peft model that trained and that its adapter's files leave out."""
    # The adapter's files use names of their own for what the model stores.
    stored = {value.data_ptr() for value in get_peft_model_state_dict(model).values()}
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad and p.data_ptr() not in stored}


def write_parts(folder: Path, parts: Parts, *, adapter_only: bool = False, merge: bool = False) -> Contents:
    """Write model, tokenizer, and what lies beside the model.

    Args:
        folder: An empty folder.
        parts: What to write.
        adapter_only: Leave out what lies beside the model.
        merge: Merge an adapter into its base model.

    Returns:
        What is in the folder now, and what is not.

    Raises:
        ExportError: The merged model is none of transformers.
    """
    model, beside = parts.model, dict(parts.beside)
    if merge:
        # What trained outside of the adapter is part of the whole model.
        beside = {name: value for name, value in beside.items() if not name.startswith(f"{parts.name}.")}
        model = model.merge_and_unload()
        if not isinstance(model, PreTrainedModel):
            raise ExportError(f"--merge: the base model is {type(model).__name__}, none of transformers; leave it out")
    model.save_pretrained(folder)
    if parts.tokenizer is not None:
        parts.tokenizer.save_pretrained(folder)
    if beside and not adapter_only:
        # safetensors refuses tensors that share memory, as tied ones do.
        save_file(
            {name: value.detach().cpu().clone().contiguous() for name, value in beside.items()}, folder / BESIDE_NAME
        )
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return Contents(
        model_class=type(base).__name__,
        is_adapter=isinstance(model, PeftModel),
        base_model=str(getattr(base, "name_or_path", "") or ""),
        num_layers=getattr(getattr(base, "config", None), "num_hidden_layers", None),
        beside={name: tuple(value.shape) for name, value in beside.items()},
        beside_file=None if adapter_only or not beside else BESIDE_NAME,
        has_tokenizer=parts.tokenizer is not None,
    )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that gets its name at the end, if nothing was raised.

    Args:
        out: The name.

    Yields:
        The folder, empty.
    """
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}."))
    try:
        yield work
        # mkdtemp and safetensors make things that their owner alone can read; none of this is secret.
        mask = os.umask(0)
        os.umask(mask)
        for path in (work, *work.rglob("*")):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        # An empty folder of that name gives way.
        os.replace(work, out)
    except BaseException:
        shutil.rmtree(work)
        raise
