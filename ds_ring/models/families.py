"""Families of models that need more than attention: pooled tokens, router losses, a guarded loss.

`model_adapter.py` installs the hooks on a model that has the need.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.comm.collective import collective
from ds_ring.compat.transformers import POOLING_CLASSIFIER
from ds_ring.data.batch import REAL_TOKENS, Batch
from ds_ring.data.loss import get_mesh_number, sequence_max_op, sequence_sum_op, shared_scale
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.models.checks import THROUGH_SHARD_BATCH
from ds_ring.models.model import MODEL, TABLE
from ds_ring.patches import patch

# Classifiers (`GenericForSequenceClassification`: Llama, Qwen, Mistral, Gemma, reward models) read the logits
# of the last token that is not padding. `score` computes the logits of each local token; then the last
# token's are put in place of all of them, so that the model's own indexing finds them on every rank.
#
# Shapes: B samples, S local tokens, L labels.


def pools_the_last_token(model: nn.Module) -> bool:
    """Return whether a model is a classifier that reads the last token."""
    return isinstance(model, POOLING_CLASSIFIER)


_pool_patch = partial(patch, feature="pooled token", when="GenericForSequenceClassification")
_notes_ids = _pool_patch(MODEL, stage="before_forward", reason="notes the token ids")
_pools = _pool_patch(
    TABLE.given("score", "torch.nn.Linear"), stage="after_forward",
    reason="gives every rank the logits of the last token",
)  # fmt: skip


def make_pooling_hooks(model: PreTrainedModel, session: RingSession) -> list[Any]:
    """Return the hooks of a classifier and its `score`: every rank gets the logits of the last token."""
    signature = inspect.signature(model.forward)
    noted: dict[str, Tensor | None] = {}
    padding = model.config.get_text_config().pad_token_id
    mesh = session.run_mesh

    @_notes_ids
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = signature.bind_partial(*args, **kwargs).arguments | kwargs  # a forward may take **kwargs
        noted["input_ids"] = arguments.get("input_ids")

    @_pools
    def after_score(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits_BSL: Tensor
    ) -> Tensor:
        sharding = session.batches.current
        if sharding.mesh.sequence_size != mesh.sequence_size:
            raise RingShapeError(
                f"{type(model).__name__}: expected a sharded sequence, got {sharding.layout.tokens} tokens,"
                ' below min_sequence_length; set "min_sequence_length": 0 for a loss over the sequence'
            )
        assert sharding.slots is not None
        slots_S, input_ids, number = sharding.slots, noted["input_ids"], get_mesh_number(mesh)
        # Where all tokens are padding that is the first one, as on one process; without a padding token the
        # very last; without ids the last real one: `check_pooled_token`.
        tokens = logits_BSL.shape[1]
        candidates_BS = slots_S.expand(logits_BSL.shape[0], tokens)
        if input_ids is None and sharding.real_tokens is not None:
            candidates_BS = torch.where((sharding.real_tokens == 0) & (slots_S >= 0), 0, candidates_BS)
        elif padding is not None and input_ids is not None:
            candidates_BS = torch.where((input_ids == padding) & (slots_S >= 0), 0, candidates_BS)
        last_B = sequence_max_op(candidates_BS.amax(dim=1), number)
        mine_BS1 = (slots_S == last_B[:, None])[..., None]
        pooled_BL = sequence_sum_op((logits_BSL * mine_BS1).sum(dim=1), number)
        return pooled_BL[:, None].expand(-1, tokens, -1)

    return [before, after_score]


def check_pooled_token(model: PreTrainedModel, prepared: Batch) -> None:
    """Refuse a batch of which a classifier would read padding: there a ring's hidden state is another.

    Without ids transformers reads the very last token, with ids the last one that is not `pad_token_id`.

    Raises:
        RingPatternError: the attention_mask hides that token of some sample.
    """
    real_BT, ids_BT = prepared[REAL_TOKENS].bool(), prepared.get("input_ids")
    padding = model.config.get_text_config().pad_token_id
    places_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    last_B1 = (places_T * real_BT).amax(dim=1, keepdim=True)
    if ids_BT is None or padding is None:
        # Where padding was moved from the left to the right, the last token keeps its position.
        end, positions_BT = len(places_T) - 1, prepared["position_ids"].expand(real_BT.shape)
        is_read_B = ((last_B1 == end) | (positions_BT.gather(1, last_B1) == end))[:, 0]
        got, advice = "inputs_embeds with padding there", "pad on the left, or give input_ids"
    else:
        read_B1 = (places_T * (ids_BT != padding)).amax(dim=1, keepdim=True)
        is_read_B = real_BT.gather(1, read_B1)[:, 0]
        got, advice = f"padding with other ids than pad_token_id {padding}", "give padding that id"
    wrong = (~is_read_B & real_BT.any(dim=1)).nonzero()
    if len(wrong):
        expected = f"a token that attention_mask shows where it reads sample {int(wrong[0])}"
        raise RingPatternError.wrong(type(model).__name__, expected, got, advice)


# Gemma 4 and Qwen 4 look the ids of tokens up by their embeddings, for tables of other embeddings. Where an
# embedding is no row of the table they raise a RuntimeError: on the rank that has such a token.

_lookup_patch = partial(
    patch, TABLE.given("lookup"), stage="around_call", feature="lookup",
    reason="an embedding that is none of the model's raises on all ranks",
    when="the model looks ids up by inputs_embeds",
)  # fmt: skip
_LOOKUPS = {name: _lookup_patch(name) for name in ("get_per_layer_inputs", "reverse_embedding")}


def find_lookup_guards(model: nn.Module, session: RingSession) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules that look ids up by embeddings, and what lets all ranks raise together there."""

    def guarded(lookup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return lookup(*args, **kwargs)
        except RuntimeError as error:
            if torch.compiler.is_compiling():
                raise
            name, expected = type(model).__name__, "rows of its embedding table"
            with collective(session.batches.current.mesh, "attention"):
                raise RingShapeError.wrong(
                    f"{name}: inputs_embeds", expected, "others", "give input_ids instead"
                ) from error

    for module in model.modules():
        for name, rows in _LOOKUPS.items():
            lookup = getattr(type(module), name, None)
            if lookup is not None and "inputs_embeds" in inspect.signature(lookup).parameters:
                yield module, rows.to(guarded)


def check_outputs(
    model: PreTrainedModel, output: Any, local_tokens: int, others: tuple[str, ...] = ()
) -> None:
    """Refuse what a head made of this rank's tokens alone; `others` are outputs of other tokens."""
    if isinstance(output, Tensor | tuple):
        raise RingConfigError.wrong(
            type(model).__name__, "a ModelOutput", type(output).__name__, "leave out return_dict=False"
        )
    for name, value in output.items():
        if (
            not isinstance(value, Tensor)
            or value.ndim < 2
            or name in ("image_hidden_states", *others)
            or (name == "logits" and pools_the_last_token(model))
        ):
            continue
        names = [kind.__name__ for kind in type(model).__mro__]
        classifies = value.ndim == 2 and any(
            class_name.endswith("ForSequenceClassification") for class_name in names
        )
        if name == "logits" and (classifies or (value.ndim == 2 and value.shape[1] != local_tokens)):
            raise RingConfigError(_describe_own_head(model, value))
        if value.shape[1] != local_tokens or name in _OVER_TOKENS:
            raise RingConfigError(
                f"{type(model).__name__}: its output {name} {list(value.shape)} is read off this rank's"
                f" {local_tokens} tokens; use a head on each or the last token, or on engine.ring.gather"
            )


def _describe_own_head(model: PreTrainedModel, logits: Tensor) -> str:
    """Return what to do instead of BERT's way, which reads the first token, or a mean of all."""
    base = type(model.base_model)
    pooler = "add_pooling_layer" in inspect.signature(base.__init__).parameters
    return (
        f"{type(model).__name__}: expected a result for each token, got logits {list(logits.shape)}, pooled"
        " from this rank's tokens and not from those of the whole sequence. Take"
        f" {base.__name__}{'(config, add_pooling_layer=False)' if pooler else ''} in a module of your own,"
        " with a head on engine.ring.gather(output.last_hidden_state): [:, 0] is the first token of the"
        " sequence there, every rank computes the same loss of it, and engine.backward takes that as it is."
        " Classifiers that pool the last token (GenericForSequenceClassification: Llama, Qwen, Mistral) need"
        " none of this"
    )


_OVER_TOKENS = ("start_logits", "end_logits", "pooler_output")


# The load balancing loss of a mixture of experts. transformers' `load_balancing_loss_func` multiplies the
# share of tokens that an expert gets by the mean probability that the router gives it: a product of means,
# which is not a sum over ranks. Each rank adds up its own tokens, `ds_ring::sequence_sum` adds the ranks, and
# the product of the totals is taken. Padding does not count, as with an attention_mask on one process.
#
# Shapes: B samples, S local tokens, E experts.

_FUNCTION = "load_balancing_loss_func"

Sum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RouterLoss:
    """The load balancing loss that a model's forward computes."""

    experts: int  # E
    chosen: int  # experts for each token
    weight: float  # of this loss in the sum of both

    def __call__(self, router_logits: Sequence[Tensor], counted_BS: Tensor | None, add_up: Sum) -> Tensor:
        """Return the loss [], equal to transformers' over the tokens of all ranks that `add_up` sums over.

        Args:
            router_logits: of each layer, [B * S, E].
            counted_BS: 1 for tokens that count, 0 for padding; None: all do.
            add_up: sums a tensor over the ranks of the sequence.
        """
        device = router_logits[0].device
        tokens_E = torch.zeros(self.experts, dtype=torch.float32, device=device)
        probability_E = torch.zeros(self.experts, dtype=torch.float32, device=device)
        rows = torch.zeros(1, dtype=torch.float32, device=device)
        for logits in router_logits:
            weights_NE = torch.softmax(logits.to(device).reshape(-1, self.experts), dim=-1).float()
            counts_N1 = weights_NE.new_ones(weights_NE.shape[0], 1)
            if counted_BS is not None:
                counts_N1 = counted_BS.reshape(-1, 1).to(weights_NE)
            chosen_NK = weights_NE.topk(self.chosen, dim=-1).indices
            one_hot_NE = torch.zeros_like(weights_NE).scatter(-1, chosen_NK, 1.0)
            tokens_E = tokens_E + (one_hot_NE * counts_N1).sum(dim=0)
            probability_E = probability_E + (weights_NE * counts_N1).sum(dim=0)
            rows = rows + counts_N1.sum()
        # One message for all three: the product of the means is taken of totals.
        tokens_E, probability_E, rows = add_up(torch.cat([tokens_E, probability_E, rows])).split(
            [self.experts, self.experts, 1]
        )
        return (tokens_E / rows * (probability_E / rows)).sum() * self.experts


def read_router_loss(model: nn.Module) -> RouterLoss | None:
    """Return the router loss that the model's code computes; None if it computes none.

    Raises:
        RingConfigError: it has a loss of its routers that is another one.
    """
    # The source of its forward names the attributes for the number of experts, how many are chosen and the
    # weight. Random numbers show whether its formula is the one here.
    forward = inspect.unwrap(type(model).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError):
        return None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == _FUNCTION]
    if not calls:
        return None
    added = [
        node.value.left
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.value, ast.BinOp)
        and "aux_loss" in ast.unparse(node.value.right)
    ]
    values: list[Any] = []
    for node in (*calls[0].args[1:3], *added):  # self.a.b, say
        of, *names = ast.unparse(node).split(".")
        values.append(
            reduce(lambda owner, name: getattr(owner, name, None), names, model if of == "self" else None)
        )
    if len(calls) != 1 or len(values) != 3 or any(not isinstance(value, (int, float)) for value in values):
        _refuse(model)
    loss = RouterLoss(int(values[0]), int(values[1]), float(values[2]))
    if not _is_the_same(getattr(sys.modules[forward.__module__], _FUNCTION), loss):
        _refuse(model)
    return loss


def _is_the_same(function: Callable[..., Any], ours: RouterLoss) -> bool:
    """Compare the model's function with ours on random routers, with and without padding."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(
        torch.randn(12, ours.experts, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(2)
    )
    mask = (torch.arange(12, device="cpu").reshape(2, 6) % 5 > 0).long()
    for counted in (None, mask):
        try:
            theirs = function(logits, ours.experts, ours.chosen, counted)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        if not torch.allclose(
            torch.as_tensor(theirs, device="cpu"), ours(logits, counted, lambda x: x), rtol=1e-5
        ):
            return False
    return True


def _refuse(model: nn.Module) -> NoReturn:
    raise RingConfigError.wrong(
        type(model).__name__, "transformers' router loss", "another", "set output_router_logits to False"
    )


LATER = "install transformers 5.17 or later, or compute the loss by engine.ring.loss(logits, batch)"
# Outputs of TRL's heads, the second one of TRL 1.0 to 1.15.
_FUSED = "FusedCausalLMOutput", "_ChunkedCELMHeadOutput"


class LossGuard:
    """Wrap a model's loss function, and refuse labels that were not shifted before they were sharded.

    Attributes:
        own: what the loss function returned in this forward pass; None before.
        scale: what the loss of a head that pools tokens is multiplied by, since every rank computes all of it
            ([Note: gradient of what all ranks compute] in loss.py); None for a loss of tokens.
    """

    def __init__(self, loss_function: Callable[..., Tensor], scale: float | None = None) -> None:
        self.loss_function = loss_function
        self.own: Tensor | None = None
        self.scale = scale
        self._expected: tuple[Tensor, int] | None = None
        self._divides = self._is_shifted = False

    def start(self, items: object = None, shift_labels: object = None) -> None:
        """Drop the loss of the forward pass before; `items` is num_items_in_batch of this one."""
        self.own = self._expected = None
        self._divides, self._is_shifted = items is not None, shift_labels is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        scale = None if kwargs.get("pooled_logits") is None else self.scale
        for key in ("shift_labels", "num_items_in_batch"):
            if kwargs.get(key) is None and scale is None and self._is_shifted and self._divides:
                raise RingConfigError(
                    f"loss: expected a model that hands on {key}, got one that drops it; {LATER}"
                )
            if kwargs.get(key) is None and scale is None:
                raise RingShapeError(
                    f"loss: expected {key} with labels, got none; {THROUGH_SHARD_BATCH}. For classes of"
                    ' tokens give "shift_labels" and take engine.ring.loss(logits, batch).backward_loss'
                )
        self.own = self.loss_function(*args, **kwargs)
        if scale is not None:
            self.own = self.own * scale
        copy = self.own.clone()  # for the model, which may add to it in place
        self.expect(copy)
        return copy

    def expect(self, loss: Tensor) -> None:
        """Take `loss` for the model's whole loss."""
        self._expected = (loss, 0 if torch.compiler.is_compiling() else loss._version)

    def check(self, model: PreTrainedModel, output: Any) -> None:
        """Refuse a loss that the model computed by itself: it cannot know the tokens of other ranks."""
        loss = getattr(output, "loss", None)
        # TRL's head takes shift_labels and num_items_in_batch, and computes what a loss function would.
        if loss is None or (type(output).__name__ in _FUSED and self._divides):
            return
        how = "by itself and not by its loss_function" if self._expected is None else ""
        if self._expected is not None and not torch.compiler.is_compiling():
            expected, version = self._expected
            if loss is not expected or loss._version != version:
                how = "and added a term to it that each rank would compute of its own tokens"
        if how:
            raise RingConfigError(
                f"{type(model).__name__} computed a loss {how}; call it without labels, and take"
                " engine.ring.loss(output.logits, batch).backward_loss"
            )


_replaces_router_loss = patch(
    MODEL, stage="after_forward", feature="router loss",
    reason="replaces the load balancing loss by that of all tokens",
)  # fmt: skip


def router_loss(model: PreTrainedModel, guard: LossGuard, session: RingSession) -> Callable[..., None]:
    """Return the hook that replaces the load balancing loss of local tokens by that of all tokens."""
    # A loss that cannot be replaced is refused where it is computed: most models never ask for it.
    try:
        router: RouterLoss | RingConfigError | None = read_router_loss(model)
    except RingConfigError as refused:
        router = refused
    if isinstance(router, RouterLoss):
        session.needs.slots = session.needs.real_tokens = True
    scale = shared_scale(session.run_mesh, session.gradient_divisor)

    @_replaces_router_loss
    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not isinstance(getattr(output, "aux_loss", None), Tensor):
            return  # without output_router_logits there is none
        if getattr(output, "router_logits", None) is None:
            raise RingConfigError(
                "output: expected router_logits with aux_loss, got none; set router_aux_loss_coef=0.0"
            )
        if not isinstance(router, RouterLoss):
            raise router or RingConfigError(
                f"{type(model).__name__}: expected no aux_loss, got one; leave out output_router_logits"
            )
        # 1 for local tokens that one process would count, 0 for padding of batch or layout
        sharding, counted_BS = session.batches.current, session.batches.current.real_tokens
        if counted_BS is None:
            assert sharding.slots is not None
            logits = output.router_logits[0]
            rows = logits.numel() // logits.shape[-1] // sharding.local_tokens
            counted_BS = (sharding.slots >= 0).to(torch.float32).expand(rows, -1)
        number = get_mesh_number(session.run_mesh)
        exact = scale * router(output.router_logits, counted_BS, lambda x: sequence_sum_op(x, number))
        output["aux_loss"] = exact
        if output.loss is not None and guard.own is not None:
            output["loss"] = guard.own + router.weight * exact
            guard.expect(output.loss)

    return after
