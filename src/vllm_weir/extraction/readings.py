"""What a run asks of each request, and what becomes of its output: captured rows, or features."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.extraction.feature_spec import FeatureSpec
from vllm_weir.extraction.feature_writer import FeatureBatch
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compression import Compression, header_bytes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_shapes import row_width
from vllm_weir.storage.batch import Batch
from vllm_weir.storage.features.parts import RecordFeatures

ACTIVE_BYTES = 8 + 32
"""Bytes of one feature of a row while it is under way: on the bus, and as tensors of an output."""


class CaptureReading:
    """Rows of a capture; raises WeirError if the engine cannot capture them.

    Attributes:
        asked: Arguments of `weir.params` for each request.
        row_bytes: Most bytes of rows that a token gives.
    """

    def __init__(self, capture: Capture, capabilities: Any) -> None:
        layers = capture.resolve_layers(capabilities.num_layers)
        for layer in layers:
            reason = capabilities.sites.get(Site(capture.hook, layer), "the model has no such point")
            if reason:
                raise WeirError(f"{capture.hook}[{layer}] cannot be captured: {reason}", "hook")
        dtype = capture.dtype or capabilities.dtype
        widths = [row_width(capabilities.shape(Site(capture.hook, layer))) for layer in layers]
        self.asked: dict[str, Any] = {"capture": capture}
        self.row_bytes = sum(_record_bytes(capture, width, dtype) for width in widths)

    def rows(self, output: Any) -> list[Batch]:
        """Return what is written of an output: a batch for each site, with an empty request id."""
        acts = output.activations
        _check_complete(output, acts)
        rows = []
        for site in acts.sites:
            records, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
            positions, token_ids = acts.positions_of(*site), acts.token_ids_of(*site)
            rows.append(Batch("", site.hook, site.layer, positions, token_ids, records, header))
        return rows


class FeatureReading:
    """Features of an autoencoder, which is loaded onto the engine's workers; attributes as of `CaptureReading`."""

    def __init__(self, spec: FeatureSpec, llm: Any) -> None:
        from vllm_weir.api import load_sae

        self._name = spec.info.sae
        try:
            load_sae(llm, self._name, spec.load())
        except WeirError as e:
            raise WeirError(str(e) if e.field.startswith("sae.") else e.message, "sae") from None
        self.asked: dict[str, Any] = {"features": spec.asked}
        self.row_bytes = ACTIVE_BYTES * (spec.asked.top_k or len(spec.asked.ids))

    def rows(self, output: Any) -> list[FeatureBatch]:
        """Return the features that are not 0, for each row."""
        _check_complete(output, output.features)
        found = output.features[self._name]
        prompt = output.prompt_token_ids
        tokens = np.array([*prompt, *output.outputs[0].token_ids], np.int64)
        positions, ids, values = (array.cpu().numpy() for array in (found.positions, found.ids, found.values))
        active = values != 0
        offsets = np.concatenate([[0], np.cumsum(active.sum(1))]).astype(np.int64)
        features = RecordFeatures(
            -1, positions, tokens[positions], positions >= len(prompt), offsets, ids[active], values[active]
        )
        return [FeatureBatch("", features)]


def _check_complete(output: Any, read: Any) -> None:
    if read is None or not output.receipt.complete or output.receipt.dropped:
        raise WeirError(
            f"the rows of request {output.request_id} are not complete; see the settings host_bytes, overflow"
        )


def _record_bytes(capture: Capture, width: int, dtype: str) -> int:
    """Return the bytes of a row of so many values, of which the capture may pick some."""
    if capture.hook == "expert_ids":
        dtype = "int64"
    return header_bytes((capture.compress or Compression()).header(width, dtype))
