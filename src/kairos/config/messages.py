"""Validation errors in one message that names the field, the value and what is allowed."""

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from kairos.options import meant_number


def explain(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """The errors of a validation, a line each."""
    lines = [_line(item, model) for item in error.errors()]
    head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} fields cannot be used\n  "
    return head + "\n  ".join(lines)


def _line(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"] if not _is_type_tag(part))
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        allowed = sorted(_fields(model, item["loc"][:-1]))
        near = difflib.get_close_matches(str(item["loc"][-1]), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        return f"{where}: unknown field (value {_short(value)}){hint} Allowed: {', '.join(allowed)}"
    if kind == "missing":
        return f"{where}: is missing. It is: {_description(model, item['loc'])}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "component":
        return f"{where}: {message}"
    if kind == "value_error" and ": got " in message:
        return message
    prefix = f"{where}: got {_short(value)}, allowed: " if where else ""
    meaning = _description(model, item["loc"])
    hint = meant_number(value) if kind.startswith(("int_", "float_")) else ""
    return f"{prefix}{message}" + (f" ({meaning})" if meaning else "") + hint


def _is_type_tag(part: Any) -> bool:
    return part in ("int", "str") or (isinstance(part, str) and part.startswith("function-"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _walk(model: type[BaseModel], loc: tuple[Any, ...]) -> tuple[type[BaseModel] | None, Any]:
    """The model and the field that a location leads to."""
    current: type[BaseModel] | None = model
    field = None
    for part in loc:
        if current is not None and part in current.model_fields:
            field = current.model_fields[part]
            found = [a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)]
            current = found[0] if found else None
    return current, field


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _fields(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    current, _ = _walk(model, loc)
    return list(current.model_fields) if current else []


def _description(model: type[BaseModel], loc: tuple[Any, ...]) -> str:
    _, field = _walk(model, loc)
    return (field.description or "") if field is not None else ""
