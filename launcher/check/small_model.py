"""Build a small model of a transformers family, a batch for it, and the section that suits it.

Owns the heads that a model can have, weights that make every term of the mathematics matter, and which
pattern the model's own attention is. Its configuration is small_config.py's.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch import IGNORE, Batch
from ds_ring.integrations.transformers.checks import works_as_is

from .small_config import VOCABULARY, special_tokens

SAMPLES = 2
MOST_PARAMETERS = 20_000_000
HIDDEN_CLASSES = 8  # labels of a model without a head: its hidden states are taken for logits
HAVE_A_LOSS = ("causal-lm", "seq2seq-lm", "sequence-classification")


class Head(NamedTuple):
    """Name the class that makes a model with this head, and transformers' table of the families that have
    one.
    """

    maker: str
    families: Any


HEADS = {
    "causal-lm": Head("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked-lm": Head("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq-lm": Head("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "speech-seq2seq-lm": Head(
        "AutoModelForSpeechSeq2Seq", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    ),
    "sequence-classification": Head(
        "AutoModelForSequenceClassification", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ),
    "token-classification": Head(
        "AutoModelForTokenClassification", modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    ),
    "base": Head("AutoModel", modeling_auto.MODEL_MAPPING_NAMES),
}


def section_for(model: PreTrainedModel, head: str) -> dict[str, Any]:
    """Return the section as its user would write it: windows and chunks are the model's to say."""
    kind = type(model)
    as_is = not kind._supports_attention_backend and works_as_is(kind)
    causal = head != "masked-lm" and not _is_encoder(model.config)
    return {"pattern": {"causal": causal}} | ({"attention": "as_is"} if as_is else {})


def usual_head(config: PreTrainedConfig) -> str:
    """Return the key of HEADS that the family is mostly used with."""
    family = config.model_type
    if config.is_encoder_decoder:
        return "speech-seq2seq-lm" if family in HEADS["speech-seq2seq-lm"].families else "seq2seq-lm"
    if _is_encoder(config):
        return "masked-lm"
    return "causal-lm" if family in HEADS["causal-lm"].families else "base"


def _is_encoder(config: PreTrainedConfig) -> bool:
    return config.model_type in HEADS["masked-lm"].families and not getattr(config, "is_decoder", False)


def build(config: PreTrainedConfig, head: str, seed: int) -> PreTrainedModel:
    """Return the model in float32, the same on every rank, with weights that leave nothing at zero or one.

    Raises:
        RingConfigError: there is no such head, or no such model, or it would be large.
    """
    if head not in HEADS:
        raise RingConfigError(f"head: expected one of {', '.join(HEADS)}, got {head!r}")
    class_name, families = HEADS[head]
    make = getattr(transformers, class_name).from_config
    # Of the text part of Emu 3 and Mllama transformers makes a model, but not by its model type.
    outer = next((families[one] for one in families if config.model_type.startswith(f"{one}_")), None)
    if config.model_type not in families and outer is not None:
        make = getattr(transformers, outer)._from_config
    elif config.model_type not in families:
        having = [name for name, one in HEADS.items() if config.model_type in one.families]
        raise RingConfigError(
            f"{config.model_type}: expected a model with the head {head}, transformers has none of that type;"
            f" use {' or '.join(having) or 'another model'}"
        )
    if head == "sequence-classification" and config.pad_token_id is None:
        config.pad_token_id = 0  # transformers asks for one to find the last token of each sample
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in make(config).parameters())
        if parameters > MOST_PARAMETERS:
            raise ValueError(f"it would still have {parameters:,} parameters")
        torch.manual_seed(seed)
        model = make(config, dtype=torch.float32)
    except Exception as error:
        raise RingConfigError(
            f"{config.model_type}: the small model cannot be made: {type(error).__name__}: {error}; give the"
            " config.json of a model that is small already"
        ) from error
    _randomise(model, seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # those that have a default where the configuration is silent
    trained: PreTrainedModel = model.train()
    return trained


def _randomise(model: nn.Module, seed: int) -> None:
    """Make scores of attention and routing of order one (they start nearly flat), and no bias zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(parameter.shape[-2:]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of DeepSeek's routers
                generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))


def make_batch(config: PreTrainedConfig, head: str, tokens: int, seed: int) -> Batch:
    """Return two samples without special tokens; some labels are left out, on one rank more than another."""
    labels = config.num_labels or 2
    special = special_tokens(config.to_dict())
    plain = torch.tensor([token for token in range(VOCABULARY) if token not in special])
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (SAMPLES, tokens)
    ids_BT = plain[torch.randint(len(plain), shape, generator=generator)]
    if head == "sequence-classification":
        return {"input_ids": ids_BT, "labels": torch.arange(SAMPLES) % labels}
    classes = {"token-classification": labels, "base": HIDDEN_CLASSES}.get(head)
    labels_BT = ids_BT.clone() if classes is None else torch.randint(classes, shape, generator=generator)
    labels_BT[0, : tokens // 3] = IGNORE
    return {"input_ids": ids_BT, ("labels" if head in HAVE_A_LOSS else "shift_labels"): labels_BT}


# One batch has three forms: plain, padded on the right, packed with documents.
# Shapes: B samples, T tokens, D rows of one process, L tokens in such a row, N tokens that are compared.

Form = Literal["plain", "padded", "packed"]
FORMS: tuple[Form, ...] = ("plain", "padded", "packed")


class Given(NamedTuple):
    """Hold one form of a batch."""

    form: Form
    ring: Batch  # whole, [B, T]
    alone: Batch  # [D, L]
    rows: tuple[Tensor, Tensor] | None  # of the ring's and of one process's tokens that are compared, [N]

    def of_ring(self, x: Tensor) -> Tensor:
        """Return the tokens [1, N, ...] of a result [B, T, ...] that are compared; all of one of samples."""
        return _taken(x, self.rows and self.rows[0], self.ring)

    def of_one(self, x: Tensor) -> Tensor:
        """Return the same of a result [D, L, ...] of one process."""
        return _taken(x, self.rows and self.rows[1], self.alone)


def _taken(x: Tensor, rows: Tensor | None, batch: Batch) -> Tensor:
    shape = batch["input_ids"].shape
    return x if rows is None or x.shape[:2] != shape else x.flatten(0, 1)[rows][None]


def needs_documents(form: Form, causal: bool) -> bool:
    """Return whether a form takes "documents": true; a causal pattern hides padding by itself."""
    return form == "packed" or (form == "padded" and not causal)


def make_form(form: Form, plain: Batch, padding: int, causal: bool) -> Given:
    """Return a form of a plain batch.

    Args:
        form: which.
        plain: input_ids [B, T], and labels or shift_labels [B, T], or labels [B] of samples.
        padding: the id of tokens that are none.
        causal: whether the model is: then no document's last token has a label.
    """
    if form == "plain":
        return Given(form, plain, plain, None)
    ids_BT = plain["input_ids"]
    documents_BT = _documents(ids_BT.shape[1]) if form == "packed" else _lengths(ids_BT.shape[1])
    real_BT = documents_BT >= 0
    ends_BT = torch.nn.functional.pad(documents_BT.diff(dim=1) != 0, (0, 1), value=True)
    batch: Batch = {"input_ids": ids_BT.masked_fill(~real_BT, padding)}
    for key, labels in plain.items():
        if key == "input_ids":
            continue
        batch[key] = labels if labels.ndim == 1 else labels.masked_fill(~real_BT, IGNORE)
        if key == "shift_labels" and causal:
            batch[key] = batch[key].masked_fill(ends_BT, IGNORE)
    if form == "padded":
        batch["attention_mask"] = real_BT.long()
        return Given(form, batch, batch, (real_BT.flatten().nonzero()[:, 0],) * 2)
    ring_rows, alone_rows, alone = _unpacked(batch, documents_BT, padding)
    return Given(form, batch | {"document_ids": documents_BT}, alone, (ring_rows, alone_rows))


def _lengths(tokens: int) -> Tensor:
    """Return 0 for tokens of two samples, and -1 for padding: a little, and nearly half."""
    ends = torch.tensor([[tokens - 3], [tokens // 2 + 2]])
    return torch.where(torch.arange(tokens) < ends, 0, -1)


def _documents(tokens: int) -> Tensor:
    """Return the documents of two rows, some across the ranks' borders; the second row ends with padding."""
    starts = [[tokens // 3, tokens // 2 + 4], [tokens // 4, tokens - tokens // 8]]
    at = torch.arange(tokens)
    documents_BT = torch.stack([sum((at >= start).long() for start in row) + 0 * at for row in starts])
    documents_BT[1, starts[1][1] :] = -1
    return documents_BT


def _unpacked(batch: Batch, documents_BT: Tensor, padding: int) -> tuple[Tensor, Tensor, Batch]:
    """Return where tokens stand in the packed batch, where in one row for each document, and those rows."""
    tokens = documents_BT.shape[1]
    spans = [
        (document_ids == number).nonzero()[:, 0] + row * tokens
        for row, document_ids in enumerate(documents_BT)
        for number in range(int(document_ids.max()) + 1)
    ]
    longest = max(map(len, spans))
    ring_rows = torch.cat(spans)
    alone_rows = torch.cat([torch.arange(len(span)) + row * longest for row, span in enumerate(spans)])
    alone: Batch = {"attention_mask": torch.zeros(len(spans) * longest, dtype=torch.int64)}
    alone["attention_mask"][alone_rows] = 1
    for key, values in batch.items():
        alone[key] = torch.full((len(spans) * longest,), padding if key == "input_ids" else IGNORE)
        alone[key][alone_rows] = values.flatten()[ring_rows]
    return ring_rows, alone_rows, {key: x.view(len(spans), longest) for key, x in alone.items()}
