"""The area under the ROC curve."""

from __future__ import annotations

import numpy as np


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs of scores in the right order; ties count half.

    Args:
        positive: scores [n], n >= 1.
        negative: scores [m], m >= 1.
    """
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    not_above = np.searchsorted(ordered, positive, side="right")
    return float((below + not_above).mean() / (2 * len(negative)))
