"""The limits on what a server keeps under names, all kinds of it together."""

from __future__ import annotations

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.schema.named_hooks import Use
from vllm_weir.server.limits import ServerLimits


def check_room(contents: RegistryContents, limits: ServerLimits) -> None:
    """Raise WeirError if the contents exceed the server's limits."""
    names = len(contents.vectors) + len(contents.modules) + len(contents.probes)
    if names > limits.vectors:
        raise WeirError(f"{limits.vectors} names are in use, the limit (WEIR_SERVE_VECTORS); delete some", "name")
    arrays = {
        v.digest: v.array.nbytes
        for n in contents.vectors.values()
        for v in n.directions.values()
        if v.array is not None
    }
    for k, one in enumerate((*(i for module in contents.modules.values() for i in module), *contents.always)):
        if isinstance(one, Use):
            arrays[f"hook {k}"] = one.nbytes
        arrays |= {v.digest: v.array.nbytes for v in one.given if v.array is not None}
    for registered in contents.probes.values():
        arrays |= {v.digest: v.array.nbytes for v in registered.probe.given if v.array is not None}
    if sum(arrays.values()) > limits.vector_bytes:
        raise WeirError(
            f"{sum(arrays.values())} bytes of vectors are more than the server keeps ({limits.vector_bytes}, "
            "WEIR_SERVE_VECTOR_BYTES); delete some",
            "name",
        )
