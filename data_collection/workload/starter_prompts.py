"""Prompts that come with Headway, so that a first collection needs no data set.

They are templates filled with topics, written for this project. Their answers range from
one word to the usual cap of 1,024 tokens: length is what a predictor has to learn, so a
set with one kind of answer would teach it nothing.
"""

import hashlib
from collections.abc import Iterator
from itertools import product

__all__ = ["HEROES", "starter_prompts"]

_SUBJECTS = (
    "photosynthesis", "inflation", "a binary search tree", "the water cycle", "plate tectonics",
    "a lunar eclipse", "compound interest", "the immune system", "a public key", "evaporation",
    "supply and demand", "a jet engine", "natural selection", "a suspension bridge", "yeast",
    "the greenhouse effect", "a compiler", "gravity", "a vaccine", "sound insulation",
)  # fmt: skip
HEROES = (
    "a lighthouse keeper who finds a letter from the future",
    "two sisters who restore an old sailing boat",
    "a robot gardener on a space station",
    "a baker whose bread makes people tell the truth",
    "a detective who is afraid of the dark",
    "a village where it has not rained for ten years",
    "a chess player who meets her younger self",
    "a train that stops at a station nobody knows",
    "a cartographer who draws a river that does not exist yet",
    "a night guard in a museum of lost things",
    "a family that moves to the bottom of the sea",
    "a violin that was built without a sound post",
)
_SKILLS = (
    "brewing coffee by hand", "repairing a flat bicycle tyre", "growing tomatoes on a balcony",
    "learning to juggle three balls", "setting up a home network", "baking sourdough bread",
    "writing a good cover letter", "photographing the night sky", "building a bird house",
    "planning a week of meals", "using version control with git", "training for a 10 km run",
    "keeping bees in a city", "sewing a cushion cover",
)  # fmt: skip
_ISSUES = (
    "whether cities should ban private cars", "how the printing press changed Europe",
    "the value of learning a second language", "why some civilisations collapsed",
    "remote work and the future of offices", "the ethics of zoos", "how money was invented",
    "the role of chance in science", "nuclear power in a warming world",
    "what makes a government legitimate", "how writing systems arose", "the history of salt",
)  # fmt: skip
_PASSAGES = (
    "The town library closed its old building in March. Its 40,000 books were moved by three "
    "hundred volunteers, who formed a chain along Mill Street and passed them from hand to hand. "
    "The new building, a former wool store, has twice the room, and opens on Sundays as well. "
    "Only the map collection stays behind until its drying room is ready.",
    "Sea otters eat sea urchins, and sea urchins eat kelp. Where hunters removed the otters, the "
    "urchins multiplied and grazed whole kelp forests down to bare rock. Fish that hid in the "
    "kelp vanished with it. Where otters were brought back, the forests returned within a decade, "
    "although warmer water now slows their growth.",
    "A small bakery compared two ovens for a year. The gas oven cost less to buy and heated up "
    "in twenty minutes. The electric one needed an hour, but it held its temperature within two "
    "degrees, burnt fewer loaves and cost a third less to run at night. The owner kept both: gas "
    "for rush orders, electricity for the daily bread.",
    "The patch release fixes a fault in the scheduler. Jobs that were paused and resumed within "
    "the same second could be counted twice, so that reports showed more work than was done. "
    "Results were never affected. Administrators should run the repair command once after the "
    "update; it takes about a minute for each million jobs.",
    "When the glacier retreated, it left a lake behind a wall of loose stones. Engineers cut a "
    "channel to lower the water by six metres, and fitted a siren that sounds when the level "
    "rises quickly. The valley below practises its evacuation every spring. Last year everybody "
    "reached the school on the hill within eighteen minutes.",
    "Mina wanted to know which of her pigeons was the fastest. She released all nine from the "
    "same hill on ten mornings and wrote down when each came home. The grey one won six times, "
    "but on windy days it came last. She concluded that one number cannot say who is the best, "
    "and entered two birds for the race.",
)
_SENTENCES = (
    "The meeting is moved to Thursday because the manager is ill.",
    "I have been waiting for my parcel for three weeks and nobody answers my calls.",
    "Please switch off the lights when you leave the laboratory.",
    "The soup was cold, the waiter was rude, and we will not come back.",
    "Our new bicycle path makes the way to school safer and quieter.",
    "If it rains tomorrow, the concert takes place in the old church.",
    "She opened the window and listened to the bells across the river.",
    "The update made my phone faster and the battery lasts all day.",
    "The results are interesting, but the sample is too small to be sure.",
    "We would be glad if you could lend us your ladder this weekend.",
)
_TASKS = (
    "reverses a linked list", "finds the longest word in a text", "merges two sorted lists",
    "checks whether brackets are balanced", "converts Roman numerals to integers",
    "counts the vowels in a string", "computes the n-th Fibonacci number",
    "removes duplicates but keeps the order", "parses a date such as 2024-02-29",
    "finds all anagrams of a word in a list", "rotates a matrix by 90 degrees",
    "implements a least recently used cache",
)  # fmt: skip

# Task, templates, fillings: every template meets every filling.
_FAMILIES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("yes-no", ("Answer only yes or no: {}",), (
        "is the Moon larger than the Earth?", "can penguins fly?", "is 91 a prime number?",
        "is Lisbon the capital of Portugal?", "does water boil at lower temperatures on hills?",
        "is a tomato a fruit in botany?", "do spiders have six legs?", "is glass made from sand?",
        "is the Danube longer than the Nile?", "can sound travel through a vacuum?",
        "does a leap year have 366 days?", "is gold heavier than silver of the same volume?",
        "was the telephone invented before the radio?", "is Python a compiled language only?",
        "do bats lay eggs?", "is zero an even number?", "is Australia in the northern hemisphere?",
        "can a triangle have two right angles?", "is honey made by bees?", "do fish have lungs?",
        "is the square root of 2 a rational number?", "does the Sun rise in the west?",
        "is iron magnetic?", "are mushrooms plants?", "is Mount Everest in Africa?",
        "do magnets have two poles?")),
    ("one-word", ("{} Answer in one word.",), (
        "Which planet is closest to the Sun?", "What do caterpillars turn into?",
        "What is the opposite of 'ancient'?", "Which metal is liquid at room temperature?",
        "In which country is Kyoto?", "What is the capital of Norway?", "Which gas do we exhale?",
        "Which instrument has 88 keys?", "What is the plural of 'mouse'?", "What colour is a ruby?",
        "Which ocean lies between Africa and America?", "What is a baby kangaroo called?",
        "Which season comes after spring?", "Which language is spoken in Brazil?",
        "What is frozen water called?", "Which animal is the tallest?", "What do bees collect?",
        "Which organ pumps blood?", "What is the past tense of 'go'?", "What has three sides?",
        "What is the currency of Japan?", "Which month has the fewest days?",
        "What is the largest continent?", "Who writes music: a composer or a carpenter?")),
    ("definition", ("Define {} in one sentence.", "What is {}? Answer briefly."), _SUBJECTS),
    ("list", ("List 5 {}.", "List {} without any comment, 30 of them, one a line."), (
        "kinds of cheese", "European rivers", "words that rhyme with 'light'", "board games",
        "things to pack for a hike", "names for a small grey cat", "uses for an empty jar",
        "questions for a job interview", "healthy breakfasts", "inventions of the 19th century",
        "verbs of movement", "ideas for a school project", "musical instruments",
        "rules for a shared kitchen", "things you find in a harbour", "titles for a crime novel")),
    ("email", ("Write a short email that {}.", "Write a formal and detailed email that {}."), (
        "asks a landlord to repair the heating", "invites colleagues to a summer party",
        "declines a job offer politely", "reminds a customer of an unpaid bill",
        "thanks a teacher at the end of the year", "asks for two days of leave",
        "reports a lost suitcase to an airline", "cancels a gym membership",
        "introduces a new member of the team", "apologises for a late delivery",
        "asks a professor for a letter of reference", "announces a change of address")),
    ("code", (
        "Write a Python function that {}. Give only the code.",
        "Write a function that {} in JavaScript, then explain every line and its complexity.",
        "Write a Python function that {}, with type hints, a docstring and at least six tests."),
        _TASKS),
    ("explain", (
        "Explain step by step how {} works.", "Explain {} to a child of ten.",
        "Write the script of a long lecture about {}, with examples and questions."), _SUBJECTS),
    ("summarise", (
        "Summarise in one sentence:\n\n{}", "Give a title of at most five words for:\n\n{}",
        "Write three bullet points with the main facts of this text:\n\n{}",
        "Which numbers or quantities are in this text? List them with what they mean.\n\n{}",
        "Write four questions, with answers, that test whether a reader understood:\n\n{}"),
        _PASSAGES),
    ("continue", (
        "Continue this text for at least 500 words:\n\n{}",
        "Turn this into a long newspaper report with invented interviews:\n\n{}"), _PASSAGES),
    ("rewrite", (
        "Rewrite more formally: {}", "Rewrite as a pirate would say it: {}",
        "Give five different ways to say this: {}"), _SENTENCES),
    ("translate", (
        "Translate into French: {}", "Translate into Spanish: {}",
        "Translate into German and explain each word: {}"), _SENTENCES),
    ("classify", (
        "Is this positive, negative or neutral? Answer with one word. {}",
        "Is this a complaint, a request or a statement? Answer and give one reason. {}"),
        _SENTENCES),
    ("role-play", (
        "You are {}. Introduce yourself in two sentences.",
        "You are {}. Tell me about a typical day, hour by hour.",
        "You are {}. I am a journalist: write our whole interview with ten questions."), (
        "the captain of a research ship", "a medieval bookbinder", "the last dragon of a kingdom",
        "a tired waiter in a busy restaurant", "an astronaut on her first mission",
        "a grumpy librarian", "a talking oak of 800 years", "the inventor of the umbrella")),
    ("story", (
        "Tell a story in exactly three sentences about {}.",
        "Write a story about {}.",
        "Write a story in at least 800 words about {}."), HEROES),
    ("poem", ("Write a haiku about {}.", "Write a poem of eight verses about {}."), (
        "the first snow", "an empty playground", "coffee", "a broken clock", "the sea at night",
        "moving house", "a sleeping dog", "growing old", "a thunderstorm")),
    ("dialogue", (
        "Write a dialogue of four lines between {}.",
        "Write a long dialogue between {}, at least 30 lines."), (
        "a cat and the new puppy", "two clouds", "a pilot and the control tower in fog",
        "a customer and a clockmaker", "Monday and Friday", "a teacher and a pupil who is late",
        "a knife and a fork", "two neighbours and one parking space")),
    ("essay", (
        "In two sentences, what is your view on {}?",
        "Write an essay in at least 1,000 words about {}."), _ISSUES),
    ("tutorial", (
        "Give one tip for {}.", "Give short instructions for {}, in five steps.",
        "Write a complete tutorial in at least 800 words for {}, with tools, steps and mistakes."),
        _SKILLS),
    ("compare", (
        "Which is better, {}? Answer in one sentence.",
        "Make a table for this choice and discuss each row: {}"), (
        "trains or planes for 800 km", "tea or coffee", "a paper book or an e-reader",
        "renting or buying a flat", "Python or C for a beginner", "cats or dogs in a small flat",
        "city life or village life", "swimming or running", "solar or wind power")),
    ("plan", (
        "What should I do first to plan {}? One sentence.",
        "Plan {} in detail, with a schedule and a budget."), (
        "a weekend in Vienna", "a birthday party for twelve children", "a move to another country",
        "a vegetable garden of 20 square metres", "a month of learning the guitar",
        "a small online shop", "a two-week cycling tour", "a reading club", "a science fair")),
    ("count", ("Count from 1 to {}, separated by commas.",), (
        "5", "10", "20", "30", "50", "75", "100", "150", "200", "300")),
)  # fmt: skip


def starter_prompts() -> list[dict[str, str]]:
    """Return the prompts, in an order whose every stretch is varied.

    The order is stratified: the i-th of a task's m prompts stands near the fraction i / m of
    the list, moved by a hash of its id, so that it neither depends on a generator's version
    nor puts one task's prompts in a row.

    Returns:
        Dictionaries with ``id`` (such as ``story-012``), ``prompt``, ``source`` (``starter``)
        and ``task``.
    """
    families = [(task, _shuffled(task, list(texts))) for task, texts in _texts()]
    placed = [
        ((rank + _fraction(name)) / len(named), name, task, text)
        for task, named in families
        for rank, (name, text) in enumerate(named)
    ]
    return [
        {"id": name, "prompt": text, "source": "starter", "task": task}
        for _, name, task, text in sorted(placed)
    ]


def _texts() -> Iterator[tuple[str, Iterator[str]]]:
    for task, templates, fillings in _FAMILIES:
        yield task, (template.format(filling) for template, filling in product(templates, fillings))
    yield "arithmetic", _sums()


def _sums() -> Iterator[str]:
    for i in range(1, 13):
        a, b, c = 7 + 13 * i, 3 + 5 * i, 2 + i
        yield f"What is {a} + {b}? Give only the number."
        yield f"Compute {a} × {c}, and show every step of the long multiplication."
        yield (
            f"A shop sells {a} apples a day at {c} cents each and throws {b} away. How much does "
            "it earn in a week of six days? Reason step by step and check the result."
        )


def _shuffled(task: str, texts: list[str]) -> list[tuple[str, str]]:
    named = [(f"{task}-{number:03d}", text) for number, text in enumerate(texts, 1)]
    return sorted(named, key=lambda pair: _fraction(pair[1]))


def _fraction(text: str) -> float:
    """Map a text to [0, 1), evenly and for ever the same."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
