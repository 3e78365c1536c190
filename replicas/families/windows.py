"""Sliding windows of layers: the keys by which families describe them, and which key counts where two differ.

Everything is as transformers 5 computes it. With a window of null no layer slides, whatever `use_sliding_window` says;
without the key the family's default counts. A key that would be ignored is refused by name if a layer would then slide
otherwise than the key says, and is otherwise named in the log.
"""

from __future__ import annotations

import logging

from ..config import MAX_POSITIONS, read_num_layers
from ..json_file import Fields
from ..shown import shown

log = logging.getLogger(__name__)

Windows = tuple[int | None, ...]
FULL, SLIDING = "full_attention", "sliding_attention"
OLDER_NAMES = {"attention": FULL}  # as transformers renames them


def no_layer(config: Fields) -> Windows:
    """Return no window for all layers. Raises CheckpointError for a config that says otherwise."""
    count = read_num_layers(config)
    if SLIDING in _types(config, count):
        raise config.error("layer_types", "no sliding window, since this family has none")
    if "sliding_window" in config and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "no sliding window, since this family has none")
    return (None,) * count


def every_layer(config: Fields, default: int) -> Windows:
    """Return the window `sliding_window` for all layers; none where it is null, the family's default where it is
    absent.
    """
    count = read_num_layers(config)
    window = _window(config, default)
    if (used := config.raw.get("use_sliding_window")) is not None and used is not (window is not None):
        slides = "that no layer slides" if window is None else f"that all layers slide by {window}"
        raise config.error("use_sliding_window", f"this key to be absent: sliding_window says {slides}")
    types = _types(config, count)
    if types and set(types) != {FULL if window is None else SLIDING}:
        slides = "null: no layer slides" if window is None else f"{window}: all layers slide"
        raise config.error("layer_types", f"what sliding_window says, {slides}, or this key to be absent")
    return (window,) * count


def upper_layers(config: Fields) -> Windows:
    """Return windows, with `use_sliding_window`, for the layers that `layer_types` names, else for those from
    `max_window_layers` on.
    """
    count = read_num_layers(config)
    used = config.boolean("use_sliding_window", False)
    window = _window(config, 4096) if used else None
    if used and window is None:
        log.warning("%s: use_sliding_window is true, but sliding_window is null: no layer slides", config.file)
    first = config.integer("max_window_layers", 0, MAX_POSITIONS, default=28)
    by_index = tuple(window if index >= first else None for index in range(count))
    types = _types(config, count)
    if not types:
        return by_index
    if window is None and SLIDING in types:
        raise config.error("layer_types", f"{FULL}, or {SLIDING} together with use_sliding_window and sliding_window")
    windows = tuple(window if kind == SLIDING else None for kind in types)
    if windows != by_index and "max_window_layers" in config:
        log.warning("%s: layer_types says which layers slide, and max_window_layers, %d, does not", config.file, first)
    return windows


def _window(config: Fields, default: int) -> int | None:
    if "sliding_window" in config.raw and "sliding_window" not in config:
        return None
    return config.integer("sliding_window", 1, MAX_POSITIONS, default=default)


def _types(config: Fields, count: int) -> tuple[str, ...]:
    """Return the type of attention of each layer from `layer_types`; empty where the config has no such list."""
    if "layer_types" not in config:
        return ()
    found = config.raw["layer_types"]
    if not isinstance(found, list) or len(found) != count:
        raise config.error("layer_types", f"a list of num_hidden_layers, {count}, names")
    types = tuple(OLDER_NAMES.get(kind, kind) if isinstance(kind, str) else "" for kind in found)
    if unknown := [name for name, kind in zip(found, types, strict=True) if kind not in (FULL, SLIDING)]:
        raise config.error("layer_types", f"{FULL} or {SLIDING} for each layer, and not {shown(unknown[0])}")
    return types
