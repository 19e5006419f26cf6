"""Seeded short stories with known labels, from a small grammar.

Every story has a sentiment, a topic, and a register. It opens with one or two
neutral sentences that carry the topic and the register; the sentences after
them carry the sentiment, which stays the same to the end. The frames are shared
between the sentiments, so that only single words differ::

    >>> from examples.demo.stories import make_story, well_formed
    >>> story = make_story(7, sentiment="positive", topic="sailing")
    >>> well_formed(story.text, partial_ok=False)
    True

The module needs the standard library only. The demo model was trained on its
stories, so they are also the reference for what that model should write.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from . import lexicon as lx
from .grammar import (
    NAMES,
    PRONOUNS,
    REGISTERS,
    SENTIMENTS,
    SLOT,
    TEMPLATES,
    TOPICS,
    parse_sentence,
    slot_key,
    tokenize,
    with_article,
)

__all__ = [
    "REGISTERS",
    "SENTIMENTS",
    "SENTIMENT_WORDS",
    "TOPICS",
    "ChatPair",
    "SentenceReport",
    "Story",
    "chat_pairs",
    "grammar_report",
    "make_stories",
    "make_story",
    "openings",
    "sentiment_of",
    "well_formed",
]

MIN_WORDS, MAX_WORDS = 40, 80


@dataclass(frozen=True)
class Story:
    """A story and its labels.

    Attributes:
        text: the sentences, joined by single spaces.
        sentiment: ``"positive"`` or ``"negative"``.
        topic: one of :data:`TOPICS`.
        register: ``"formal"`` or ``"casual"``.
        sentences: the sentences in order.
        n_opening: how many leading sentences are neutral.
    """

    text: str
    sentiment: str
    topic: str
    register: str
    sentences: tuple[str, ...]
    n_opening: int

    @property
    def opening(self) -> str:
        """The neutral sentences at the start, usable as a prompt."""
        return " ".join(self.sentences[: self.n_opening])


@dataclass(frozen=True)
class ChatPair:
    """A request and the story which answers it."""

    user: str
    assistant: str
    story: Story

    @property
    def messages(self) -> list[dict[str, str]]:
        """Both turns in the format of chat templates and ``LLM.chat``."""
        return [
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": self.assistant},
        ]


@dataclass(frozen=True)
class SentenceReport:
    """Verdict on one sentence.

    Attributes:
        sentence: the text.
        ok: whether the grammar can produce it (or, if cut, a text around it).
        complete: whether it ends in a full stop or an exclamation mark.
        template: the template it instantiates, ``None`` if there is none.
    """

    sentence: str
    ok: bool
    complete: bool
    template: str | None


def _words(*texts: str) -> set[str]:
    return {token.lower() for text in texts for token in tokenize(text) if token[0].isalpha()}


def _sentiment_words() -> dict[str, frozenset[str]]:
    """Return the words of each sentiment that nothing else in the grammar uses."""
    by_sentiment = [
        _words(*(phrase for pair in lx.SENTIMENT_SLOTS.values() for phrase in pair[side]))
        for side in range(len(SENTIMENTS))
    ]
    neutral = {word for forms in PRONOUNS.values() for word in forms.values()}
    neutral |= _words(*(name for name, _, _ in NAMES))
    for templates in TEMPLATES.values():
        neutral |= _words(*(SLOT.sub(" ", template) for template in templates))
    for slots in (lx.NEUTRAL_SLOTS, *lx.REGISTER_SLOTS.values(), *lx.TOPIC_SLOTS.values()):
        for phrases in slots.values():
            neutral |= _words(*phrases)
    positive, negative = by_sentiment
    return {
        "positive": frozenset(positive - negative - neutral),
        "negative": frozenset(negative - positive - neutral),
    }


# Lower-case words that only occur in text of that sentiment.
SENTIMENT_WORDS: dict[str, frozenset[str]] = _sentiment_words()


def sentiment_of(text: str) -> float | None:
    """Return the balance of positive and negative words.

    Returns:
        +1 if all sentiment words are positive, -1 if all are negative, values
        between for a mixture, ``None`` if there are none.
    """
    words = [token.lower() for token in tokenize(text)]
    positive = sum(word in SENTIMENT_WORDS["positive"] for word in words)
    negative = sum(word in SENTIMENT_WORDS["negative"] for word in words)
    if positive + negative == 0:
        return None
    return (positive - negative) / (positive + negative)


T = TypeVar("T")


class _Composer:
    """Fills templates for one story, keeping its characters and labels."""

    def __init__(self, rng: random.Random, sentiment: str, topic: str, register: str) -> None:
        self.rng = rng
        self.side = SENTIMENTS.index(sentiment)
        self.topic = topic
        self.register = register
        cast = [(name, gender) for name, gender, reg in NAMES if reg == register]
        self.used: set[str] = set()
        # A companion of the same surname would read as the same person.
        self.hero, self.gender = _draw(rng, cast)
        others = [person for person in cast if person[0].split()[-1] != self.hero.split()[-1]]
        companion = _draw(rng, others)
        self.companion = companion[0]

    def _phrase(self, slot: str) -> str:
        if slot == "P":
            return self.hero
        if slot == "C":
            return self.companion
        if slot in PRONOUNS:
            return PRONOUNS[slot][self.gender]
        if slot in lx.SENTIMENT_SLOTS:
            return self._fresh(lx.SENTIMENT_SLOTS[slot][self.side])
        if slot in lx.REGISTER_SLOTS:
            return self._fresh(lx.REGISTER_SLOTS[slot][self.register])
        if slot in lx.NEUTRAL_SLOTS:
            return _draw(self.rng, lx.NEUTRAL_SLOTS[slot])
        phrases = lx.TOPIC_SLOTS[self.topic][slot]
        return self._fresh(phrases) if slot in ("did", "activity") else _draw(self.rng, phrases)

    def _fresh(self, phrases: tuple[str, ...]) -> str:
        """Draw a phrase that the story has not used, while there is one."""
        left = [phrase for phrase in phrases if phrase not in self.used]
        phrase = _draw(self.rng, left or phrases)
        self.used.add(phrase)
        return phrase

    def _fill(self, match: re.Match[str]) -> str:
        phrase = self._phrase(slot_key(match[2]))
        if match[1]:
            phrase = with_article(phrase)
        # Capitalised slots, and any slot that starts the sentence.
        if match.start() == 0 or (match[2][0].isupper() and match[2] not in ("P", "C")):
            phrase = phrase[0].upper() + phrase[1:]
        return phrase

    def sentences(self, stage: str, count: int) -> list[str]:
        """Compose sentences from distinct templates of a stage."""
        templates = TEMPLATES.get((stage, self.register), ()) + TEMPLATES.get((stage, "any"), ())
        chosen: list[str] = []
        for _ in range(count):
            chosen.append(_draw(self.rng, [t for t in templates if t not in chosen]))
        return [SLOT.sub(self._fill, t) for t in chosen]


def _draw(rng: random.Random, options: Sequence[T]) -> T:
    """Draw one of `options`, the k-th with a weight of 1/k (Zipf).

    As in natural text some choices are likelier, so that greedy decoding does not depend on the
    last bits of a logit.
    """
    return rng.choices(options, [1 / (k + 1) for k in range(len(options))])[0]


def _rng(source: random.Random | int) -> random.Random:
    return source if isinstance(source, random.Random) else random.Random(source)


def _pick(rng: random.Random, value: str | None, options: tuple[str, ...], label: str) -> str:
    if value is None:
        return rng.choice(options)
    if value not in options:
        raise ValueError(f"{label} must be one of {', '.join(options)}; got {value!r}")
    return value


def make_story(
    rng: random.Random | int,
    sentiment: str | None = None,
    topic: str | None = None,
    register: str | None = None,
) -> Story:
    """Compose one story of 4 to 6 sentences and 40 to 80 words.

    Args:
        rng: a seed, or a generator to draw from.
        sentiment: a member of :data:`SENTIMENTS`; drawn if not given.
        topic: a member of :data:`TOPICS`; drawn if not given.
        register: a member of :data:`REGISTERS`; drawn if not given.

    Raises:
        ValueError: a label is not one of the known ones.
    """
    rng = _rng(rng)
    sentiment = _pick(rng, sentiment, SENTIMENTS, "sentiment")
    topic = _pick(rng, topic, TOPICS, "topic")
    register = _pick(rng, register, REGISTERS, "register")
    while True:
        composer = _Composer(rng, sentiment, topic, register)
        opening = composer.sentences("open", 1) + composer.sentences("lead", rng.randint(0, 1))
        body = composer.sentences("body", rng.randint(2, 3))
        sentences = (*opening, *body, *composer.sentences("end", 1))
        text = " ".join(sentences)
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            return Story(text, sentiment, topic, register, sentences, len(opening))


def make_stories(
    n: int,
    seed: int,
    sentiment: str | None = None,
    topic: str | None = None,
    register: str | None = None,
) -> list[Story]:
    """Compose ``n`` stories; the same seed gives the same stories."""
    rng = random.Random(seed)
    return [make_story(rng, sentiment, topic, register) for _ in range(n)]


def openings(n: int, seed: int, topic: str | None = None, register: str | None = None) -> list[str]:
    """Compose neutral story openings, for prompts that can continue either way."""
    rng = random.Random(seed)
    return [make_story(rng, topic=topic, register=register).opening for _ in range(n)]


# how a request names a sentiment; ``None`` leaves it open
_REQUEST_WORDS: dict[str | None, tuple[str, ...]] = {
    "positive": ("happy", "cheerful", "joyful"),
    "negative": ("sad", "gloomy", "unhappy"),
    None: ("short", "new", "little"),
}
_TOPIC_IN_REQUEST = {"garden": "the garden", "market": "the market"}
_REQUESTS = (
    "Tell me {a kind} story about {topic}.",
    "Write {a kind} story about {topic}.",
    "Please tell me {a kind} story about {topic}.",
    "I want to read {a kind} story about {topic}.",
    "Tell me {a kind} {register} story about {topic}.",
    "Tell me {a kind} story.",
    "Tell me a story about {topic}.",
)


def chat_pairs(n: int, seed: int) -> list[ChatPair]:
    """Compose requests for a story, each with a story that fulfils it.

    About one request in three does not name the sentiment.
    """
    rng = random.Random(seed)
    pairs = []
    for _ in range(n):
        story = make_story(rng)
        request = rng.choice(_REQUESTS)
        kind = rng.choice(_REQUEST_WORDS[story.sentiment if rng.random() < 0.75 else None])
        user = request.replace("{a kind}", with_article(kind))
        topic = _TOPIC_IN_REQUEST.get(story.topic, story.topic)
        user = user.replace("{topic}", topic).replace("{register}", story.register)
        pairs.append(ChatPair(user, story.text, story))
    return pairs


def _join(tokens: list[str]) -> str:
    """Join a sentence's tokens with the only spacing that the grammar allows."""
    text = ""
    for i, token in enumerate(tokens):
        closing = token in ".,!" or (token == '"' and i > 0 and tokens[i - 1] == ",")
        after_open = i > 0 and tokens[i - 1] == '"' and (i == 1 or tokens[i - 2] != ",")
        text += token if closing or after_open or i == 0 else f" {token}"
    return text


def grammar_report(text: str, partial_ok: bool = True) -> list[SentenceReport]:
    """Judge every sentence of a text by the grammar.

    A sentence is right if some template yields it with words of the right
    lists, agreeing pronouns and topics, capitals, and spacing. Sentiment is not
    judged: a text that changes it halfway can still be well-formed.

    Args:
        text: one or more sentences.
        partial_ok: the first sentence may lack its beginning (where it starts
            with a small letter or punctuation) and the last its end.
    """
    parts = [part for part in re.split(r"(?<=[.!])\s", text.strip()) if part]
    reports = []
    for i, part in enumerate(parts):
        tokens = tokenize(part)
        complete = part[-1] in ".!"
        template = None
        if _join(tokens) == part and (complete or (partial_ok and i == len(parts) - 1)):
            cut_start = partial_ok and i == 0
            template = parse_sentence(tokens, cut_start=cut_start, cut_end=not complete)
        reports.append(SentenceReport(part, template is not None, complete, template))
    return reports


def well_formed(text: str, partial_ok: bool = True) -> bool:
    """Return whether every sentence of the text is one of the grammar.

    See :func:`grammar_report` for what is judged; an empty text is not
    well-formed.
    """
    reports = grammar_report(text, partial_ok)
    return bool(reports) and all(report.ok for report in reports)
