"""What derived hook points are computed from."""

from __future__ import annotations

SOURCE_HOOKS = {
    "attn_scores": ("q_rot", "k_rot"),
    "pattern": ("q_rot", "k_rot"),
    "expert_ids": ("router_logits",),
    "expert_weights": ("router_logits",),
}
"""Derived hook point -> the hook points whose rows its values are computed from."""
