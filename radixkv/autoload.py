"""What `import torch` runs where radixkv is installed, in every process; next to nothing.

lm-evaluation-harness finds models in its own list alone, and has no entry point for others. The
one hook in its process is torch's: ``import torch`` calls the entry points of the group
``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off). Nothing heavy may be
imported here, and nothing raised: torch would not load.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("radixkv")


def register_models() -> None:
    """Tell lm-evaluation-harness of the model ``radixkv``, if this process is the harness's."""
    if "lm_eval" not in sys.modules:
        return
    try:
        import lm_eval.models  # noqa: F401 - its own models first: it fills an empty list only
        from lm_eval.api.registry import model_registry

        if "radixkv" not in model_registry:
            model_registry.register("radixkv", target="radixkv.integrations.lm_eval:RadixKVLM")
    except (ImportError, AttributeError, ValueError) as error:
        logger.warning(
            "lm_eval: the model radixkv is not registered (%s); use "
            "python -m radixkv.integrations.lm_eval",
            error,
        )
