"""What the site's search finds for words that a reader types: lunr's scores, as Material for MkDocs uses them."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

K1, B = 1.2, 0.75
"""lunr's constants of BM25."""
_STOP = (
    "a about after all also am an and any are as at be because been but by can could did do does for from get had has "
    "have he her him his how i if in into is it its let like me most my no nor not of off on or our own said say she "
    "should since so some than that the their them then there these they this to too us was we were what when where "
    "which while who why will with would you your"
)
STOP = frozenset(_STOP.split())


class Search:
    """The sections of a search index (``search_index.json``), ready to be asked.

    Args:
        docs: its sections: ``location``, ``title``, ``text`` (HTML), ``tags``.
        boosts: by field.
    """

    def __init__(self, docs: Sequence[Mapping[str, Any]], boosts: Mapping[str, float]) -> None:
        self._docs, self._boosts = docs, boosts
        self._terms = {name: [Counter(words(_text(doc.get(name, "")))) for doc in docs] for name in boosts}
        self._holding = Counter(
            term for k in range(len(docs)) for term in {t for found in self._terms.values() for t in found[k]}
        )

    def pages(self, typed: str) -> list[str]:
        """The pages that hold what was typed, or begin words with it, best first."""
        scores = [0.0] * len(self._docs)
        hits: list[set[str]] = [set() for _ in self._docs]
        for name, boost in self._boosts.items():
            found = self._terms[name]
            mean = sum(map(Counter.total, found)) / max(1, len(found))
            expanded = [(q, t) for q in words(typed) for t in self._holding if t.startswith(q)]
            for k, terms in enumerate(found):
                length = K1 * (1 - B + B * terms.total() / max(mean, 1e-9))
                for asked, term in expanded:
                    if count := terms[term]:
                        scores[k] += boost * self._rarity(term) * (K1 + 1) * count / (length + count)
                        hits[k].add(asked)
        asked_for = set(words(typed))
        for k, doc in enumerate(self._docs):
            share = len(hits[k]) / max(1, len(asked_for)) + ("#" not in doc["location"])
            scores[k] *= doc.get("boost", 1) * (1 + share**2)
        order = sorted((k for k, score in enumerate(scores) if score), key=lambda k: -scores[k])
        return list(dict.fromkeys(self._docs[k]["location"].partition("#")[0] for k in order))

    def _rarity(self, term: str) -> float:
        holding = self._holding[term]
        return math.log(1 + abs((len(self._docs) - holding + 0.5) / (holding + 0.5)))


def words(text: str) -> list[str]:
    """The words that are looked up."""
    found = (re.sub(r"^\W+|\W+$", "", word) for word in re.split(r"[\s\-]+", text.lower()))
    return [word for word in found if word and word not in STOP]


def _text(value: str | Iterable[str]) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", value)) if isinstance(value, str) else " ".join(value)
