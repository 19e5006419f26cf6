"""Checks that a selector can select anything, in the vocabulary and among a request's rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol, TypeVar

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.compat.vllm_lens import lens_field
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention
from vllm_weir.schema.media import NO_MEDIA, Media
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.probe_base import ProbeBase

Asked = tuple[tuple[Positions, str], ...]
"""(selector, field that it was given in)."""
Item = TypeVar("Item", Capture, Intervention, ProbeBase)


class Tokenizer(Protocol):
    """The part of vLLM's tokenizers that Weir uses."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def max_token_id(self) -> int: ...


class _TokenIds:
    """What is looked up once in an engine's tokenizer; arguments as of `Vocabulary`."""

    def __init__(self, size: int, tokenizer: Tokenizer | None) -> None:
        self._size, self.tokenizer = size, tokenizer

    @functools.cached_property
    def size(self) -> int:
        """As of `Vocabulary`.

        The tokenizer's may be larger than the model's: placeholders of images are not embedded.
        """
        tokenizer_size = self.tokenizer.max_token_id + 1 if self.tokenizer is not None else 0
        return max(self._size, tokenizer_size) if self._size else 0

    @functools.cached_property
    def special(self) -> tuple[int, ...] | None:
        """`Vocabulary.special_ids`."""
        if self.tokenizer is None:
            return None
        return tuple(sorted({i for i in self.tokenizer.all_special_ids if isinstance(i, int) and i >= 0}))


class Vocabulary:
    """The tokens that an engine's requests can have.

    Args:
        size: one more than the model's largest token id; 0 if that is not known.
        tokenizer: the engine's; None if it has none.
        media: where a request's prompt has images and the like; None if no request is meant.
    """

    def __init__(self, size: int = 0, tokenizer: Tokenizer | None = None, media: Media | None = None) -> None:
        self._ids, self._media = _TokenIds(size, tokenizer), media

    def of_request(self, media: Media) -> Vocabulary:
        """Return the same for a request's prompt; all requests share what is looked up."""
        return self._with_media(media) if media else self._without_media

    @functools.cached_property
    def _without_media(self) -> Vocabulary:
        return self._with_media(NO_MEDIA)

    def _with_media(self, media: Media) -> Vocabulary:
        made = Vocabulary()
        made._ids, made._media = self._ids, media
        return made

    @property
    def size(self) -> int:
        """One more than the largest token id; 0 if that is not known."""
        return self._ids.size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's; None if it has none."""
        return self._ids.tokenizer

    @property
    def special_ids(self) -> tuple[int, ...] | None:
        """Ids of the tokenizer's special tokens, ascending; None if there is no tokenizer."""
        return self._ids.special

    def occurs(self, positions: Positions) -> bool:
        """Return whether a selector is none by modality, or the prompt has some of that modality."""
        return self._media is None or self._media.has(positions)

    def resolve(self, positions: Positions, field: str) -> Positions:
        """Return the selector with the ids of special tokens, or the positions of images, inserted.

        If no request is meant, the whole prompt stands for a modality's positions.

        Raises:
            WeirError: if it can select no token.
        """
        if positions.kind == "modality":
            if self._media is None:
                return Positions("prompt")
            return self._media.positions(positions, f"{field}.modality")
        if positions.kind == "special":
            if self.special_ids is None:
                raise WeirError(
                    "the engine has no tokenizer (skip_tokenizer_init) to say which tokens are special; name them: "
                    "{'token_ids': [...]} or {'not_token_ids': [...]}",
                    f"{field}.special",
                )
            if positions.values[0] and not self.special_ids:
                raise WeirError(
                    "the engine's tokenizer has no special tokens; name token ids: {'token_ids': [...]}",
                    f"{field}.special",
                )
            return positions.with_special(self.special_ids)
        if positions.needs_token_ids and self.size:
            in_vocabulary = sum(i < self.size for i in positions.numbers)
            if positions.kind == "token_ids" and not in_vocabulary:
                raise WeirError(
                    f"none of these is a token of the model, whose ids are 0..{self.size - 1}", f"{field}.token_ids"
                )
            if positions.kind == "not_token_ids" and in_vocabulary == self.size:
                raise WeirError("every token of the model is among these; leave some out", f"{field}.not_token_ids")
        return positions


UNKNOWN = Vocabulary()


def resolve_tokens(item: Item, vocabulary: Vocabulary) -> Item:
    """Return a capture, intervention or probe with its selector resolved by `Vocabulary.resolve`."""
    positions = vocabulary.resolve(item.positions, f"{item.path}.positions")
    if positions is item.positions:
        return item
    return with_fields(item, positions=positions)


def asked_of(items: Iterable[Capture | AnyIntervention | ProbeBase]) -> Asked:
    """Return the distinct selectors, with their fields, that may select nothing in a request."""
    found: dict[Positions, str] = {}
    for item in items:
        if item.positions.kind in ("generated", "list", "slice"):
            found.setdefault(item.positions, lens_field(f"{item.path}.positions"))
    return tuple(found.items())


def max_generated(prompt_len: int, max_tokens: int, max_model_len: int | None) -> int:
    """Return how many tokens a request can generate."""
    return max_tokens if max_model_len is None else max(1, min(max_tokens, max_model_len - prompt_len))


def check_reached(asked: Asked, prompt_len: int, generated: int, max_tokens: int) -> None:
    """Raise WeirError for a selector that selects none of a request's rows.

    Args:
        asked: the request's selectors, from `asked_of`.
        prompt_len: tokens of the prompt.
        generated: tokens that the request can generate.
        max_tokens: as it was asked.
    """
    end = prompt_len + generated - 1
    for positions, field in asked:
        if positions.reaches(prompt_len, end):
            continue
        limit, setting = f"max_tokens={max_tokens}", "max_tokens"
        if generated < max_tokens:
            limit, setting = f"{limit}, of which max_model_len leaves room for {generated},", "max_model_len"
        if positions.kind == "generated":
            raise WeirError(
                f"'generated' selects no row: with {limit} the one generated token never enters the model; use "
                f"'sampled' (the rows that outputs are sampled from) or 'last_prompt', or raise {setting}",
                field,
            )
        raise WeirError(
            f"{brief(positions.to_json())} selects no row: with {_tokens(prompt_len)} in the prompt and {limit} the "
            f"last position that has one is {end - 1}; name some from 0 to {end - 1}, or raise {setting}",
            field,
        )


def _tokens(count: int) -> str:
    return f"{count} token{'s'[: count != 1]}"
