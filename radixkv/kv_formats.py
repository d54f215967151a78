"""The formats in which K and V are stored: one entry each, and every list of them comes from here.

Besides its entry a format needs, under the same name,

- a class in `radixkv.attention.formats` (``MAKERS``), with which backend="torch" serves it;
- for the fast backends a number in ``kernels/cpu/formats.py`` (``FORMATS``) and one in
  ``kernels/gpu/numbers.py`` (the name in capitals), and the code that reads and writes its rows.

A backend whose kernels lack a format refuses it by its name. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """What is known of a format without its code.

    Attributes:
        name: as in ``KVConfig.dtype``.
        bits: of an element, without scales; None is the model's own dtype.
        other_names: what other libraries call it: a wrong name's error says which is meant.
        output_error: how far a token's output of one head may be from what unquantized pages give,
            as a share of that one's length: three times what was seen.
        is_timed: whether benchmarks time it unasked; fp8_e5m2 takes the time of fp8.
    """

    name: str
    bits: int | None
    other_names: tuple[str, ...] = ()
    output_error: float
    is_timed: bool = True


FORMATS: dict[str, StoredFormat] = {
    one.name: one
    for one in (
        StoredFormat(name="int8", bits=8, other_names=("q8", "q8_0"), output_error=0.05),
        StoredFormat(
            name="fp8",
            bits=8,
            other_names=("fp8_e4m3", "e4m3", "float8_e4m3fn"),
            output_error=0.15,
        ),
        StoredFormat(
            name="fp8_e5m2",
            bits=8,
            other_names=("e5m2", "float8_e5m2"),
            output_error=0.3,
            is_timed=False,
        ),
        StoredFormat(name="int4", bits=4, other_names=("q4", "q4_0"), output_error=0.5),
        StoredFormat(
            name="model",
            bits=None,
            other_names=("bfloat16", "float16", "float32", "fp16", "bf16"),
            output_error=0.0,
        ),
    )
}
"""By name, in the order in which they are listed."""
