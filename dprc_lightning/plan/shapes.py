"""A model without its weights: every tensor has its shape and one number of memory."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.tasks.smollm2 import SMOLLM2, smollm2_folder

# What a checkpoint in another format needs the original loader for.
_OTHER_FORMATS = ("gguf_file", "quantization_config")


def hugging_face_model(source: str, lora: int | None = None) -> nn.Module:
    """A causal language model by its configuration alone.

    Args:
        source: A folder with config.json, a Hugging Face name (only its config.json is fetched), or ``smollm2``.
        lora: Rank of peft's LoRA on every linear layer but the head, all else frozen; None to train everything.

    Returns:
        The model, without weights.

    Raises:
        InvalidArgumentError: No such model, or a rank below 1.
    """
    if lora is not None and lora < 1:
        raise InvalidArgumentError("--lora", lora, "expected a rank >= 1")
    # Imported here: it takes seconds, and a wrong rank needs none of it.
    from transformers import AutoConfig, AutoModelForCausalLM

    if source == SMOLLM2:
        source = str(smollm2_folder())
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise InvalidArgumentError("--model", source, "has no config.json; name a Hugging Face folder")
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        remedy = f"cannot be planned for ({first_line}); name a folder with the config.json of a causal language model"
        raise InvalidArgumentError("--model", source, remedy) from error
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"), warnings.catch_warnings():
            # peft asks transformers by a name that it is about to drop.
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
    stand_in(model)
    return model


def stand_in(model: nn.Module) -> None:
    """Replace tensors on the meta device by ones of the same shape whose elements are all one number of memory.

    The rules of the layers look at values (is this norm what its name says?), which a meta tensor cannot show.

    Args:
        model: Changed in place; what is not on the meta device stays. Tied parameters stay tied.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                # Neither 0 nor 1: w and 1 + w, two kinds of norms, must differ.
                value = torch.full((), 0.5, dtype=parameter.dtype).expand(parameter.shape)
                # The original is kept too, so that its id is not given to another.
                made[id(parameter)] = parameter, nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.ones((), dtype=buffer.dtype).expand(buffer.shape)


@contextmanager
def weightless() -> Iterator[None]:
    """Inside, Hugging Face's ``from_pretrained`` reads a model's configuration, and stands in for its weights.

    Such a model still runs, so that code which tries it once when it is made gets on.

    Yields:
        Nothing.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel.__dict__["from_pretrained"]

    def from_configuration(cls: type[Any], name: Any, *args: Any, **settings: Any) -> Any:
        if any(settings.get(other) is not None for other in _OTHER_FORMATS):
            return original.__get__(None, cls)(name, *args, **settings)
        config = settings.get("config")
        if config is None:
            config = cls.config_class.from_pretrained(name)
        with torch.device("meta"):
            model = cls(config)
        dtype = settings.get("dtype", settings.get("torch_dtype"))
        if isinstance(dtype, torch.dtype):
            model = model.to(dtype)
        stand_in(model)
        loading: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        return (model.eval(), loading) if settings.get("output_loading_info") else model.eval()

    PreTrainedModel.from_pretrained = classmethod(from_configuration)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
