"""Reader of `do_sample` of TGI and transformers, of which false is greedy, whatever else says how tokens are drawn.

Beside it those two do not agree on a temperature but for 1, which is their default: another one is refused.
"""

from __future__ import annotations

from typing import Any

from .json_body import invalid_value


def apply_do_sample(do_sample: Any, sampling: dict[str, Any], path: str = "do_sample") -> None:
    """Set the temperature to 0 if `do_sample` is false; null and true change nothing. Raises InvalidRequest naming
    `path`.
    """
    if do_sample is None or do_sample is True:
        return
    if do_sample is not False:
        raise invalid_value(path, do_sample, "true or false")
    temperature = sampling.get("temperature", 0)
    if type(temperature) not in (int, float):
        return  # it is refused by its own name
    if temperature not in (0, 1):
        raise invalid_value(path, False, f"true or none beside temperature {temperature:g}: false is greedy")
    sampling["temperature"] = 0
