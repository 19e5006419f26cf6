"""A request that fails once its batch is done takes nothing from the others."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, prompts, sampling
from tests.support.engines import get_llm
from tests.support.measure import alike
from vllm_weir.consumers.filesystem import Filesystem

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_others_outputs_come_with_the_error(root, tmp_path, at, monkeypatch):
    llm = get_llm(directory(root))
    here = weir.params(sampling(2), capture=weir.Capture("resid_post"))
    (alone,) = llm.generate(prompts([9]), here, use_tqdm=False)
    sink = {"filesystem": {"url": str(tmp_path / "rows"), "layout": "per_request"}}
    lost = weir.params(sampling(2), capture=weir.Capture("resid_post", sink=sink))
    asked = [here, here]
    asked.insert(at, lost)

    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Filesystem, "finish", broken)
    with pytest.raises(weir.WeirError, match="the disk is gone") as caught:
        llm.generate(prompts([9]) * 3, asked, use_tqdm=False)
    outputs = caught.value.outputs
    assert len(outputs) == 3
    for k, out in enumerate(outputs):
        if k == at:
            with pytest.raises(weir.WeirError, match="the disk is gone"):
                out.receipt  # noqa: B018
            continue
        assert out.outputs[0].token_ids == alone.outputs[0].token_ids and out.receipt.complete
        for site in alone.activations.sites:
            assert alike(out.activations[site], alone.activations[site])
    del outputs, out, alone, caught
    assert_nothing_is_held(llm)
