"""What the options of a pass use of pydantic: its own, or those of `plain_models.py` where it is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        JsonValue,
        PlainValidator,
        ValidationError,
        ValidationInfo,
        field_validator,
    )
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        from ds_ring.compat.plain_models import (
            BaseModel,
            BeforeValidator,
            ConfigDict,
            ErrorDetails,
            Field,
            FieldInfo,
            JsonValue,
            PlainValidator,
            ValidationError,
            ValidationInfo,
            field_validator,
        )

__all__ = [
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "ErrorDetails",
    "Field",
    "FieldInfo",
    "JsonValue",
    "PlainValidator",
    "ValidationError",
    "ValidationInfo",
    "field_validator",
]
