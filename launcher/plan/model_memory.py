"""Estimate peak memory of a training step on one device, by component and by moment.

Owns the moments of a step at which memory can be highest, and what lives at each. The blocks are those of an
eager Llama in transformers 5 (what autograd saves was counted in the profiler's events and is exact there;
fused norms, fused losses and compilation save less), loss and MLP in tiles those of
`models`. Attention's own part comes from `pass_memory.py`, states from `model_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .model_file import ModelShape
from .pass_memory import PassMemory

# Memory of parameters, gradients and Adam's states under ZeRO, per device and on its host, as DeepSpeed
# 0.19.8 allocates it. The paper's formulas (section 3: 2 + 2 + 12 bytes per parameter in mixed precision,
# divided by stage) are the lower bound. The rest (flat copies, buckets, parameters that ZeRO 3 keeps
# gathered, what `offload_optimizer` and `offload_param` put on the host) was read from DeepSpeed's code and
# compared with real runs by `tools/check_plan.py`.

FLOAT = 4


def count_pinned(*tensors: float) -> int:
    """Return what tensors of so many bytes take in pinned memory.

    Each gets the next power of two from torch's allocator (`CachingHostAllocator`, torch 2.8 to 2.13).
    """
    return sum(1 << (int(size) - 1).bit_length() for size in tensors if int(size))


@dataclass(frozen=True)
class Zero:
    """Describe how DeepSpeed keeps a model."""

    stage: int  # 0 to 3
    world: int  # ranks that states are divided among (data-parallel x ring x Ulysses)
    element_bytes: int  # of parameters and gradients: 4 plain, 2 mixed precision with a float32 master copy
    bucket_elements: int = 500_000_000  # reduce_bucket_size
    overlap_comm: bool = False  # two buckets instead of one
    live_elements: int = 1_000_000_000  # stage3_max_live_parameters
    sub_group_elements: int = 1_000_000_000  # of a partition, that stage 3 updates together (sub_group_size)
    # an optimizer without temporaries (DeepSpeed's FusedAdam on GPUs); torch's on the CPU has two of the size
    # of the parameters that it updates
    fused_adam: bool = True
    # offload_optimizer, offload_parameters: to the host's memory; parameters at stage 3 only
    offload_optimizer: bool = False
    offload_parameters: bool = False
    # pins_optimizer, pins_parameters: their `pin_memory`
    pins_optimizer: bool = True
    pins_parameters: bool = True
    accumulates: bool = False  # a step has several micro-batches (gradient_accumulation_steps)
    # stage 3: parameters are divided as each module is made (`deepspeed.zero.Init`, which transformers'
    # `from_pretrained` uses), so that no rank ever has the whole model
    partitioned_init: bool = True

    def share(self, elements: int) -> int:
        """Return the elements of one rank's partition."""
        return -(-elements // self.world)

    def sub_group(self, model: ModelShape) -> int:
        """Return the elements that the optimizer updates together: at stage 3 at least one parameter's."""
        share = self.share(model.parameters)
        if self.stage < 3:
            return share
        return min(share, max(self.sub_group_elements, self.share(model.largest_parameter)))

    def parameters(self, model: ModelShape) -> int:
        """Return bytes of the copy that computes, between passes."""
        whole = model.parameters
        if self.stage < 3:
            return self.element_bytes * whole
        return 0 if self.offload_parameters else self.element_bytes * self.share(whole)

    # [Note: on the host]
    # Optimizer: the float32 copy, two moments and the gradients in float32 are there from the start. Stages
    # 1 and 2 have a low-precision copy of the partition for the way back, and one of the largest parameter,
    # stage 3 the flat gradient partition. With `pin_memory` these are pinned, and gradients: at stage 3 those
    # of each sub-group by itself, at stages 1 and 2 all together, and the float32 copy, too. Stage 2 pins the
    # gradients of earlier micro-batches as well, a parameter's in a tensor; they count as one.
    # Parameters: one flat tensor, which is always pinned. With `pin_memory` those of each parameter were
    # pinned as it was divided: torch's allocator keeps these blocks, and no later tensor has their sizes.
    def host(self, model: ModelShape, pins: bool) -> int:
        """Return bytes that one device keeps on its host, where it can pin or not; [Note: on the host]."""
        share, element = self.share(model.parameters), self.element_bytes
        total = 0
        if self.offload_parameters and self.stage == 3:
            flat = element * share
            total += count_pinned(flat) + flat * self.pins_parameters if pins else flat
        if not self.offload_optimizer:
            return total
        group = self.sub_group(model)
        gradients = [group] * (share // group) + [share % group]
        pinned = [element * share, *(FLOAT * elements for elements in gradients)]
        if self.stage < 3:
            pinned += [FLOAT * share, element * model.largest_parameter]
        if self.stage == 2 and self.accumulates:
            pinned.append(element * share)
        pageable = (3 if self.stage == 3 else 2) * FLOAT * share
        return total + pageable + (count_pinned(*pinned) if pins and self.pins_optimizer else sum(pinned))

    # [Note: gathered parameters]
    # Stage 3 releases a parameter after use unless it is used again within `stage3_max_reuse_distance` and no
    # more than `stage3_max_live_parameters` (1e9 each) are there: below a billion parameters, all stay from
    # the forward pass to the end of the backward pass, from the second step on.
    def gathered(self, model: ModelShape) -> int:
        """Return bytes of whole parameters during a pass at stage 3; [Note: gathered parameters]."""
        if self.stage < 3:
            return 0
        return self.element_bytes * max(min(model.parameters, self.live_elements), model.layer_parameters)

    def optimizer(self, model: ModelShape) -> int:
        """Return bytes of Adam's two moments and the float32 master copy, on the device."""
        if self.offload_optimizer:
            return 0
        elements = self.share(model.parameters) if self.stage else model.parameters
        # DeepSpeed's stages 1 to 3 keep a float32 master copy in any precision.
        master = FLOAT if self.element_bytes < FLOAT or self.stage else 0
        return (2 * FLOAT + master) * elements

    # [Note: buckets]
    # Stages 1 and 2 allocate a bucket of `reduce_bucket_size` elements (default 5e8: a gigabyte in bf16) at
    # the first gradient of a backward pass, twice with `overlap_comm`, and free it at the end. Stage 3 has
    # one from the start. A parameter larger than the bucket is reduced by itself; that is not modelled.
    def standing_gradients(self, model: ModelShape) -> int:
        """Return bytes kept between passes: stage 3's flat partition and its bucket; [Note: buckets]."""
        if self.stage == 3:
            partition = 0 if self.offload_optimizer else self.share(model.parameters)
            return self.element_bytes * (partition + self.bucket_elements)
        on_its_way = model.largest_parameter if self.stage and self.offload_optimizer else 0  # to the host
        return self.element_bytes * on_its_way

    def earlier_gradients(self, model: ModelShape) -> int:
        """Return bytes that earlier micro-batches of a step leave on the device, beside what always stands.

        Stages 0 and 1 keep all gradients, wherever the optimizer is, stage 2 those of the partition.
        """
        if not self.accumulates or self.stage == 3 or (self.stage == 2 and self.offload_optimizer):
            return 0
        return self.element_bytes * (self.share(model.parameters) if self.stage == 2 else model.parameters)

    def gradients(self, model: ModelShape, elements: int) -> int:
        """Return bytes in a backward pass that has made the gradients of so many parameters."""
        if self.stage == 3:
            return 0
        buckets = self.bucket_elements * (1 + self.overlap_comm) if self.stage and elements else 0
        held = elements
        if self.stage == 2:
            held = self.share(model.parameters) if elements else 0
        # Each moves to the host once it is reduced: at stage 1 after the pass, if nothing is overlapped.
        moves = self.offload_optimizer and self.stage and (self.stage == 2 or self.overlap_comm)
        if moves or (self.accumulates and self.stage < 2):  # each is added to that of earlier micro-batches
            held = min(elements, model.largest_parameter)
        return self.element_bytes * (held + buckets)

    def reduction(self, model: ModelShape) -> int:
        """Return what the end of a backward pass allocates on top: flat copies that are reduced."""
        if self.world == 1 or self.stage >= 2 or self.offload_optimizer:
            return 0
        if self.stage == 1:
            return self.element_bytes * self.share(model.parameters)
        return self.element_bytes * min(model.parameters, 500_000_000)  # the engine's own bucket

    # The optimizer takes float32 gradients of a flat partition, at stage 3 of one sub-group, which are freed
    # before the next. They are made of a flat copy of the gradients in low precision, which is freed before
    # the step. At stages 1 and 2 the gradients themselves wait for that; at stage 3 they always stay.
    def step(self, model: ModelShape) -> tuple[int, int]:
        """Return bytes of gradients and temporaries while the optimizer steps."""
        whole, element = model.parameters, self.element_bytes
        if self.offload_optimizer:
            return 0, 0
        if not self.stage:
            gradients = (element + (FLOAT if element < FLOAT else 0)) * whole
            return gradients, 0 if self.fused_adam else 2 * FLOAT * model.largest_parameter
        group = self.sub_group(model)
        flat = (element if element < FLOAT else 0) + (element if self.stage < 3 else 0)
        return FLOAT * group, max(flat, 0 if self.fused_adam else 2 * FLOAT) * group

    # [Note: the start at stage 3]
    # Measured with DeepSpeed 0.19.8, 2 and 4 ranks, three sizes of buckets (tools/check_plan.py): parameters
    # are divided one by one, so that the whole model and the states are never there together. The float32
    # copy is made of a float32 temporary; then there are partitions of gradients, a bucket, and twice the
    # largest parameter.
    def start(self, model: ModelShape) -> int:
        """Return bytes while the engine is made: stages 1 and 2 flatten, stage 3 partitions."""
        element, whole = self.element_bytes, self.element_bytes * model.parameters
        share, group = self.share(model.parameters), self.sub_group(model)
        if self.offload_optimizer:
            share = group = 0
        if self.stage == 0:
            return whole
        if self.stage < 3:
            return max(2 * whole, whole + FLOAT * share)
        parameters = self.parameters(model)
        partition = parameters + element * model.largest_parameter if self.partitioned_init else whole
        copies = parameters + FLOAT * (share + group)
        buckets = element * (self.bucket_elements + 2 * model.largest_parameter)
        return max(partition, copies, parameters + (element + FLOAT) * share + buckets)


Components = dict[str, int]


class MemoryMoment(NamedTuple):
    """Hold bytes by component at one moment of a step, on the device and on its host."""

    name: str
    components: Components
    host: Components

    @property
    def total(self) -> int:
        """Return bytes alive on the device."""
        return sum(self.components.values())

    @property
    def host_total(self) -> int:
        """Return bytes alive on the host."""
        return sum(self.host.values())


@dataclass(frozen=True)
class LocalTokens:
    """Hold what one device has of a batch."""

    outside: int  # tokens outside attention: batch x T / (ring x Ulysses)
    inside: int  # token slots inside attention: batch x T / ring
    # heads, kv_heads: there: those of the model over the Ulysses size
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class TrainingStep:
    """Describe a training step on one device."""

    # model, zero: the trained model and the storage of its states
    model: ModelShape
    zero: Zero
    tokens: LocalTokens  # how many here
    ring: PassMemory  # of the pass without q, k, v, out and their gradients
    checkpointing: bool = False  # a layer keeps its input and is computed again
    keeps_attention: float = 0.0  # but for this part of attention's output and lse, which is kept then
    # loss_tokens, mlp_tokens: that are there at once (a loss and MLPs in tiles); None for all
    loss_tokens: int | None = None
    mlp_tokens: int | None = None
    offload_checkpoints: bool = False  # the layers' checkpoints are on the host
    host_is_device: bool = False  # as on the CPU: offloading moves nothing
    # heads_here: of attention on the host, the part that is on the device while heads are computed; None
    # where all of it stays on the device
    heads_here: float | None = None
    # Of layers other than attention over all keys: bytes that they keep for the backward pass, bytes of the
    # layer that keeps most, and bytes of messages at one time.
    other_layers_bytes: int = 0
    most_of_other_layers: int = 0
    messages: int = 0
    pins: bool = False  # tensors on the host are in pinned memory

    @property
    def norm_bytes(self) -> int:
        """Return what a norm saves: its input in float32 (itself, where that is its dtype), x / rms, its
        output; in tiles, with an MLP in tiles, its input and output.
        """
        if self._mlp_tile is not None:
            return 2 * self.layer_input_bytes
        return self.tokens.outside * self.model.hidden * (FLOAT + 2 * self.zero.element_bytes)

    @property
    def attention_bytes(self) -> int:
        """Return bytes of q, k, v, out, the output in the order of tokens, and the float32 lse."""
        return sum(self._attention_tensors) + self._query_bytes

    @property
    def _attention_tensors(self) -> tuple[int, ...]:
        """Return the bytes of q, k, v, out and the float32 lse."""
        here = self.tokens
        head = here.inside * self.model.head_dim * self.zero.element_bytes
        queries, keys = here.heads * head, here.kv_heads * head
        return queries, keys, keys, queries, here.inside * here.heads * FLOAT

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes of a layer's attention on the host: q, k, v, out and lse."""
        return 0 if self.heads_here is None else sum(self._attention_tensors)

    @property
    def _results(self) -> tuple[int, ...]:
        """Return the bytes of out and of lse."""
        return self._attention_tensors[3:]

    @property
    def _kept_bytes(self) -> int:
        return int(sum(self._results) * self.keeps_attention)

    def _count_on_host(self, *tensors: float) -> int:
        """Return what such tensors take on the host."""
        return count_pinned(*tensors) if self.pins else sum(map(int, tensors))

    @property
    def _query_bytes(self) -> int:
        model = self.model
        return self.tokens.outside * model.heads * model.head_dim * self.zero.element_bytes

    @property
    def mlp_bytes(self) -> int:
        """Return bytes of what Llama's saves, gate, silu(gate), up and their product; in tiles, the input."""
        if self._mlp_tile is not None:
            return 0
        model = self.model
        # Each of a token's experts has a copy of its input and an output of its own.
        width = model.mlp_saved * model.active_intermediate + 2 * model.active_experts * model.hidden
        return self.tokens.outside * width * self.zero.element_bytes

    @property
    def _mlp_tile(self) -> int | None:
        """Return the tokens of an MLP's tile; None where all tokens are one."""
        tile = self.mlp_tokens
        return tile if tile is not None and tile < self.tokens.outside else None

    @property
    def layer_input_bytes(self) -> int:
        """Return bytes of the residual stream at one layer."""
        return self.tokens.outside * self.model.hidden * self.zero.element_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Return what a layer keeps for the backward pass under checkpointing."""
        return self.layer_input_bytes + self._kept_bytes

    @property
    def logits(self) -> int:
        """Return the elements of the local logits that are there at once."""
        tokens = self.tokens.outside
        return min(tokens, self.loss_tokens or tokens) * self.model.vocab

    def saved(self, layers: int, attention: bool) -> int:
        """Return what whole layers keep for the backward pass, of attention or of the rest."""
        if self.checkpointing:
            results_bytes = self._kept_bytes
            inputs = layers * self.layer_input_bytes
            if self.offload_checkpoints:
                # A layer's come back when they are needed, together with the next layer's (keep_results.py).
                here = 0 if self.host_is_device else min(layers, 2)
                return max(here - 1, 0) * results_bytes if attention else here * self.layer_input_bytes
            # Of attention over chosen keys nothing is kept (keep_results.py).
            return (
                min(layers, self.model.layers - len(self.model.other_layers)) * results_bytes
                if attention
                else inputs
            )
        if not attention:
            others = self.other_layers_bytes * layers // self.model.layers
            return layers * (2 * self.norm_bytes + self.mlp_bytes) + others
        return min(layers, self.model.attention_layers) * (self.attention_bytes - self.offloaded_bytes)

    def moments(self) -> list[MemoryMoment]:
        """Return every moment that can be the highest, in the order of a step."""
        zero, model = self.zero, self.model
        ended, stepping = self._states(model.parameters), self._states(0, passing=False)
        ended["gradients"] += zero.reduction(model)
        gradients, temporary = zero.step(model)
        stepping["gradients"] += gradients
        return [
            self._moment("start of the engine", {"parameters": zero.start(model)}),
            *self._loss(),
            *self._layers(),
            self._moment("end of the backward pass", ended),
            self._moment("optimizer step", stepping | {"optimizer temporaries": temporary}),
        ]

    @property
    def host_bytes(self) -> int:
        """Return the most memory on the host at once."""
        return max(moment.host_total for moment in self.moments())

    def _moment(self, name: str, components: Components, layers: int = 0) -> MemoryMoment:
        """Return a moment at which so many layers wait for their backward pass."""
        offloaded = self.checkpointing and self.offload_checkpoints
        inputs = self._count_on_host(self.layer_input_bytes)
        results = self._count_on_host(*(size * self.keeps_attention for size in self._results))
        attention = 0 if self.heads_here is None else self._count_on_host(*self._attention_tensors)
        # checkpointed layers do so one by one
        waiting = min(layers, 1 if self.checkpointing else self.model.attention_layers)
        host = {
            "ZeRO's states on the host": self.zero.host(self.model, pins=not self.host_is_device),
            "checkpoints on the host": layers * inputs if offloaded else 0,
            "attention's results on the host": layers * results if offloaded else 0,
            "attention on the host": waiting * attention,
        }
        if self.host_is_device:
            return MemoryMoment(name, components | host, {})
        return MemoryMoment(name, components, host)

    def peak(self) -> MemoryMoment:
        """Return the moment of the most memory."""
        return max(self.moments(), key=lambda moment: moment.total)

    def _states(self, elements: int, passing: bool = True) -> Components:
        zero, model = self.zero, self.model
        gradients = zero.standing_gradients(model) + zero.gradients(model, elements)
        gradients += zero.earlier_gradients(model) if passing else 0
        return {
            "parameters": zero.parameters(model),
            "gathered parameters": zero.gathered(model) if passing else 0,
            "optimizer states": zero.optimizer(model),
            "gradients": gradients,
            "ring buffers": self.ring.buffers,
        }

    def _loss(self) -> Iterator[MemoryMoment]:
        """Yield the moments of the loss: logits, again in float32, log-softmax; backward two more.

        In tiles, a tile's gradients follow its loss at once: the hidden states' are kept, and the output
        matrix's are added up in float32.
        """
        element, layers = self.zero.element_bytes, self.model.layers
        before = self._states(0) | {
            "activations": self.saved(layers, False) + self.norm_bytes,
            "attention": self.saved(layers, True),
        }
        weight = self.zero.element_bytes * self.model.head_parameters
        after_head = before | {"gradients": before["gradients"] + weight}
        if self.loss_tokens is not None:
            sums = self.layer_input_bytes + FLOAT * self.model.head_parameters
            tile = max((element + 3 * FLOAT) * self.logits, 2 * element * self.logits + weight)
            yield self._moment("loss, in tiles", before | {"logits and loss": sums + tile}, layers)
            backward = 2 * self.layer_input_bytes
        else:
            forward = element + FLOAT + (FLOAT if self.zero.element_bytes < FLOAT else 0)
            yield self._moment("loss, forward", before | {"logits and loss": forward * self.logits}, layers)
            wide = 3 * FLOAT * self.logits
            yield self._moment("loss, backward", before | {"logits and loss": wide}, layers)
            backward = element * self.logits + 2 * self.layer_input_bytes
        yield self._moment("output matrix, backward", after_head | {"logits and loss": backward}, layers)

    def _layers(self) -> Iterator[MemoryMoment]:
        """Yield the last layer, while all others are saved, and the first, when all gradients exist."""
        layers, per_layer = self.model.layers, self.model.layer_parameters
        head = self.model.head_parameters
        for name, left in (("last", layers), ("first", 1)):
            elements = head + (layers - left) * per_layer
            saved, attention = self.saved(left, False), self.saved(left, True)
            if self.checkpointing:  # computed again
                saved += 2 * self.norm_bytes + self.mlp_bytes + self.most_of_other_layers
                # What is kept is the tensor itself where it is all, and a copy where it is a part.
                same = self.keeps_attention == 1 and self.heads_here is None and attention > 0
                attention += self.attention_bytes - self.offloaded_bytes - (self._kept_bytes if same else 0)
            mlp = self._mlp(elements, saved, attention)
            yield self._moment(f"MLP of the {name} layer, backward", mlp, left)
            inside = self._attention(elements + self.model.mlp_parameters, saved, attention)
            yield self._moment(f"attention of the {name} layer, backward", inside, left)

    def _mlp(self, elements: int, saved: int, attention: int) -> Components:
        """Return an MLP's backward.

        In tiles, its inside exists for one tile of tokens, and its matrices' gradients are added up in
        float32, in addition to those of the tile.
        """
        element, tokens, model = self.zero.element_bytes, self.tokens.outside, self.model
        width = model.active_intermediate + max(model.active_experts, 1) * model.hidden
        passing = tokens * element * 2 * width
        if (tile := self._mlp_tile) is not None:
            inside = tile * element * ((model.mlp_saved + 2) * model.active_intermediate + 2 * model.hidden)
            passing = 2 * self.layer_input_bytes + inside + (FLOAT + element) * model.mlp_parameters
        return self._states(elements) | {"activations": saved + passing, "attention": attention}

    def _attention(self, elements: int, saved: int, attention: int) -> Components:
        """Return attention's backward: four gradients and q, k, v, out; the MLP's part is freed."""
        here, element = self.tokens, self.zero.element_bytes
        saved += 2 * self.layer_input_bytes - self.mlp_bytes - self.norm_bytes
        gradients = here.inside * (2 * here.heads + 2 * here.kv_heads) * self.model.head_dim * element
        heads = int(self.offloaded_bytes * (self.heads_here or 0.0))
        return (
            self._states(elements)
            | {"activations": saved, "attention": attention + gradients + heads - self._query_bytes}
            | {"accumulators": self.ring.accumulators, "kernel workspace": self.ring.workspace}
            | {"messages of other layers": self.messages}
        )


def attention_alone(
    rows: int, kv_rows: int, local_tokens: int, head_dim: int, element: int, ring: PassMemory,
    v_head_dim: int | None = None,
) -> MemoryMoment:  # fmt: skip
    """Return the memory of a forward and backward pass with no model around it.

    Args:
        rows, kv_rows: batch x query heads, batch x K/V heads.
        local_tokens: slots S.
        head_dim: D.
        element: bytes of one element of q, k, v.
        ring: additional memory of the pass.
        v_head_dim: E of values and outputs; None is D.
    """
    both = head_dim + (head_dim if v_head_dim is None else v_head_dim)
    tensors = 2 * (rows + kv_rows) * local_tokens * both * element  # q, k, v, out and their gradients
    parts = {"attention": tensors + rows * local_tokens * FLOAT, "ring buffers": ring.buffers}
    parts |= {"accumulators": ring.accumulators, "kernel workspace": ring.workspace}
    return MemoryMoment("attention, backward", parts, {})
