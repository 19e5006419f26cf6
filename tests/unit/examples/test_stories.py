"""The story grammar and the files of the shipped demo model."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

import vllm_weir as weir
from examples.demo import grammar
from examples.demo.stories import (
    REGISTERS,
    SENTIMENT_WORDS,
    SENTIMENTS,
    TOPICS,
    chat_pairs,
    grammar_report,
    make_stories,
    make_story,
    openings,
    sentiment_of,
    well_formed,
)
from tests.support.machine import module, needs

MODEL = Path(weir.demo_model())
SIGN = {"positive": 1.0, "negative": -1.0}


@pytest.fixture(scope="module")
def sample():
    return make_stories(150, seed=11)


def test_same_seed_same_stories(sample):
    assert make_stories(150, seed=11) == sample
    assert make_stories(150, seed=12) != sample
    assert make_story(5) == make_story(random.Random(5))
    assert openings(5, seed=3) == openings(5, seed=3)
    assert chat_pairs(5, seed=3) == chat_pairs(5, seed=3)


def test_stories_hardly_repeat():
    assert len({story.text for story in make_stories(500, seed=1)}) == 500


@pytest.mark.parametrize("sentiment", SENTIMENTS)
@pytest.mark.parametrize("register", REGISTERS)
@pytest.mark.parametrize("topic", TOPICS)
def test_requested_labels_are_kept(sentiment, register, topic):
    story = make_story(1, sentiment, topic, register)
    assert (story.sentiment, story.topic, story.register) == (sentiment, topic, register)
    assert sentiment_of(story.text) == SIGN[sentiment]


def test_unknown_labels_are_refused():
    with pytest.raises(ValueError, match="topic must be one of"):
        make_story(1, topic="chess")
    with pytest.raises(ValueError, match="sentiment must be one of"):
        make_story(1, sentiment="mixed")


def test_shape_of_stories(sample):
    for story in sample:
        assert story.text == " ".join(story.sentences)
        assert 4 <= len(story.sentences) <= 6
        assert 40 <= len(story.text.split()) <= 80
        assert story.text.startswith(story.opening)


def test_labels_agree_with_word_lists(sample):
    assert SENTIMENT_WORDS["positive"].isdisjoint(SENTIMENT_WORDS["negative"])
    assert all(len(words) > 100 for words in SENTIMENT_WORDS.values())
    for story in sample:
        assert sentiment_of(story.text) == SIGN[story.sentiment]
    assert sentiment_of("Tom was happy and sad.") == 0
    assert 0.4 < sum(story.sentiment == "positive" for story in sample) / len(sample) < 0.6


def test_openings_are_neutral(sample):
    for opening in openings(300, seed=4):
        assert sentiment_of(opening) is None
        assert well_formed(opening, partial_ok=False)
    # Every sentence after the opening carries the sentiment.
    for story in sample:
        for sentence in story.sentences[story.n_opening :]:
            assert sentiment_of(sentence) == SIGN[story.sentiment]


def test_articles_and_capitals(sample):
    text = " ".join(story.text for story in sample)
    words = text.replace('"', "").split()
    for word, following in itertools.pairwise(words):
        if word in ("a", "an"):
            sounds_like_a_vowel = following[0] in "aeiou" or following.startswith("hour")
            assert (word == "an") == sounds_like_a_vowel, (word, following)
    assert "{" not in text and "}" not in text
    assert all(s.lstrip('"')[0].isupper() for story in sample for s in story.sentences)


def test_stories_are_well_formed(sample):
    for story in sample:
        assert well_formed(story.text, partial_ok=False), grammar_report(story.text, False)


def test_mixed_sentiment_stays_well_formed(sample):
    good = next(s for s in sample if s.sentiment == "positive")
    bad = next(s for s in sample if s.sentiment == "negative")
    assert well_formed(f"{good.text} {bad.text}", partial_ok=False)
    assert well_formed("Mia felt really happy about the soup.")
    assert well_formed("Mia and Tom got sad while they were baking bread.")
    assert well_formed("The soup looked lovely, and the chef wept with joy.")


def test_cut_texts_are_partially_well_formed(sample):
    rng = random.Random(0)
    for story in sample[:60]:
        words = story.text.split()
        piece = " ".join(words[rng.randrange(12) : rng.randrange(14, len(words) + 1)])
        assert well_formed(piece), (piece, grammar_report(piece))
    cut = sample[0].text.rsplit(" ", 1)[0]
    assert not well_formed(cut, partial_ok=False)


@pytest.mark.parametrize("damage", ["drop", "swap", "repeat", "foreign"])
def test_corrupted_stories_are_not_well_formed(sample, damage):
    rng = random.Random(1)
    kept = 0
    for story in sample:
        words = story.text.split()
        i = rng.randrange(1, len(words) - 1)
        if damage == "drop":
            del words[i]
        elif damage == "swap":
            words[i], words[i + 1] = words[i + 1], words[i]
        elif damage == "repeat":
            words.insert(i, words[i])
        else:
            words[i] = "zebra"
        kept += well_formed(" ".join(words), partial_ok=False)
    # A swap of neighbours may, rarely, give another sentence of the grammar.
    assert kept <= (2 if damage == "swap" else 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Mia devoted himself to baking bread.",
        "In the spring of that year, Mrs Ellis devoted himself to making soup.",
        "Mia felt exceedingly happy about the soup.",
        "The soup looked lovely, and the captain smiled with joy.",
        "mia felt really happy about the soup. Tom wept sadly and blamed the chef.",
        "Mia felt really happy about the soup . Tom wept sadly and blamed the chef.",
        "Mia felt really happily about the soup.",
        "What a awful day that was!",
        "Mia felt really happy about the soup",
    ],
)
def test_faults_are_found(text):
    assert not well_formed(text, partial_ok=False)


def test_report_points_at_the_fault():
    reports = grammar_report("Tom felt so sad about the song. Tom the the. What a lovely")
    assert [report.ok for report in reports] == [True, False, True]
    assert [report.complete for report in reports] == [True, True, False]
    assert reports[0].template == "{P} felt {very} {feel} about {object}."
    assert reports[1].template is None


def test_every_template_is_used_and_parsed():
    seen = {
        report.template for story in make_stories(400, seed=6)
        for report in grammar_report(story.text, partial_ok=False)
    }  # fmt: skip
    assert len(seen) > 0.95 * len(grammar.FRAMES)


def test_chat_pairs_name_what_they_get():
    pairs = chat_pairs(200, seed=2)
    for pair in pairs:
        assert [message["role"] for message in pair.messages] == ["user", "assistant"]
        asked = sentiment_of(pair.user)
        assert asked is None or asked == sentiment_of(pair.assistant)
        assert well_formed(pair.assistant, partial_ok=False)
    assert any(sentiment_of(pair.user) is None for pair in pairs)


def test_model_directory_is_small_and_safe():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= names
    assert sum(path.stat().st_size for path in files) <= 10 * 2**20
    assert all(path.suffix in {".json", ".safetensors", ".jinja"} for path in files)


def test_training_record_meets_its_goals():
    record = json.loads((MODEL / "training.json").read_text())
    assert max(record["probe_auc_by_layer"]["last_token"]) >= 0.95
    best = record["steering"]["best"]
    assert min(value for key, value in best.items() if "_to_" in key) >= 0.8


@needs(module("tokenizers"))
def test_tokenizer_round_trip(sample):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    unknown, bos = tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("<bos>")
    for story in sample:
        ids = tokenizer.encode(story.text).ids
        assert ids[0] == bos and unknown not in ids
        assert tokenizer.decode(ids) == story.text
        # A continuation keeps the space that separates it from the prompt.
        cut = len(tokenizer.encode(story.opening).ids)
        assert tokenizer.decode(ids[cut:]) == story.text[len(story.opening) :]


@needs(module("jinja2"))
def test_chat_template_marks_turns():
    import jinja2

    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    text = jinja2.Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "Tell me a sad story about music."}],
        add_generation_prompt=True,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )
    assert text == "<bos><|user|>Tell me a sad story about music.<|end|><|assistant|>"
