"""Imports that documentation of earlier versions names go on working."""

from __future__ import annotations

import importlib

import pytest

EARLIER = {
    "vllm_weir.keep:load": "vllm_weir.storage:load",
    "vllm_weir.keep:open_writer": "vllm_weir.storage:open_writer",
    "vllm_weir.keep:Rows": "vllm_weir.storage:DatasetRows",
    "vllm_weir.keep.checksum:checksums": "vllm_weir.results.checksum:checksums",
    "vllm_weir.keep.verify:verify": "vllm_weir.storage.verify:verify",
    "vllm_weir.settings:Settings": "vllm_weir.config.settings:Settings",
    "vllm_weir.extraction.job:Ray": "vllm_weir.extraction.plan:Ray",
    "vllm_weir.extraction.job:extract": "vllm_weir.extraction.run:extract",
}


def named(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("earlier", EARLIER)
def test_earlier_names(earlier):
    assert named(earlier) is named(EARLIER[earlier])
