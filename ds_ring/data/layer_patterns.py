"""Combine the model's own pattern of a layer with the pattern in the JSON.

Owns the rule that combines the two, its error, and the meaning of the words in a transformers configuration's
`layer_types`. Other files read the model's pattern: models/layer_masks.py from
transformers' masks, graph_attention.py from a compiled graph, and launcher/plan/model_file.py from a
config.json without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_

from ds_ring.errors import RingPatternError
from ds_ring.masks.catalog import Causal, Chunked, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.documents.pattern import Documents

# words of `layer_types`, each with the key of the configuration that has its width
NARROW = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of layers in the JSON."""

    pattern: Pattern  # of all layers that the JSON does not name
    named: Mapping[int, Pattern]  # of the layers that it names, by number from 0

    def for_layer(
        self, tokens: int, model_pattern: Pattern | None, layer: int | None, mixed: bool
    ) -> Pattern:
        """Return the pattern of a layer, without documents.

        Args:
            tokens: length of the sequence.
            model_pattern: the model's own, [Note: the pattern of a layer]; None if it has none.
            layer: the layer's number, from 0.
            mixed: whether layers of the model differ.

        Raises:
            RingPatternError: the model and the JSON contradict each other, or the JSON names layers and the
                number of this layer is unknown.
        """
        if self.named and layer is None:
            raise RingPatternError(
                'attention: expected the number of the layer, since "layers" in the JSON names some, got'
                ' none; call engine.ring.attention(layer=0) for the first, or leave "layers" out'
            )
        json_pattern = self.pattern if layer is None else self.named.get(layer, self.pattern)
        if model_pattern is None:
            return json_pattern
        return resolve_layer_pattern(model_pattern, json_pattern, tokens, layer in self.named, mixed)

    def counted(self, tokens: int, model_patterns: Sequence[Pattern]) -> Counter[Pattern]:
        """Count the layers of each pattern; `model_patterns`, in order of layers, is empty if unknown."""
        counts: Counter[Pattern] = Counter()
        count = max([len(model_patterns), 1, *(layer + 1 for layer in self.named)])
        for layer, model_pattern in enumerate(model_patterns or [None] * count):
            try:
                counts[self.for_layer(tokens, model_pattern, layer, len(set(model_patterns)) > 1)] += 1
            except RingPatternError:  # raised again when the layer runs
                counts[self.pattern] += 1
        return counts


# [Note: the pattern of a layer] A layer of a model is causal or not, and may have a window or a chunk
# (`model_pattern`). The JSON's pattern is combined with it by these rules:
# - Both must be causal, or neither. transformers' causal models are bidirectional by `config.is_causal`.
# - A layer with a window (or chunk) keeps it if the JSON has none, or has the same one.
# - A layer that attends to everything gets the JSON's pattern: we assume that a narrower one (LongNet, a
#   window) is intended. In a model whose other layers have windows this is not clear, so the JSON must name
#   the layer.
# Everything else raises an error, so that no layer is changed silently. A window as long as the sequence
# counts as no window.
@lru_cache(maxsize=1024)
def resolve_layer_pattern(
    model_pattern: Pattern, json_pattern: Pattern, tokens: int, named: bool, mixed: bool
) -> Pattern:
    """Return the pattern of a layer, or raise RingPatternError: [Note: the pattern of a layer].

    Args:
        model_pattern: Causal or Full, SlidingWindow, Chunked, or several combined by `&`.
        given: the JSON's.
        tokens: of the sequence.
        named: whether the JSON names this very layer.
        mixed: whether layers of the model differ.
    """
    if model_pattern.is_causal and not json_pattern.is_causal:
        raise RingPatternError(
            f"the model is causal, the pattern {json_pattern} is not causal; set model.config.is_causal ="
            ' False before the ring is set up, and the pattern alone decides; or take "causal": true'
        )
    if json_pattern.is_causal and not model_pattern.is_causal:
        raise RingPatternError(
            f'the model is not causal, the pattern {json_pattern} is causal; set "causal": false in "pattern"'
        )
    widths = [
        (part, getattr(part, "window", None) or getattr(part, "chunk", None))
        for part in model_pattern.conjuncts
    ]
    narrow = [part for part, width in widths if width is not None and width < tokens]
    plain = all(isinstance(part, Causal | Full | Documents) for part in json_pattern.conjuncts)
    if not narrow:
        if mixed and not plain and not named:
            raise RingPatternError(
                f"expected a pattern by layer, since the model's layers differ, got {json_pattern}; leave it"
                ' out: every layer takes its own from the model, or name some in "layers"'
            )
        return json_pattern
    if plain:
        parts = [part for part in json_pattern.conjuncts if not isinstance(part, Causal | Full)]
        return reduce(and_, [*narrow, *parts])
    if all(covers(json_pattern, part) for part in narrow):
        return json_pattern
    raise RingPatternError(
        f"the model's layer is {' & '.join(map(str, narrow))}, and the pattern {json_pattern} lets each"
        f" of {tokens} tokens see otherwise; {_advice(narrow, tokens)}"
    )


def covers(pattern: Pattern, part: Pattern) -> bool:
    """Return whether the JSON's pattern includes the model's window or chunk."""
    if isinstance(part, SlidingWindow):
        windowed = any(isinstance(conjunct, SlidingWindow) for conjunct in pattern.conjuncts)
        return windowed and pattern.distance == part.distance
    return part in pattern.conjuncts


def _advice(narrow: list[Pattern], tokens: int) -> str:
    ways = []
    for part in narrow:
        key = "chunk" if isinstance(part, Chunked) else "window"
        ways.append(f'write "{key}": {getattr(part, key)} in the "pattern" section, or leave it out there')
    return (
        "; ".join(dict.fromkeys(ways))
        + ": a layer takes its own from the model. To change the model, set its configuration before it is"
        f" built (a width of {tokens} or more hides nothing)"
    )


def make_type_patterns(
    types: Sequence[str], width_of: Callable[[str], int | None], causal: bool
) -> tuple[Pattern, ...]:
    """Return the patterns of the layers of a configuration.

    Args:
        types: `layer_types`; a word that is none of `NARROW` means attention to all tokens.
        width_of: a key of the configuration (a value of `NARROW`), None where it has none.
        causal: whether the model is.
    """
    patterns: list[Pattern] = []
    for layer_type in types:
        width = width_of(NARROW[layer_type]) if layer_type in NARROW else None
        if not width:
            patterns.append(Causal() if causal else Full())
        elif layer_type == "chunked_attention":
            patterns.append(Chunked(int(width), causal))
        else:  # transformers' causal window counts the token itself, its two-sided one does not
            patterns.append(SlidingWindow(int(width) + (not causal), causal))
    return tuple(patterns)
