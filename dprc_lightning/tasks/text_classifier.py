"""A text classifier on the mean-pooled features of a pretrained decoder, shaped for private training."""

import contextlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dprc_lightning.errors import DatasetError, InvalidArgumentError
from dprc_lightning.tasks.smollm2 import SMOLLM2, load_pretrained
from dprc_lightning.tasks.tokenized import PadCollator, TokenizedItem

ComputeDtype = Literal["float32", "bfloat16"]


class MeanPooledClassifier(nn.Module):
    """A decoder whose states are averaged over each record's own tokens, centred, scaled, and classified linearly.

    With ``h`` the mean over a record's tokens of the final norm's output, the feature is
    ``f = scale * normalise(normalise(h) - public_mean)`` and the logits are ``head(f)``. Every feature thus has
    Euclidean norm ``scale``, whatever the record: gradients of the head are of one size, so that clipping takes little
    from them. Centring matters most: the mean states of all texts point nearly the same way, and without it the head
    would spend its steps, and the noise, on what they have in common.

    The head starts at zero: before the first step all logits are 0, all classes equally likely, and the gradient of
    everything below the head is exactly 0.

    Formal Guarantees:
        Each record's logits depend on that record alone: not on the other rows of the batch, nor on the padding.
        ``public_mean`` comes from public text and costs no privacy; computed from training records it would have to be
        paid for.

    Args:
        backbone: A decoder-only causal model without a head, such as ``LlamaModel``: has ``layers`` and ``norm``; its
            forward returns ``last_hidden_state``. Used in place, not copied.
        num_classes: Number of classes, at least 2.
        trainable_blocks: How many of the last layers train, with all their matrices and norms, and with them the final
            norm; 0 to train the head alone.
        scale: Euclidean norm of every feature.
        compute_dtype: ``"bfloat16"`` runs the decoder under autocast; parameters, the residual stream, features and
            logits stay float32. ``"float32"`` leaves the precision to the caller.

    Attributes:
        public_mean: Buffer, float32 [hidden]: the mean of ``normalise(h)`` over public texts; zeros until
            `set_public_mean` is called.

    Raises:
        InvalidArgumentError: If an argument is outside its range.
    """

    public_mean: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        *,
        trainable_blocks: int = 2,
        scale: float = 5.0,
        compute_dtype: ComputeDtype = "float32",
    ) -> None:
        super().__init__()
        layers = _layers(backbone)
        if num_classes < 2:
            raise InvalidArgumentError("num_classes", num_classes, "a classifier needs at least 2 classes")
        if not 0 <= trainable_blocks <= len(layers):
            raise InvalidArgumentError(
                "trainable_blocks", trainable_blocks, f"pass 0 to {len(layers)}: the model's layers"
            )
        if not scale > 0:
            raise InvalidArgumentError("scale", scale, "pass a positive number")
        if compute_dtype not in ("float32", "bfloat16"):
            raise InvalidArgumentError("compute_dtype", compute_dtype, "pass 'float32' or 'bfloat16'")
        self.backbone = backbone
        self.num_classes, self.trainable_blocks, self.scale = num_classes, trainable_blocks, scale
        self.compute_dtype: ComputeDtype = compute_dtype
        hidden = int(backbone.get_parameter("norm.weight").shape[0])
        self.head = nn.Linear(hidden, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("public_mean", torch.zeros(hidden))

        # Nothing below the first trained layer requires a gradient, so autograd records no graph there.
        backbone.requires_grad_(False)
        if trainable_blocks:
            backbone.get_submodule("norm").requires_grad_(True)
            for layer in layers[len(layers) - trainable_blocks :]:
                layer.requires_grad_(True)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Classify records.

        Args:
            input_ids: int64 [B, T], padded on the right with any valid token.
            lengths: int64 [B], the number of tokens of each record, from 1 to T.

        Returns:
            Logits, float32 [B, num_classes].
        """
        return self.head_logits(self.features(input_ids, lengths))

    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """The head's input.

        Args:
            input_ids: int64 [B, T], padded on the right with any valid token.
            lengths: int64 [B], the number of tokens of each record, from 1 to T.

        Returns:
            Features, float32 [B, hidden], each of Euclidean norm ``scale``.
        """
        centred = F.normalize(self._mean_state(input_ids, lengths), dim=-1) - self.public_mean
        return self.scale * F.normalize(centred, dim=-1)

    def head_logits(self, features: Tensor) -> Tensor:
        """Apply the head in float32, whatever precision surrounds it.

        Args:
            features: float32 [B, hidden].

        Returns:
            Logits, float32 [B, num_classes].
        """
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features)

    @torch.no_grad()
    def set_public_mean(self, input_ids: Tensor, lengths: Tensor) -> None:
        """Compute `public_mean` from public texts, through this very model.

        Args:
            input_ids: int64 [N, T], padded on the right. The texts must be public: their mean is part of the model.
            lengths: int64 [N].
        """
        directions = F.normalize(self._mean_state(input_ids, lengths), dim=-1)
        self.public_mean.copy_(directions.mean(dim=0))

    def _mean_state(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        device = input_ids.device
        half = self.compute_dtype == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16) if half else contextlib.nullcontext():
            # No attention mask: padding is on the right and attention is causal, so that no token sees any padding. The
            # mask is by length because the pad token may be the end-of-text token, which also occurs in texts.
            states = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        mask = torch.arange(states.shape[1], device=device) < lengths[:, None]
        return (states.float() * mask[..., None]).sum(dim=1) / lengths[:, None]


def public_sentences(path: str | Path | None = None) -> list[str]:
    """Public texts for the feature mean.

    Args:
        path: A UTF-8 file, one text a line; lines that start with ``#`` are skipped. None for the texts written for
            this package.

    Returns:
        The texts.

    Raises:
        DatasetError: If the file has none.
    """
    resource = files("dprc_lightning.tasks") / "public_sentences.txt" if path is None else Path(path)
    lines = [line.strip() for line in resource.read_text(encoding="utf-8").splitlines()]
    texts = [line for line in lines if line and not line.startswith("#")]
    if not texts:
        raise DatasetError(f"{path}: has no public texts; write one a line")
    return texts


def load_text_classifier(
    source: str = SMOLLM2,
    num_classes: int = 5,
    *,
    num_layers: int | None = 6,
    max_length: int = 128,
    trainable_blocks: int = 2,
    scale: float = 5.0,
    compute_dtype: ComputeDtype = "float32",
    sentences: Sequence[str] | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[MeanPooledClassifier, Any]:
    """Load a pretrained decoder as a classifier, with its feature mean computed from public texts.

    Args:
        source: ``"smollm2"``, a Hugging Face name, or a local folder.
        num_classes: Number of classes.
        num_layers: How many layers to keep, from the bottom; None for all.
        max_length: Tokens of each public text to use.
        trainable_blocks: How many of the last layers train.
        scale: Euclidean norm of every feature.
        compute_dtype: Precision of the decoder.
        sentences: Public texts; None for those of the package.
        cache_dir: Where the converted SmolLM2 is kept.

    Returns:
        The classifier, and the tokenizer.

    Raises:
        DatasetError: If the source cannot be loaded.
        InvalidArgumentError: If an argument is outside its range, or ``sentences`` is empty.
    """  # noqa: DOC502 (raised by what is called)
    backbone, tokenizer = load_pretrained(source, num_layers, cache_dir=cache_dir)
    model = MeanPooledClassifier(
        backbone, num_classes, trainable_blocks=trainable_blocks, scale=scale, compute_dtype=compute_dtype
    )
    texts = public_sentences() if sentences is None else list(sentences)
    if not texts:
        raise InvalidArgumentError("sentences", sentences, "pass public texts, or None for those of the package")
    rows = tokenizer(texts)["input_ids"]
    tokens = [torch.tensor(row[:max_length]) for row in rows]
    items: list[TokenizedItem] = [{"input_ids": row, "length": len(row), "label": 0} for row in tokens]
    batch = PadCollator(tokenizer.pad_token_id)(items)
    model.set_public_mean(batch["input_ids"], batch["lengths"])
    return model, tokenizer


def _layers(backbone: nn.Module) -> nn.ModuleList:
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(backbone, "norm", None), nn.Module):
        raise InvalidArgumentError(
            "backbone",
            type(backbone).__name__,
            "pass a decoder without a head that has `layers` and `norm` (LlamaModel)",
        )
    return layers
