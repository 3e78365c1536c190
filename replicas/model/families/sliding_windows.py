"""Sliding windows of layers: the keys by which families describe them, and which key counts where two differ.

Everything is as transformers 5 computes it. With a window of null no layer slides, whatever `use_sliding_window` says;
without the key the family's default counts. A key that would be ignored is refused by name if a layer would then slide
otherwise than the key says, and is otherwise named in the log.
"""

from __future__ import annotations

import logging

from ...checkpoint.files.json_fields import JsonFields
from ...short_repr import short_repr
from ..model_config import MAX_POSITIONS, read_num_layers

log = logging.getLogger(__name__)

Windows = tuple[int | None, ...]
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
OLDER_NAMES = {"attention": FULL_ATTENTION}  # as transformers renames them


def no_sliding_windows(config: JsonFields) -> Windows:
    """Return no window for all layers. Raises CheckpointError for a config that says otherwise."""
    count = read_num_layers(config)
    if SLIDING_ATTENTION in _layer_types(config, count):
        raise config.error("layer_types", "no sliding window, since this family has none")
    if "sliding_window" in config and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "no sliding window, since this family has none")
    return (None,) * count


def every_layer_windows(config: JsonFields, default: int) -> Windows:
    """Return the window `sliding_window` for all layers; none where it is null, the family's default where it is
    absent.
    """
    count = read_num_layers(config)
    window = _window_size(config, default)
    if (used := config.raw.get("use_sliding_window")) is not None and used is not (window is not None):
        slides = "that no layer slides" if window is None else f"that all layers slide by {window}"
        raise config.error("use_sliding_window", f"this key to be absent: sliding_window says {slides}")
    types = _layer_types(config, count)
    if types and set(types) != {FULL_ATTENTION if window is None else SLIDING_ATTENTION}:
        slides = "null: no layer slides" if window is None else f"{window}: all layers slide"
        raise config.error("layer_types", f"what sliding_window says, {slides}, or this key to be absent")
    return (window,) * count


def upper_layer_windows(config: JsonFields) -> Windows:
    """Return windows, with `use_sliding_window`, for the layers that `layer_types` names, else for those from
    `max_window_layers` on.
    """
    count = read_num_layers(config)
    used = config.boolean("use_sliding_window", False)
    window = _window_size(config, 4096) if used else None
    if used and window is None:
        log.warning("%s: use_sliding_window is true, but sliding_window is null: no layer slides", config.file)
    first = config.integer("max_window_layers", 0, MAX_POSITIONS, default=28)
    by_index = tuple(window if index >= first else None for index in range(count))
    types = _layer_types(config, count)
    if not types:
        return by_index
    if window is None and SLIDING_ATTENTION in types:
        raise config.error(
            "layer_types",
            f"{FULL_ATTENTION}, or {SLIDING_ATTENTION} together with use_sliding_window and sliding_window",
        )
    windows = tuple(window if kind == SLIDING_ATTENTION else None for kind in types)
    if windows != by_index and "max_window_layers" in config:
        log.warning("%s: layer_types says which layers slide, and max_window_layers, %d, does not", config.file, first)
    return windows


def _window_size(config: JsonFields, default: int) -> int | None:
    if "sliding_window" in config.raw and "sliding_window" not in config:
        return None
    return config.integer("sliding_window", 1, MAX_POSITIONS, default=default)


def _layer_types(config: JsonFields, count: int) -> tuple[str, ...]:
    """Return the type of attention of each layer from `layer_types`; empty where the config has no such list."""
    if "layer_types" not in config:
        return ()
    found = config.raw["layer_types"]
    if not isinstance(found, list) or len(found) != count:
        raise config.error("layer_types", f"a list of num_hidden_layers, {count}, names")
    types = tuple(OLDER_NAMES.get(kind, kind) if isinstance(kind, str) else "" for kind in found)
    if unknown := [
        name for name, kind in zip(found, types, strict=True) if kind not in (FULL_ATTENTION, SLIDING_ATTENTION)
    ]:
        raise config.error(
            "layer_types", f"{FULL_ATTENTION} or {SLIDING_ATTENTION} for each layer, and not {short_repr(unknown[0])}"
        )
    return types
