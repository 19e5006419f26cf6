"""Where the model keeps a fact: that a woman is a *she* and a man a *he*.

Rows of a woman's prompt are put into a man's, place by place (activation patching): where the answer turns from *he*
to *she*, the fact was in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import vllm_weir as weir
from examples.demo.lexicon import FEMALE_NAMES, MALE_NAMES

PROMPT, NAME = "{} was so happy that", "(name)"
ANSWERS = (" she", " he")
MIN_SHARE = 0.5
"""What the strongest head of the shipped model must restore, else the exit code is 1."""


@dataclass(frozen=True)
class Fact:
    """What patching a woman's rows into a man's run restores of the woman's answer; 0 is nothing, 1 all of it.

    Attributes:
        asked: pairs of names that were asked about.
        pairs: those that the model answers right, which the rest is about.
        words: the tokens of the prompt.
        by_place: whole rows of the stream after a block, [blocks, tokens].
        by_head: the output of one head at the last token, [blocks, heads].
        turned: men whom the model calls *she* once they have the strongest head's output.
        turned_back: women whom it calls *he*, the other way round.
    """

    asked: int
    pairs: int
    words: Sequence[str]
    by_place: np.ndarray
    by_head: np.ndarray
    turned: int
    turned_back: int

    @property
    def strongest(self) -> tuple[int, int]:
        """(block, head) of the head that restores most."""
        block, head = np.unravel_index(self.by_head.argmax(), self.by_head.shape)
        return int(block), int(head)


def find_fact(llm: Any) -> Fact:
    """Look for the fact.

    Raises:
        WeirError: if the model does not know it, or has no rows of heads.
    """
    women, men = _pairs(llm)
    answers = zip(_answers(llm, women), _answers(llm, men), strict=True)
    known = [pair for pair, answer in zip(zip(women, men), answers, strict=True) if answer == ANSWERS]
    if not known:
        raise weir.WeirError(f"the model does not go on with she after {women[0]!r} and with he after {men[0]!r}")
    texts = list(zip(*known, strict=True))

    def sweep(hook: str, **more: Any) -> weir.Sweep:
        metric = weir.logit_diff(*ANSWERS)
        return weir.sweep(llm, *map(list, texts), hook, metric=metric, progress=False, **more)

    places = sweep("resid_post")
    heads = sweep("z", positions=["last_prompt"], heads="all")
    by_head = heads.normalised.array[0, :, 0]
    block, head = np.unravel_index(by_head.argmax(), by_head.shape)
    back = sweep("z", layers=int(block), positions=["last_prompt"], heads=[int(head)], mode="noise")
    tokenizer = llm.get_tokenizer()
    tokens = zip(*(tokenizer.encode(of_sex[0]) for of_sex in texts), strict=True)
    return Fact(
        asked=len(women),
        pairs=len(known),
        words=[NAME if woman != man else tokenizer.decode([man]).strip() for woman, man in tokens],
        by_place=places.normalised.array[0],
        by_head=by_head,
        turned=int((heads.by_pair.array[:, 0, block, 0, head] > 0).sum()),
        turned_back=int((back.by_pair.array < 0).sum()),
    )


def _pairs(llm: Any) -> tuple[list[str], list[str]]:
    """Return women's and men's prompts that have the same number of tokens, the least that any has."""
    encode = llm.get_tokenizer().encode
    prompts = [[PROMPT.format(name) for name in names] for names in (FEMALE_NAMES, MALE_NAMES)]
    least = min(len(encode(prompt)) for of_sex in prompts for prompt in of_sex)
    women, men = ([prompt for prompt in of_sex if len(encode(prompt)) == least] for of_sex in prompts)
    pairs = min(len(women), len(men))
    return women[:pairs], men[:pairs]


def _answers(llm: Any, prompts: Sequence[str]) -> list[str]:
    """Return the word after each prompt."""
    from vllm import SamplingParams

    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return [out.outputs[0].text for out in outputs]


def print_fact(console: Console, fact: Fact) -> None:
    """Print where the fact is at each block, and which head carries it on."""
    console.print("Where is it known that a woman is a she? What her row restores of the answer in a man's run:")
    table = Table()
    for column in ("block", "best place", "restored", "best head", "restored"):
        table.add_column(column, justify="left" if column == "best place" else "right")
    block, head = fact.strongest
    for layer, (places, heads) in enumerate(zip(fact.by_place, fact.by_head, strict=True)):
        place, best = int(places.argmax()), int(heads.argmax())
        cells = [str(layer), fact.words[place], f"{places[place]:.2f}", str(best), f"{heads[best]:.2f}"]
        table.add_row(*cells, style="bold" if layer == block else None)
    console.print(table)
    console.print("; ".join(_stays(fact)))
    console.print(
        f"Head {head} of block {block} carries it: its output alone turns he into she for {fact.turned} of "
        f"{fact.pairs} men, and she into he for {fact.turned_back} of {fact.pairs} women "
        f"(the model answers {fact.pairs} of {fact.asked} pairs of names right)"
    )


def _stays(fact: Fact) -> list[str]:
    """Return in words which place restores most from which block to which."""
    best = enumerate(fact.by_place.argmax(1).tolist())
    out = []
    for place, run in groupby(best, key=lambda one: one[1]):
        blocks = [layer for layer, _ in run]
        where = f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
        out.append(f"after {where} the fact is in the row of {fact.words[place]!r}")
    return [out[0][0].upper() + out[0][1:], *out[1:]]
