"""The history of an accountant as JSON: events with their counts, versioned and strict about unknown fields.

A ledger is the record that a run keeps, chained against edits; this is the plain form for reports and other programs.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dprc_lightning.accounting.events import StepEvent, validate_steps
from dprc_lightning.errors import InvalidArgumentError

VERSION = 1
_SHOWN = 60
"""How much of a damaged text an error repeats."""


def history_to_dict(history: Iterable[tuple[StepEvent, int]]) -> dict[str, Any]:
    """A history as plain JSON values.

    Args:
        history: Events with their counts; an event with a law of one's own is an InvalidArgumentError.

    Returns:
        The version, and the events with their counts.
    """
    return {"version": VERSION, "history": [{"event": event.to_dict(), "count": count} for event, count in history]}


def history_from_dict(values: Any) -> list[tuple[StepEvent, int]]:
    """The history that `history_to_dict` wrote; each event validated again.

    Args:
        values: The plain values.

    Returns:
        Events with their counts.

    Raises:
        InvalidArgumentError: If a field is unknown, missing or cannot be used; it names the place.
    """
    top = _fields("accountant", values, ("version", "history"))
    if top["version"] != VERSION or isinstance(top["version"], bool):
        raise InvalidArgumentError("version", top["version"], f"only version {VERSION} can be read by this release")
    if not isinstance(top["history"], list):
        raise InvalidArgumentError("history", top["history"], "must be a list of events with their counts")
    history = []
    for i, item in enumerate(top["history"]):
        place = f"history[{i}]"
        entry = _fields(place, item, ("event", "count"))
        if not isinstance(entry["event"], Mapping):
            raise InvalidArgumentError(
                f"{place}.event", entry["event"], "must be an object with the fields of StepEvent"
            )
        try:
            event = StepEvent.from_dict(entry["event"])
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{place}.event.{error.name}", error.value, error.remedy) from None
        history.append((event, validate_steps(entry["count"], minimum=1, name=f"{place}.count")))
    return history


def history_from_json(text: Any) -> list[tuple[StepEvent, int]]:
    """The history in a JSON text.

    Args:
        text: The text.

    Returns:
        Events with their counts.

    Raises:
        InvalidArgumentError: If the text is damaged, repeats a field, or holds anything but a history.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise InvalidArgumentError("text", text, "must be the text that Accountant.to_json returned")
    try:
        values = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN]
        reason = str(error) or type(error).__name__
        raise InvalidArgumentError("text", shown, f"damaged: {reason}; restore the file") from None
    return history_from_dict(values)


def _fields(place: str, values: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(place, values, f"must be an object with the fields {', '.join(names)}")
    for name in values:
        if name not in names:
            raise InvalidArgumentError(f"{place}.{name}", values[name], f"unknown field; known: {', '.join(names)}")
    for name in names:
        if name not in values:
            raise InvalidArgumentError(f"{place}.{name}", None, "is missing")
    return values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a field occurs twice in one object")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON allows")
