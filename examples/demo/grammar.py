"""Sentence templates of the demo stories, and the parser that recognises them.

A template is plain text with slots: ``{P}`` is the main character, ``{C}`` the
companion, ``{he}``/``{him}``/``{his}``/``{himself}`` agree with ``{P}``, and
the other slots name lists of :mod:`examples.demo.lexicon`. ``{a slot}``
prefixes the phrase with the right indefinite article.

Words that agree (pronouns with the name, topic words with each other, titles
with the register) must agree within a sentence. Sentiment is free: positive
and negative words may share a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

from . import lexicon as lx

REGISTERS = ("formal", "casual")
SENTIMENTS = ("positive", "negative")
TOPICS = tuple(lx.TOPIC_SLOTS)
PRONOUNS = {
    "he": {"f": "she", "m": "he"},
    "him": {"f": "her", "m": "him"},
    "his": {"f": "her", "m": "his"},
    "himself": {"f": "herself", "m": "himself"},
}

TEMPLATES: dict[tuple[str, str], tuple[str, ...]] = {
    ("open", "casual"): (
        "{P} was {activity} {place} on {weekday} {daypart}.",
        "It was {weekday}, and {P} was busy {activity} {place}.",
        "{P} and {C} met {place} and talked about {activity}.",
        "So {P} got up early and {did} {place}.",
        "One {season} {daypart}, {P} {did} with {C}.",
        "{P} spent the whole {daypart} {place} and {did}.",
        "Guess what, {P} was {activity} when {C} showed up {place}.",
    ),
    ("open", "formal"): (
        "On {weekday} {daypart}, {P} {did} {place}.",
        "{P} had arranged to meet {C} {place} before {time}.",
        "In the {season} of that year, {P} devoted {himself} to {activity}.",
        "It was nearly {time} when {P} {did} for {person}.",
        "{P} was engaged in {activity} {place} when {C} arrived.",
        "Having visited {person}, {P} {did} {place}.",
        "At the request of {person}, {P} spent the {daypart} {activity}.",
    ),
    ("lead", "casual"): (
        "{C} came along and {did} too.",
        "{Person} was there as well, and they talked about {event}.",
        "{He} started with {object}, and {then} {he} {did}.",
        "{He} wanted to get {object} ready before {time}.",
        "{Event} was only a {span} away.",
        "{C} asked {him} about {object}, and they got to work.",
    ),
    ("lead", "formal"): (
        "{Person} had requested {object} before {time}.",
        "{C} accompanied {him} and {then} {did}.",
        "{He} examined {object}, and {then} {he} {did}.",
        "{Event} was to begin at {time}, according to {person}.",
        "The question of {object} was to be settled by {C}.",
        "{C} enquired about {object}, and {he} described {event}.",
    ),
    ("body", "any"): (
        "{Object} looked {thing}, and {person} {react} with {emotion}.",
        "{Person} {treat} {P} {adverb}, and {C} {react}.",
        "Outside, {w_adj} {w_noun} {moved} {area}.",
        "{P} felt {very} {feel} about {object}.",
        "{His} eyes {eyes} with {emotion} as {he} {did}.",
        "{C} {react} {adverb} and {treat} {person}.",
        "{Object} had been {fate}, and {P} was {feel}.",
        '"This is {a thing} {daypart}," said {P} in {a voice} voice.',
        "{He} {react} {adverb} when {person} spoke about {event}.",
        '"I feel {feel}," {person} said {adverb}.',
        "{Then} {event} became {thing}, and everyone {react}.",
        "{C} said that {object} was {very} {thing}.",
        "{P} {did} {again} and {react} with {emotion}.",
        "{W_adj} {w_noun} {moved} {area}, and {P} {react}.",
    ),
    ("body", "casual"): (
        "{P} was so {feel} that {he} couldn't stop {ing}.",
        "{Then} {person} gave {him} {a thing} {gift}, and {he} just {react}.",
        "{C} kept {ing} because {object} was totally {thing}.",
        "Everybody {enjoy} {event}, and {P} {very} {enjoy} {object}.",
        "What {a thing} {daypart} that was!",
        '"I\'m {very} {feel}," {C} told {him} {adverb}.',
        "{P} and {C} got {feel} while they were {activity}.",
        "Honestly, {object} was {thing}, and {he} {react} a lot.",
        "Well, {event} got {thing}, so {C} and {P} {react} together.",
        "{Person} walked in, {treat} {P} and {react}.",
        '"I {enjoy} {object}," said {C}, {ing} {again}.',
        "Guess what, {object} got {fate}, and everybody {react}!",
    ),
    ("body", "formal"): (
        "It was with {emotion} that {P} {did}.",
        "{Person} {treat} {him} {adverb} in the presence of {C}.",
        "{P} remarked in {a voice} voice that {object} was {thing}.",
        "The conduct of {person} was {thing}, and {C} was {very} {feel}.",
        "{C} considered {event} {a thing} {affair} and {react} {adverb}.",
        "{P} received {a thing} {gift} from {person}.",
        "To the {emotion} of {C}, {object} had been {fate}.",
        "{He} could not conceal {his} {emotion}, for {event} was {thing}.",
        "All who were present {enjoy} {event} and {treat} {P}.",
        "Upon seeing {object}, {C} became {feel} and spoke {adverb}.",
        "{Person} declared {adverb} that {C} {enjoy} {object}.",
        "{P}, {ing} {adverb}, informed {C} that {event} was {thing}.",
    ),
    ("end", "casual"): (
        "It was the {best} {daypart} of the {span}.",
        "They went home {feel}, and {event} ended in {result}.",
        "In the end {P} {react}, and {he} never forgot that {thing} {daypart}.",
        "So the whole thing ended in {result}, and {C} {react} all the way home.",
        "That night {he} talked {adverb} about {object} and went to bed {feel}.",
        "The {w_adj} {w_noun} followed {him} home, and {he} was {very} {feel}.",
    ),
    ("end", "formal"): (
        "Thus {event} ended in {result}, and {P} returned home {feel}.",
        "{P} would always remember it as the {best} {daypart} of {his} life.",
        "In conclusion, {event} was {a thing} {affair}, and {C} departed {adverb}.",
        "When {he} returned home, {P} wrote of {his} {emotion} in {a thing} letter.",
        "The {season} closed with {result}, and {person} {react} {adverb}.",
        "It was, {P} concluded, the {best} {affair} of the {span}.",
    ),
}
"""(stage, register or "any") -> templates. Openings have no sentiment slot."""

SLOT = re.compile(r"\{(a )?(\w+)\}")
_TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|[^\sA-Za-z]")


def tokenize(text: str) -> list[str]:
    """Split text into words and single punctuation characters."""
    return _TOKEN.findall(text)


def with_article(phrase: str) -> str:
    """Prefix ``a`` or ``an``; the lexicon has no silent h or sounded u."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


@dataclass(frozen=True)
class Agreement:
    """What a sentence has fixed so far; ``None`` is still open."""

    gender: str | None = None
    register: str | None = None
    topics: frozenset[str] | None = None

    def merge(self, other: Agreement) -> Agreement | None:
        """Combine both; return None if they contradict each other."""
        if self.gender and other.gender and self.gender != other.gender:
            return None
        if self.register and other.register and self.register != other.register:
            return None
        topics = self.topics
        if topics is None:
            topics = other.topics
        elif other.topics is not None:
            topics = topics & other.topics
            if not topics:
                return None
        return Agreement(self.gender or other.gender, self.register or other.register, topics)


@dataclass(frozen=True)
class SlotFiller:
    """One way to fill a slot: its tokens and what they agree with."""

    tokens: tuple[str, ...]
    agreement: Agreement = Agreement()


def _names() -> Iterator[tuple[str, str, str]]:
    """Yield all (name, gender, register): first names are casual, titles formal."""
    for gender, names, titles in (
        ("f", lx.FEMALE_NAMES, lx.FEMALE_TITLES),
        ("m", lx.MALE_NAMES, lx.MALE_TITLES),
    ):
        for name in names:
            yield name, gender, "casual"
        for title in titles:
            for surname in lx.SURNAMES:
                yield f"{title} {surname}", gender, "formal"


NAMES = tuple(_names())


Phrases = dict[str, list[tuple[str, Agreement]]]
"""Slot -> the phrases that may fill it, and what each agrees with."""


def _name_phrases() -> Phrases:
    return {
        "P": [(name, Agreement(gender, register)) for name, gender, register in NAMES],
        "C": [(name, Agreement(register=register)) for name, _, register in NAMES],
    }


def _pronoun_phrases() -> Phrases:
    return {slot: [(word, Agreement(gender)) for gender, word in words.items()] for slot, words in PRONOUNS.items()}


def _sentiment_phrases() -> Phrases:
    return {slot: [(phrase, Agreement()) for phrase in chain(*sides)] for slot, sides in lx.SENTIMENT_SLOTS.items()}


def _register_phrases() -> Phrases:
    return {
        slot: [(phrase, Agreement(register=register)) for register, phrases in lists.items() for phrase in phrases]
        for slot, lists in lx.REGISTER_SLOTS.items()
    }


def _neutral_phrases() -> Phrases:
    return {slot: [(phrase, Agreement()) for phrase in phrases] for slot, phrases in lx.NEUTRAL_SLOTS.items()}


def _topic_phrases() -> Phrases:
    """Return the phrases of the topics' slots; a phrase may belong to several topics."""
    topics_of: dict[str, dict[str, set[str]]] = {}
    for topic, slots in lx.TOPIC_SLOTS.items():
        for slot, phrases in slots.items():
            for phrase in phrases:
                topics_of.setdefault(slot, {}).setdefault(phrase, set()).add(topic)
    return {
        slot: [(phrase, Agreement(topics=frozenset(topics))) for phrase, topics in by_phrase.items()]
        for slot, by_phrase in topics_of.items()
    }


PHRASES = {
    **_name_phrases(),
    **_pronoun_phrases(),
    **_sentiment_phrases(),
    **_register_phrases(),
    **_neutral_phrases(),
    **_topic_phrases(),
}
"""The phrases of every slot, of either sentiment."""


def slot_key(name: str) -> str:
    """Return a slot's name without the capital that only marks the start of a sentence."""
    return name if name in ("P", "C") else name[0].lower() + name[1:]


@cache
def _choices(slot: str, article: bool) -> dict[str, tuple[SlotFiller, ...]]:
    """Return the fillers of a slot by their first token, for fast matching."""
    index: dict[str, list[SlotFiller]] = {}
    for phrase, agreement in PHRASES[slot]:
        tokens = tuple(tokenize(with_article(phrase) if article else phrase))
        index.setdefault(tokens[0], []).append(SlotFiller(tokens, agreement))
    return {token: tuple(choices) for token, choices in index.items()}


Elements = tuple[dict[str, tuple[SlotFiller, ...]], ...]
"""Slots and literal text of a template in order, each with its fillers by first token."""


@dataclass(frozen=True)
class Frame:
    """A compiled template."""

    template: str
    register: str
    elements: Elements


def _compile(template: str, register: str) -> Frame:
    elements: list[dict[str, tuple[SlotFiller, ...]]] = []
    position = 0

    def literal(text: str) -> None:
        tokens = tuple(tokenize(text))
        if tokens:
            elements.append({tokens[0]: (SlotFiller(tokens),)})

    for slot in SLOT.finditer(template):
        literal(template[position : slot.start()])
        elements.append(_choices(slot_key(slot[2]), bool(slot[1])))
        position = slot.end()
    literal(template[position:])
    return Frame(template, register, tuple(elements))


FRAMES = tuple(_compile(template, register) for (_, register), templates in TEMPLATES.items() for template in templates)


def _aligned(expected: tuple[str, ...], tokens: list[str], start: int, cut: bool) -> bool:
    """Return whether ``expected`` is at ``tokens[start]``, or, if cut, its beginning."""
    found = tuple(tokens[start : start + len(expected)])
    return found == expected or (cut and found == expected[: len(found)])


def _matches(elements: Elements, i: int, tokens: list[str], j: int, bound: Agreement, cut: bool) -> bool:
    """Return whether ``tokens[j:]`` match ``elements[i:]``."""
    if j >= len(tokens):
        return cut or i == len(elements)
    if i == len(elements):
        return False
    for filler in elements[i].get(tokens[j], ()):
        if not _aligned(filler.tokens, tokens, j, cut):
            continue
        merged = bound.merge(filler.agreement)
        if merged and _matches(elements, i + 1, tokens, j + len(filler.tokens), merged, cut):
            return True
    return False


def _matches_tail(elements: Elements, tokens: list[str], bound: Agreement, cut: bool) -> bool:
    """Return whether the tokens match the elements from any point within them on."""
    for i, element in enumerate(elements):
        for filler in chain.from_iterable(element.values()):
            merged = bound.merge(filler.agreement)
            for k, token in enumerate(filler.tokens):
                tail = filler.tokens[k:]
                if (
                    merged
                    and token == tokens[0]
                    and _aligned(tail, tokens, 0, cut)
                    and _matches(elements, i + 1, tokens, len(tail), merged, cut)
                ):
                    return True
    return False


def parse_sentence(tokens: list[str], *, cut_start: bool = False, cut_end: bool = False) -> str | None:
    """Find a template that yields the tokens of one sentence.

    Args:
        tokens: the sentence, as :func:`tokenize` splits it.
        cut_start: the sentence may lack its beginning.
        cut_end: the sentence may lack its end.

    Returns:
        The template, or ``None`` if the sentence is not of the grammar.
    """
    if not tokens:
        return None
    first = tokens[0]
    starts = []
    if first[0].isupper() or first == '"':
        # Literals and names keep their capital; other slots lose the one added.
        starts = [tokens, [first[0].lower() + first[1:], *tokens[1:]]]
    for frame in FRAMES:
        bound = Agreement(register=None if frame.register == "any" else frame.register)
        if any(_matches(frame.elements, 0, start, 0, bound, cut_end) for start in starts):
            return frame.template
        if cut_start and _matches_tail(frame.elements, tokens, bound, cut_end):
            return frame.template
    return None
