"""What differs between versions of torch in FlexAttention and FlashAttention on GPUs."""

from __future__ import annotations


def current_flash_implementation() -> str | None:
    """Return what replaces torch's flash operators in this process; before torch 2.10 nothing can."""
    import torch.nn.attention

    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


# FlexAttention's options before torch 2.9, which has a class of them.
_FLEX_OPTIONS = """
BLOCKS_ARE_CONTIGUOUS BLOCK_M BLOCK_M1 BLOCK_M2 BLOCK_N BLOCK_N1 BLOCK_N2 FORCE_USE_FLEX_ATTENTION
OUTPUT_LOGSUMEXP PRESCALE_QK ROWS_GUARANTEED_SAFE USE_TMA WRITE_DQ num_stages num_warps
"""


def list_flex_options() -> set[str]:
    """Return the names of FlexAttention's options."""
    from torch.nn.attention import flex_attention

    options = getattr(flex_attention, "FlexKernelOptions", None)
    return set(_FLEX_OPTIONS.split() if options is None else options.__annotations__)


def derives_joint_graph() -> bool:
    """Return whether Dynamo derives the joint graph of `flex_attention_backward` by itself."""
    from torch._dynamo.variables import higher_order_ops

    variable = getattr(higher_order_ops, "FlexAttentionBackwardHighOrderVariable", None)
    return hasattr(variable, "_derive_joint_graph")
