"""Receipts as JSON."""

from __future__ import annotations

import json
import math

import pytest

from vllm_weir.results.receipt import InterventionReceipt


@pytest.mark.parametrize("dose", [0.25, 0.0, math.nan, math.inf])
def test_a_dose_that_is_not_finite_is_null(dose):
    one = InterventionReceipt("add", "resid_post", (1, 3), 4, dose, {1: 0.5, 3: dose})
    data = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    back = InterventionReceipt.from_dict(data)
    if math.isfinite(dose):
        assert back == one
    else:
        assert data["relative_dose"] is None and data["relative_dose_by_layer"] == {"1": 0.5, "3": None}
        assert math.isnan(back.relative_dose) and math.isnan(back.relative_dose_by_layer[3])


def test_what_was_not_measured_stays_none():
    one = InterventionReceipt("add", "resid_post", (0, 2), 6)
    assert one.to_dict() == {
        "op": "add", "hook": "resid_post", "layers": [0, 2], "acted": 6, "relative_dose": None,
        "relative_dose_by_layer": {},
    }  # fmt: skip
    assert InterventionReceipt.from_dict(one.to_dict() | {"later": 1}) == one and one.relative_dose is None
    asked = {"op": "add", "hook": "q", "layers": [2], "acted": 3, "later": 1}
    assert InterventionReceipt.from_dict(asked).layers == (2,)
