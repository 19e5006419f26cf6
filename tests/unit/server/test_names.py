"""Names over HTTP: what looks right up to a newline is not."""

from __future__ import annotations

import pytest

from vllm_weir import WeirError
from vllm_weir.schema.sinks import parse_name
from vllm_weir.server.names import check_name


@pytest.mark.parametrize("name", ["happy\n", "happy\nsad", "\n", "a" * 129, "", "-a", "a b"])
@pytest.mark.parametrize("check", [check_name, lambda name: parse_name(name, "sink")])
def test_names_that_are_none(check, name):
    check(name.strip("\n-").replace("\n", "").replace(" ", "")[:128] or "a")
    with pytest.raises(WeirError, match="128"):
        check(name)
