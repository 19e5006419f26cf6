"""Engine configurations that Weir does not support, with the reason for each."""

from __future__ import annotations

from typing import Any

from vllm_weir.patches.kv_connectors import connectors_of


def refusal_of(config: Any) -> str | None:
    """Return why requests with Weir's keys are refused under a VllmConfig; None if they are served."""
    parallel, compilation = config.parallel_config, config.compilation_config
    checks = (
        (
            config.speculative_config is not None and parallel.pipeline_parallel_size > 1,
            "speculative decoding over pipeline stages: the first ones do not learn which drafts are accepted",
        ),
        (config.model_config.is_encoder_decoder, "encoder-decoder models have no single residual stream"),
        (
            any(name == "DecodeBenchConnector" for name, _ in connectors_of(config)),
            "DecodeBenchConnector fills the KV cache with made-up numbers",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "dual-batch overlap splits the batch under the taps"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism reorders the rows"),
        (
            bool(getattr(compilation.pass_config, "enable_sp", False)),
            "sequence parallelism splits the residual stream over ranks",
        ),
        (config.cache_config.kv_sharing_fast_prefill, "kv_sharing_fast_prefill skips rows of the prompt"),
    )
    for found, why in checks:
        if found:
            return f"Weir does not serve this engine: {why}"
    return None
