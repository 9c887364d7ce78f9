"""Estimate memory of parameters, gradients and optimizer states under ZeRO, per device and on its host.

Owns what DeepSpeed 0.19.8 keeps and what it allocates in passing, for Adam. The formulas of the paper
(section 3: 2 + 2 + 12 bytes per parameter in mixed precision, divided by stage) are the floor; the rest (flat
copies, buckets, parameters that ZeRO 3 keeps gathered, what lies on the host with `offload_optimizer` and
`offload_param`) was read from DeepSpeed's code and compared with real runs: `tools/check_plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import ModelShape

FLOAT = 4


@dataclass(frozen=True)
class Zero:
    """Describe how DeepSpeed keeps a model."""

    stage: int  # 0 to 3
    world: int  # ranks that states are divided among (data-parallel x ring x Ulysses)
    element_bytes: int  # of parameters and gradients: 4 plain, 2 mixed precision with a float32 master copy
    bucket_elements: int = 500_000_000  # reduce_bucket_size
    overlap_comm: bool = False  # two buckets instead of one
    live_elements: int = 1_000_000_000  # stage3_max_live_parameters
    # an optimizer without temporaries (DeepSpeed's FusedAdam on GPUs); torch's on the CPU has two of the size
    # of what it updates
    fused_adam: bool = True
    # offload_optimizer, offload_parameters: to the host's memory; parameters at stage 3 only
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def low(self) -> bool:
        """Return whether precision is mixed."""
        return self.element_bytes < FLOAT

    def share(self, elements: int) -> int:
        """Return the elements of one rank's partition."""
        return -(-elements // self.world)

    def parameters(self, model: ModelShape) -> int:
        """Return bytes of the copy that computes, between passes."""
        whole = model.parameters
        if self.stage < 3:
            return self.element_bytes * whole
        return 0 if self.offload_parameters else self.element_bytes * self.share(whole)

    # [Note: on the host]
    # Optimizer: the float32 copy, two moments and the gradients in float32 stand there from the start. Stages
    # 1 and 2 have a low-precision copy of the partition for the way back, stage 3 the flat gradient
    # partition.
    def host(self, model: ModelShape) -> int:
        """Return bytes that one device keeps on its host; [Note: on the host]."""
        share = self.share(model.parameters)
        parameters = self.element_bytes * share if self.offload_parameters and self.stage == 3 else 0
        return parameters + ((4 * FLOAT + self.element_bytes) * share if self.offload_optimizer else 0)

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
        master = FLOAT if self.low or self.stage else 0
        return (2 * FLOAT + master) * elements

    # [Note: buckets]
    # Stages 1 and 2 allocate a bucket of `reduce_bucket_size` elements (default 5e8: a gigabyte in bf16) at
    # the first gradient of a backward pass, twice with `overlap_comm`, and free it at the end. Stage 3 has
    # one from the start. A parameter larger than the bucket is reduced by itself; that is not modelled.
    def standing_gradients(self, model: ModelShape) -> int:
        """Return bytes kept between passes: stage 3's flat partition and its bucket; [Note: buckets]."""
        if self.stage < 3:
            return 0
        partition = 0 if self.offload_optimizer else self.share(model.parameters)
        return self.element_bytes * (partition + self.bucket_elements)

    def gradients(self, model: ModelShape, made: int) -> int:
        """Return bytes in a backward pass that has made the gradients of `made` parameters."""
        if self.stage == 3:
            return 0
        buckets = self.bucket_elements * (1 + self.overlap_comm) if self.stage and made else 0
        kept = made
        if self.stage == 2:
            kept = self.share(model.parameters) if made else 0
        if self.stage and self.offload_optimizer:  # each goes to the host once it is reduced
            kept = min(made, model.largest_parameter)
        return self.element_bytes * (kept + buckets)

    def reduction(self, model: ModelShape) -> int:
        """Return what the end of a backward pass allocates on top: flat copies that are reduced."""
        if self.world == 1 or self.stage >= 2 or self.offload_optimizer:
            return 0
        if self.stage == 1:
            return self.element_bytes * self.share(model.parameters)
        return self.element_bytes * min(model.parameters, 500_000_000)  # the engine's own bucket

    def step(self, model: ModelShape) -> tuple[int, int]:
        """Return bytes of gradients and temporaries while the optimizer steps."""
        whole, share = model.parameters, self.share(model.parameters)
        if self.offload_optimizer:
            return 0, 0
        if self.stage:
            gradients = FLOAT * share
            temporary = 0 if self.fused_adam else 2 * FLOAT * share
            return gradients, temporary
        gradients = (self.element_bytes + (FLOAT if self.low else 0)) * whole
        return gradients, 0 if self.fused_adam else 2 * FLOAT * model.largest_parameter

    def start(self, model: ModelShape) -> int:
        """Return bytes while the engine is made: stages 1 and 2 flatten, stage 3 partitions."""
        whole, share = self.element_bytes * model.parameters, self.share(model.parameters)
        if self.offload_optimizer:
            share = 0
        if self.stage == 0:
            return whole
        if self.stage == 3:
            return whole + (self.element_bytes + FLOAT) * share
        return max(2 * whole, whole + FLOAT * share)
