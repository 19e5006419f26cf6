"""Word lists of the story grammar.

Every sentiment slot has a positive and a negative list, so that a frame reads
equally well with either: only the slot words carry the sentiment.
"""

from __future__ import annotations


def _split(words: str) -> tuple[str, ...]:
    """Split a comma-separated list into its phrases."""
    return tuple(" ".join(part.split()) for part in words.split(","))


# slot -> (positive phrases, negative phrases)
SENTIMENT_SLOTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    slot: (_split(positive), _split(negative))
    for slot, (positive, negative) in {
        "feel": (
            "happy, glad, cheerful, proud, delighted, joyful, grateful, hopeful, content, "
            "thrilled, overjoyed, pleased, relieved, excited, confident, merry",
            "sad, unhappy, gloomy, ashamed, miserable, upset, bitter, hopeless, lonely, "
            "worried, angry, disappointed, frightened, jealous, heartbroken, weary",
        ),
        "thing": (
            "wonderful, lovely, splendid, perfect, beautiful, excellent, delightful, superb, "
            "charming, marvellous, glorious, brilliant, magnificent, pleasant, amazing, "
            "fantastic, graceful, elegant",
            "terrible, awful, dreadful, horrible, ugly, dismal, nasty, miserable, "
            "shameful, hideous, appalling, disastrous, pathetic, unpleasant, wretched, "
            "rotten, clumsy, painful",
        ),
        "adverb": (
            "happily, proudly, cheerfully, gladly, warmly, joyfully, kindly, gratefully, "
            "eagerly, sweetly, brightly, tenderly",
            "sadly, bitterly, gloomily, angrily, coldly, miserably, rudely, wearily, "
            "fearfully, harshly, grimly, hopelessly",
        ),
        "react": (
            "smiled, laughed, cheered, grinned, beamed, applauded, chuckled, rejoiced, celebrated, giggled",
            "wept, frowned, sighed, groaned, sobbed, sulked, scowled, moaned, trembled, complained",
        ),
        "ing": (
            "smiling, laughing, cheering, grinning, beaming, giggling, celebrating, rejoicing",
            "weeping, frowning, sighing, groaning, sobbing, sulking, scowling, complaining",
        ),
        "treat": (
            "praised, thanked, hugged, welcomed, encouraged, admired, comforted, supported, "
            "congratulated, embraced, rewarded, honoured",
            "blamed, scolded, insulted, mocked, rejected, accused, threatened, cursed, "
            "criticised, abandoned, punished, humiliated",
        ),
        "enjoy": (
            "enjoyed, loved, treasured, adored, cherished, savoured",
            "hated, regretted, resented, loathed, despised, detested",
        ),
        "emotion": (
            "joy, delight, pride, hope, relief, happiness, gratitude, affection, pleasure, satisfaction",
            "sorrow, anger, shame, fear, grief, despair, regret, misery, disgust, disappointment",
        ),
        "result": (
            "triumph, success, applause, celebration, laughter, harmony, victory, friendship",
            "disaster, failure, tears, chaos, ruin, quarrels, defeat, loneliness",
        ),
        "best": (
            "best, finest, happiest, sweetest, loveliest, brightest",
            "worst, saddest, darkest, cruellest, bleakest, unhappiest",
        ),
        "voice": (
            "merry, sunny, kind, friendly, tender, gentle, lively, excited",
            "harsh, cold, weary, hollow, broken, bitter, trembling, angry",
        ),
        "eyes": (
            "shone, sparkled, glowed, twinkled, gleamed",
            "darkened, dimmed, burned, reddened, clouded",
        ),
        "fate": (
            "saved, repaired, restored, rescued, perfected, improved, blessed, recovered",
            "ruined, broken, spoiled, stolen, lost, wrecked, destroyed, damaged",
        ),
        "gift": (
            "trophy, compliment, hug, reward, smile, medal, kiss, bouquet",
            "scolding, insult, threat, shove, fine, slap, rebuke, punishment",
        ),
        "w_adj": (
            "warm, golden, mild, gentle, sweet, bright, soothing",
            "icy, freezing, bleak, stormy, grim, dreary, cruel",
        ),
        "w_noun": (
            "sunshine, breezes, sunlight, rainbows, starlight",
            "rain, fog, hail, sleet, thunder",
        ),
    }.items()
}

# first names and titles decide both the register and the pronouns
FEMALE_NAMES = _split("Mia, Anna, Ruby, Lily, Nora, Ella, Zoe, Clara, Ivy, Maya, Tess, Jane")
MALE_NAMES = _split("Tom, Ben, Max, Leo, Sam, Jack, Finn, Oscar, Noah, Luke, Hugo, Adam")
FEMALE_TITLES = _split("Mrs, Miss, Lady")
MALE_TITLES = _split("Mr, Sir, Lord")
SURNAMES = _split(
    "Alder, Bennett, Carver, Dalton, Ellis, Farrow, Grant, Holloway, Irving, Kendall, "
    "Lambert, Mercer, Norwood, Osborne, Preston, Radley"
)

# slots without sentiment, topic, or register
NEUTRAL_SLOTS: dict[str, tuple[str, ...]] = {
    "weekday": _split("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "daypart": _split("morning, afternoon, evening, day"),
    "season": _split("spring, summer, autumn, winter"),
    "span": _split("year, month, week, season, decade"),
    "time": _split("noon, sunset, midnight, breakfast, lunch, six o'clock, nine o'clock"),
    "moved": _split("drifted over, moved across, settled on, spread over, arrived above"),
    "area": _split("the roofs, the hills, the fields, the town, the river, the valley, the road"),
    "affair": _split("affair, occasion, experience, matter, event, arrangement"),
    "again": _split("again, at once, for a while, for an hour, once more, without a pause"),
}

# slots whose words depend on the register
REGISTER_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "very": {
        "formal": _split("truly, exceedingly, remarkably, profoundly, quite"),
        "casual": _split("really, so, super, totally, pretty"),
    },
    "then": {
        "formal": _split("subsequently, shortly afterwards, in due course, presently"),
        "casual": _split("then, after that, pretty soon, a bit later"),
    },
}

_TOPICS: dict[str, dict[str, str]] = {
    "cooking": {
        "place": "in the kitchen, at the bakery, beside the stove, in the dining room",
        "activity": "baking bread, making soup, slicing onions, frying fish, mixing batter",
        "did": "stirred the soup, kneaded the dough, peeled the potatoes, tasted the sauce, set the oven",
        "object": "the soup, the bread, the cake, the sauce, the recipe, the pie",
        "person": "the chef, the baker, the waiter, the cook",
        "event": "the dinner, the banquet, the feast",
    },
    "sailing": {
        "place": "in the harbour, on the deck, at the pier, near the lighthouse",
        "activity": "raising the sail, steering the boat, tying knots, reading the charts, mending the nets",
        "did": "hoisted the sail, dropped the anchor, coiled the rope, checked the compass, turned the wheel",
        "object": "the boat, the mast, the anchor, the rudder, the hull, the yacht",
        "person": "the captain, the sailor, the fisherman, the harbour master",
        "event": "the voyage, the regatta, the crossing",
    },
    "school": {
        "place": "in the classroom, in the library, in the school yard, at the front desk",
        "activity": "writing essays, solving equations, learning grammar, studying history, practising spelling",
        "did": "opened the textbook, copied the lesson, wrote the essay, sharpened a pencil, answered the question",
        "object": "the essay, the homework, the exam, the notebook, the report, the project",
        "person": "the teacher, the pupil, the headmaster, the librarian",
        "event": "the lesson, the graduation, the science fair",
    },
    "garden": {
        "place": "in the garden, in the greenhouse, behind the hedge, under the apple tree",
        "activity": "planting tulips, watering the beans, trimming the hedge, pulling weeds, digging holes",
        "did": "planted the seeds, raked the leaves, watered the roses, filled the wheelbarrow, pruned the branches",
        "object": "the lawn, the orchard, the rose bush, the vegetable bed, the pond, the harvest",
        "person": "the gardener, the florist, the farmer, the neighbour",
        "event": "the flower show, the garden party, the planting",
    },
    "music": {
        "place": "in the concert hall, on the stage, in the studio, beside the piano",
        "activity": "tuning the violin, practising scales, writing melodies, playing the flute, rehearsing the duet",
        "did": "played the cello, tuned the guitar, sang the chorus, turned the pages, lifted the trumpet",
        "object": "the song, the violin, the melody, the symphony, the drum, the choir",
        "person": "the conductor, the singer, the pianist, the drummer",
        "event": "the concert, the recital, the rehearsal",
    },
    "travel": {
        "place": "at the station, at the airport, on the train, in the hotel lobby",
        "activity": "packing suitcases, buying tickets, studying the map, booking rooms, changing trains",
        "did": "packed the suitcase, bought the tickets, unfolded the map, boarded the train, showed the passport",
        "object": "the hotel, the suitcase, the ticket, the carriage, the route, the passport",
        "person": "the guide, the driver, the tourist, the porter",
        "event": "the journey, the tour, the flight",
    },
    "painting": {
        "place": "at the gallery, beside the easel, in the attic, at the museum",
        "activity": "sketching portraits, mixing colours, cleaning brushes, framing pictures, drawing faces",
        "did": "sketched the portrait, mixed the colours, washed the brushes, framed the picture, stretched the canvas",
        "object": "the canvas, the portrait, the mural, the landscape, the statue, the sketch",
        "person": "the painter, the curator, the sculptor, the collector",
        "event": "the exhibition, the auction, the unveiling",
    },
    "football": {
        "place": "at the stadium, on the pitch, in the locker room, behind the goal",
        "activity": "kicking the ball, training for the match, passing the ball, running laps, practising penalties",
        "did": "laced the boots, kicked the ball, crossed the pitch, blew the whistle, marked the striker",
        "object": "the match, the goal, the jersey, the penalty, the pass, the team",
        "person": "the coach, the referee, the goalkeeper, the striker",
        "event": "the final, the tournament, the training",
    },
    "market": {
        "place": "at the market, behind the counter, in the shop, beside the stall",
        "activity": "selling cheese, weighing apples, counting coins, stacking crates, pricing baskets",
        "did": "weighed the apples, counted the coins, opened the stall, wrapped the parcel, stacked the crates",
        "object": "the cheese, the basket, the stall, the bargain, the parcel, the silk",
        "person": "the merchant, the customer, the shopkeeper, the butcher",
        "event": "the sale, the opening, the trade fair",
    },
    "hiking": {
        "place": "on the mountain, in the forest, at the campsite, near the waterfall",
        "activity": "climbing the ridge, pitching the tent, following the trail, gathering wood, crossing the stream",
        "did": "climbed the ridge, lit the campfire, pitched the tent, laced the boots, filled the flask",
        "object": "the tent, the trail, the cabin, the campfire, the summit, the backpack",
        "person": "the ranger, the climber, the scout, the shepherd",
        "event": "the climb, the expedition, the hike",
    },
}

# topic -> slot -> phrases
TOPIC_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    topic: {slot: _split(words) for slot, words in slots.items()} for topic, slots in _TOPICS.items()
}
