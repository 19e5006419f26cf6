"""`SAEConfig`: what a sparse autoencoder is beside its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_int, parse_flag, set_fields
from vllm_weir.schema.hooks import HEAD_HOOKS, Site, parse_site
from vllm_weir.schema.vectors import number

AUTOENCODERS = ("standard", "gated", "jumprelu", "topk", "batchtopk", "abstopk", "matching_pursuit")
TRANSCODERS = (
    "transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder", "topk_transcoder",
    "topk_skip_transcoder", "abstopk_transcoder", "abstopk_skip_transcoder",
)  # fmt: skip
ARCHITECTURES = (*AUTOENCODERS, *TRANSCODERS)
ROW_NORMALISATIONS = ("constant_norm_rescale", "layer_norm")
"""Normalisations of the input that depend on the row; a constant factor is folded into the weights."""
MAX_LABEL = 200
"""Characters of a feature's label."""

_THRESHOLDS = ("jumprelu", "batchtopk", "jumprelu_transcoder", "jumprelu_skip_transcoder")


def chooses_k(architecture: str) -> bool:
    """Return whether the k largest pre-activations of a row are its features."""
    return architecture.startswith(("topk", "abstopk"))


@dataclass(frozen=True)
class SAEConfig:
    """What a sparse autoencoder or transcoder is beside its weights.

    Args:
        architecture: one of `ARCHITECTURES`, SAELens's names, and likewise ``topk_transcoder`` and so on.
        site: the hook point that it reads.
        out_site: the hook point that it reconstructs: None for `site`, or for ``mlp_out`` of the
            block in transcoders that read ``mlp_in``.
        head: the head whose rows it reads, at hook points with a row for each head; None for rows
            of all heads, flattened.
        apply_b_dec_to_input: whether `b_dec` is subtracted from the input.
        normalize_activations: ``"none"``, ``"constant_norm_rescale"`` or ``"layer_norm"``.
        k: active features of a row (TopK, AbsTopK); greedy steps of matching pursuit, 0 for d_in.
        rescale_acts_by_decoder_norm: whether activations are multiplied by the norms of the
            decoder's rows before the largest are chosen (TopK, AbsTopK).
        residual_threshold: the norm of what is left of a row, below which matching pursuit ends; 0 for none.
        stop_on_duplicate_support: whether matching pursuit ends at a step that adds no new feature.
        layers: blocks of a cross-layer transcoder, whose `site` is that of the first; empty for all else.
        writes: blocks that a block of a cross-layer transcoder writes, from `out_site` on; 0 for all else.
        name: what it is called.
        metadata: other entries of the file, such as ``model_name`` and ``prepend_bos``.
        labels: what features stand for, {feature: text}, of those for which somebody has said it.

    Raises:
        WeirError: naming the field.
    """

    architecture: str
    site: Site
    out_site: Site | None = None
    head: int | None = None
    apply_b_dec_to_input: bool = False
    normalize_activations: str = "none"
    k: int = 0
    rescale_acts_by_decoder_norm: bool = False
    residual_threshold: float = 0.0
    stop_on_duplicate_support: bool = False
    layers: tuple[int, ...] = ()
    writes: int = 0
    name: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_fields(self, labels=_labels(self.labels))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise WeirError(f"unknown architecture {brief(self.architecture)!r}; known are {known}", "architecture")
        set_fields(self, site=_site(self.site, "site"))
        set_fields(self, out_site=self._parse_out_site())
        self._check_head()
        if self.normalize_activations not in ("none", *ROW_NORMALISATIONS):
            raise WeirError(
                f"{brief(self.normalize_activations)!r} is not supported; known are none, "
                f"{', '.join(ROW_NORMALISATIONS)} and, in files, expected_average_only_in",
                "normalize_activations",
            )
        for name in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm", "stop_on_duplicate_support"):
            parse_flag(getattr(self, name), name, "sae")
        if self.is_transcoder and self.apply_b_dec_to_input:
            raise WeirError("a transcoder's b_dec belongs to its output", "apply_b_dec_to_input")
        if self.rescale_acts_by_decoder_norm and self.architecture not in ("topk", "abstopk"):
            raise WeirError(f"only TopK has it, this is {self.architecture}", "rescale_acts_by_decoder_norm")
        self._check_selection()
        self._check_layers()

    def _check_selection(self) -> None:
        """Raise WeirError unless it is said how many features are active, where that is a part of the architecture."""
        if chooses_k(self.architecture) and not (is_int(self.k) and self.k > 0):
            raise WeirError(f"TopK needs k, the number of active features, got {brief(self.k)!r}", "k")
        if self.architecture != "matching_pursuit":
            for name in ("residual_threshold", "stop_on_duplicate_support"):
                if getattr(self, name):
                    raise WeirError(f"only matching pursuit has it, this is {self.architecture}", name)
            return
        if not is_int(self.k) or self.k < 0:
            raise WeirError(f"the most steps are an int from 0 (d_in of them), got {brief(self.k)!r}", "k")
        threshold = number(self.residual_threshold, "residual_threshold")
        if threshold < 0:
            raise WeirError(f"a norm is not negative, got {threshold:g}", "residual_threshold")
        set_fields(self, residual_threshold=threshold)

    def _check_layers(self) -> None:
        """Raise WeirError unless the blocks of a cross-layer transcoder follow each other from that of its site."""
        layers = tuple(self.layers)
        set_fields(self, layers=layers)
        if (layers or self.writes) and not self.is_transcoder:
            raise WeirError(f"only transcoders write at several blocks, this is {self.architecture}", "layers")
        if layers and layers != tuple(range(self.site.layer, self.site.layer + len(layers))):
            first = self.site.layer
            raise WeirError(f"expected blocks from {first} on, one after another, got {brief(layers)}", "layers")

    @property
    def is_transcoder(self) -> bool:
        """Whether it reconstructs another hook point than it reads."""
        return self.architecture in TRANSCODERS

    @property
    def saved_architecture(self) -> str:
        """The architecture in files: as in SAELens, BatchTopK, whose threshold is one number, is saved as JumpReLU."""
        return "jumprelu" if self.architecture == "batchtopk" else self.architecture

    @property
    def encodes_rows(self) -> bool:
        """Whether one product with the row does not tell a feature's activation, so that rows are encoded whole."""
        selects = chooses_k(self.architecture) or self.architecture == "matching_pursuit"
        return selects or self.normalize_activations in ROW_NORMALISATIONS

    @property
    def is_rectified(self) -> bool:
        """Whether a feature's activation is a ReLU or JumpReLU of its own product with the row."""
        return not chooses_k(self.architecture) and self.architecture not in ("gated", "matching_pursuit")

    @property
    def is_signed(self) -> bool:
        """Whether activations may be negative, so that the most active are those of the largest absolute value."""
        return self.architecture.startswith("abstopk")

    @property
    def has_threshold(self) -> bool:
        """Whether a feature is active only above a threshold of its own."""
        return self.architecture in _THRESHOLDS

    @property
    def has_skip(self) -> bool:
        """Whether the output has a linear function of the input added, `W_skip`."""
        return "skip" in self.architecture

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The weights that it has, of each block where there are several."""
        if self.architecture == "matching_pursuit":
            return ("W_dec", "b_dec")
        encoder = ("b_gate", "r_mag", "b_mag") if self.architecture == "gated" else ("b_enc",)
        rest = ("threshold",) * self.has_threshold + ("W_skip",) * self.has_skip
        return ("W_enc", "W_dec", "b_dec", *encoder, *rest)

    def _parse_out_site(self) -> Site:
        if self.out_site is not None:
            out = _site(self.out_site, "out_site")
            if out != self.site and not self.is_transcoder:
                raise WeirError(f"a {self.architecture} SAE reconstructs what it reads, {self.site}", "out_site")
            return out
        if not self.is_transcoder:
            return self.site
        if self.site.hook != "mlp_in":
            raise WeirError(f"which hook point does a transcoder that reads {self.site} write?", "out_site")
        return Site("mlp_out", self.site.layer)

    def _check_head(self) -> None:
        if self.head is None:
            return
        if not is_int(self.head) or self.head < 0:
            raise WeirError(f"a head is an int from 0, got {brief(self.head)!r}", "head")
        if self.site.hook not in HEAD_HOOKS:
            raise WeirError(f"{self.site} has no heads; those with heads are {', '.join(HEAD_HOOKS)}", "head")
        if self.is_transcoder:
            raise WeirError("a transcoder that reads a single head is not supported", "head")


def _labels(given: object) -> dict[int, str]:
    if not isinstance(given, Mapping):
        raise WeirError(f"expected {{feature: text}}, got {type(given).__name__}", "labels")
    for feature, text in given.items():
        if not ((is_int(feature) and feature >= 0) or (isinstance(feature, str) and feature.isdecimal())):
            raise WeirError(f"a feature is a number from 0, got {brief(feature)!r}", "labels")
        if not isinstance(text, str) or not 0 < len(text) <= MAX_LABEL:
            raise WeirError(f"expected 1 to {MAX_LABEL} characters, got {brief(text)!r}", f"labels.{brief(feature)}")
    return {int(feature): text for feature, text in given.items()}


def _site(value: object, name: str) -> Site:
    try:
        return parse_site(value)
    except WeirError as e:
        raise WeirError(e.message, name) from None


_SITE = re.compile(r"^(.+)@([a-z_]+)\.(\d{1,4})$", re.ASCII | re.DOTALL)


class NamedPath(NamedTuple):
    """A sparse autoencoder's name, its path, and the hook point that it reads (None: as its file says)."""

    name: str
    path: str
    site: tuple[str, int] | None = None

    @classmethod
    def parse(cls, text: str, field: str) -> NamedPath:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise WeirError(f"expected NAME=PATH or NAME=PATH@HOOK.LAYER, got {brief(text)!r}", field)
        match = _SITE.match(path)
        return cls(name, path) if match is None else cls(name, match[1], (match[2], int(match[3])))
