"""What the wrappers in the caller's process read off vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_weir.patches.frontend import may_be_remote


class OnRay:
    uses_ray = True


class Own:
    uses_ray = False


@pytest.mark.parametrize(
    ("change", "remote"),
    [
        ({}, False),
        ({"nnodes": 2}, True),
        ({"data_parallel_size": 2}, True),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, False),
        *(
            ({"distributed_executor_backend": one}, one in ("ray", OnRay))
            for one in (None, "mp", "uni", "ray", OnRay, Own)
        ),
    ],
)
def test_workers_on_other_machines(change, remote):
    """Rows come over TCP where they may be."""
    plain = dict(nnodes=1, data_parallel_size=1, data_parallel_size_local=1, distributed_executor_backend="mp")
    assert may_be_remote(SimpleNamespace(**plain | change)) is remote
