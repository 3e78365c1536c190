"""Which layers slide: how families spell it."""

from __future__ import annotations

from ..config import MAX_POSITIONS, read_num_layers
from ..json_file import Fields

Windows = tuple[int | None, ...]
FULL, SLIDING = "full_attention", "sliding_attention"


def no_layer(config: Fields) -> Windows:
    """All layers see everything. A config that says otherwise is refused."""
    for key in ("layer_types", "sliding_window"):
        value = config.raw.get(key)
        if value is not None and not (isinstance(value, list) and set(map(str, value)) == {FULL}):
            raise config.error(key, "no sliding window, since this family has none")
    return (None,) * read_num_layers(config)


def every_layer(config: Fields, default: int) -> Windows:
    """All layers slide by `sliding_window`; null switches it off, absence means the family's default."""
    if "layer_types" in config:
        raise config.error("layer_types", "this key to be absent, since all layers of this family are alike")
    if "sliding_window" in config.raw and "sliding_window" not in config:
        return (None,) * read_num_layers(config)
    window = config.integer("sliding_window", 1, MAX_POSITIONS, default=default)
    return (window,) * read_num_layers(config)


def upper_layers(config: Fields) -> Windows:
    """With `use_sliding_window`: the layers that `layer_types` names, else those from `max_window_layers` on."""
    count = read_num_layers(config)
    window = None
    if config.boolean("use_sliding_window", False):
        window = config.integer("sliding_window", 1, MAX_POSITIONS, default=4096)
    if "layer_types" not in config:
        first = config.integer("max_window_layers", 0, MAX_POSITIONS, default=28)
        return tuple(window if index >= first else None for index in range(count))
    types = config.raw["layer_types"]
    if not isinstance(types, list) or len(types) != count:
        raise config.error("layer_types", f"a list of num_hidden_layers, {count}, names")
    if any(kind not in (FULL, SLIDING) for kind in types) or (window is None and SLIDING in types):
        raise config.error("layer_types", f"{FULL}, or {SLIDING} together with use_sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)
