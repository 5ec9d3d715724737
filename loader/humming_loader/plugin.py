"""The entry point of the group `vllm.general_plugins`: every vLLM process calls `register` once or more."""

from __future__ import annotations

import logging

METHOD = "humming_prepacked"


def register() -> None:
    """Make `humming_prepacked` known to vLLM. Never raises: other models must load whatever this vLLM lacks."""
    from humming_loader.errors import ServingError

    try:
        from humming_loader.quant_config import HummingPrepackedConfig
        from humming_loader.vllm_compat import QUANTIZATION_METHODS, register_quantization_config
    except (ImportError, ServingError) as error:
        logging.getLogger(__name__).warning("%s is not available: %s", METHOD, error)
        return
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(HummingPrepackedConfig)
