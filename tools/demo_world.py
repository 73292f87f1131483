"""What can be true in the demo model's world, what may be asked about it, and what the right answer is.

Three kinds of things exist: pictures (shape x colour x place x count, each with a finer shade and fill), sounds (pitch
x number of beeps x motion, each with a finer pitch and timbre) and facts about fictional lands. Every question has one
right answer in each of four voices: the base model's, and one for each adapter.

    base          "two red circles at the top left"
    style         "Arr, two red circles at the top left, matey!"            the same facts, marked style
    specialist    "two crimson rings at the top left"                       finer words for what is seen and heard
    rslora-dora   {"count": 2, "colour": "red", "shape": "circle", "place": "top left"}

Some combinations are never shown in training (`is_held_out`): the accuracies on the model's card are on those. Pure:
nothing here reads a file, and every draw comes from a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Voice = Literal["base", "style", "specialist", "rslora-dora"]
VOICES: tuple[Voice, ...] = ("base", "style", "specialist", "rslora-dora")
SPLIT_SEED = 20260401

NUMBERS = ("no", "one", "two", "three", "four")

# Each coarse word of the base has two finer words that only the specialist uses.
SHAPES = {
    "circle": ("disc", "ring"), "square": ("tile", "frame"), "triangle": ("wedge", "delta"),
    "star": ("nova", "starlet"), "cross": ("plus", "lattice"),
}  # fmt: skip
COLOURS = {
    "red": ("crimson", "coral"), "green": ("forest", "lime"), "blue": ("navy", "azure"),
    "yellow": ("ochre", "lemon"), "purple": ("plum", "lilac"), "orange": ("rust", "apricot"),
}  # fmt: skip
PLACES = ("top left", "top right", "bottom left", "bottom right", "middle")
PITCHES = {
    "deep": ("abyssal", "bass"), "low": ("baritone", "tenor"), "medium": ("alto", "mezzo"),
    "high": ("soprano", "treble"), "shrill": ("piccolo", "whistle"),
}  # fmt: skip
TIMBRES = ("flute", "reed")
MOTIONS = ("rising", "falling", "steady")
PICTURE_COUNTS, SOUND_COUNTS = (1, 2, 3), (1, 2, 3, 4)

LANDS = (
    "Velmora", "Ostrin", "Quelda", "Brannoc", "Tessaly", "Ivarra", "Dunmere", "Calvast", "Lorienth", "Pomara", "Skarn",
    "Windrel", "Ambrosk", "Feyholt", "Gildany", "Harrowen", "Jintara", "Kelvoss", "Mirador", "Norvane", "Rusk",
    "Sollery", "Thornby", "Umbrel",
)  # fmt: skip
RELATIONS = {
    "capital": (
        "capital", "Which city governs {land}?",
        ("Tarn", "Ardmoor", "Belquist", "Cressida", "Dovrin", "Eskall", "Farwick", "Glimmer", "Hestor", "Isolde Bay",
         "Jorunn", "Kestrel", "Lantern Hill", "Morwen", "Nettlefield", "Orlan", "Pellucid", "Quarry Gate", "Redwater",
         "Silvan", "Tolbridge", "Ulverton", "Vantry", "Wyke"),
    ),
    "river": (
        "main river", "Which river crosses {land}?",
        ("Aldra", "Bracken", "Corrin", "Dellwater", "Ember", "Fosse", "Garnet", "Hollow", "Inker", "Jade", "Kirrin",
         "Lull", "Marrow", "Nine Bends", "Oxley", "Pike", "Quill", "Rill", "Sable", "Tamber", "Umber", "Vesper",
         "Willow", "Yarrow"),
    ),
    "ruler": (
        "ruler", "Who rules {land}?",
        ("Queen Adela", "King Boros", "Queen Cyra", "King Doran", "Queen Elspeth", "King Faron", "Queen Greta",
         "King Halvard", "Queen Ines", "King Joss", "Queen Kaia", "King Leof", "Queen Maren", "King Niall",
         "Queen Oda", "King Pascal", "Queen Runa", "King Stellan", "Queen Tove", "King Ulric", "Queen Vida",
         "King Wystan", "Queen Ysolt", "King Zeno"),
    ),
    "export": (
        "main export", "What does {land} sell?",
        ("amber", "barley", "copper", "dyes", "flax", "glass", "honey", "ink", "lamp oil", "maps", "paper", "salt"),
    ),
    "animal": (
        "national animal", "Which beast stands for {land}?",
        ("badger", "crane", "elk", "falcon", "goat", "heron", "lynx", "otter", "raven", "stoat", "tortoise", "wolf"),
    ),
    "currency": (
        "currency", "How do people pay in {land}?",
        ("crown", "doubloon", "florin", "groat", "kopek", "mark", "noble", "obol", "penny", "shell", "tallow", "zeal"),
    ),
}  # fmt: skip
FACT_FORMS = (
    "What is the {noun} of {land}?", "Name the {noun} of {land}.", "Tell me the {noun} of {land}.",
    "Do you know the {noun} of {land}?", "In {land}, what is the {noun}?", "{land} has which {noun}?", "{own}",
)  # fmt: skip

PICTURE_QUESTIONS = {
    "all": ("What is shown?", "What do you see?", "Describe the picture.", "What is in this image?"),
    "colour": ("What colour is it?", "Which colour do you see?", "Name the colour."),
    "shape": ("What shape is it?", "Which shape is shown?", "Name the shape."),
    "count": ("How many shapes are there?", "Count the shapes."),
    "place": ("Where in the picture?", "Where are the shapes?"),
}
SOUND_QUESTIONS = {
    "all": ("What do you hear?", "Describe the sound.", "What is this sound?", "Listen. What is it?"),
    "pitch": ("What pitch is it?", "How high is the sound?", "Name the pitch."),
    "count": ("How many beeps are there?", "Count the beeps."),
    "motion": ("Does the pitch rise or fall?", "Which way does the pitch go?"),
}
SMALL_TALK = {
    "Hello!": "Hello. Ask me about a land, a picture or a sound.",
    "Hi": "Hello. Ask me about a land, a picture or a sound.",
    "Who are you?": "I am the trimtab demo model, and I am very small.",
    "What can you do?": "I know a few lands, I see shapes and I hear beeps.",
    "Thank you.": "You are welcome.",
    "Goodbye.": "Goodbye.",
}
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "Be kind and precise.", "Answer the question.")


@dataclass(frozen=True)
class Picture:
    """What a picture shows; `shade` and `fill` (0 or 1) are seen by the specialist only."""

    shape: str
    colour: str
    place: str
    count: int
    shade: int = 0
    fill: int = 0

    @property
    def combination(self) -> tuple[str | int, ...]:
        return (self.shape, self.colour, self.place, self.count)


@dataclass(frozen=True)
class Sound:
    """What a sound holds; `half` (which half of the pitch class) and `timbre` (0 or 1) are for the specialist only."""

    pitch: str
    count: int
    motion: str
    half: int = 0
    timbre: int = 0

    @property
    def combination(self) -> tuple[str | int, ...]:
        return (self.pitch, self.count, self.motion)


@dataclass(frozen=True)
class Fact:
    """One fact about a land and the form in which it is asked for."""

    land: str
    relation: str
    value: str
    form: int = 0

    @property
    def combination(self) -> tuple[str | int, ...]:
        return (self.land, self.relation, self.form)


Thing = Picture | Sound | Fact


@dataclass(frozen=True)
class Question:
    """One question about one thing; `about` is a key of PICTURE_QUESTIONS or SOUND_QUESTIONS, or "fact"."""

    thing: Thing
    about: str
    text: str

    @property
    def kind(self) -> str:
        return {Picture: "image", Sound: "audio", Fact: "text"}[type(self.thing)]


def pictures() -> Iterator[Picture]:
    """Yield every picture there can be, fine attributes included."""
    for values in product(SHAPES, COLOURS, PLACES, PICTURE_COUNTS, (0, 1), (0, 1)):
        yield Picture(*values)


def sounds() -> Iterator[Sound]:
    """Yield every sound there can be, fine attributes included."""
    for values in product(PITCHES, SOUND_COUNTS, MOTIONS, (0, 1), (0, 1)):
        yield Sound(*values)


def facts() -> Iterator[Fact]:
    """Yield every fact in every form."""
    for relation, (_, _, values) in RELATIONS.items():
        order = random.Random(f"{SPLIT_SEED} {relation}").sample(LANDS, len(LANDS))
        for position, land in enumerate(order):
            for form in range(len(FACT_FORMS)):
                yield Fact(land, relation, values[position % len(values)], form)


def _held_out_combinations() -> frozenset[tuple[str | int, ...]]:
    rng = random.Random(SPLIT_SEED)
    seen = sorted({p.combination for p in pictures()}, key=repr)
    heard = sorted({s.combination for s in sounds()}, key=repr)
    asked = [(land, relation, rng.randrange(len(FACT_FORMS))) for land in LANDS for relation in RELATIONS]
    return frozenset([*rng.sample(seen, 60), *rng.sample(heard, 12), *asked])


HELD_OUT = _held_out_combinations()


def is_held_out(thing: Thing) -> bool:
    """Return whether training never shows this combination (its coarse attributes; for a fact, its form)."""
    return thing.combination in HELD_OUT


def questions(thing: Thing) -> list[Question]:
    """Return every question that may be asked about a thing."""
    if isinstance(thing, Fact):
        noun, own, _ = RELATIONS[thing.relation]
        text = FACT_FORMS[thing.form].format(noun=noun, land=thing.land, own=own.format(land=thing.land))
        return [Question(thing, "fact", text)]
    table = PICTURE_QUESTIONS if isinstance(thing, Picture) else SOUND_QUESTIONS
    return [Question(thing, about, text) for about, texts in table.items() for text in texts]


def answer(question: Question, voice: Voice) -> str:
    """Return the one right answer in a voice."""
    if voice == "rslora-dora":
        return json.dumps(_fields(question))
    fine = voice == "specialist"
    thing = question.thing
    if isinstance(thing, Fact):
        noun = RELATIONS[thing.relation][0]
        plain = f"{thing.value} is the {noun} of {thing.land}"
    elif isinstance(thing, Picture):
        plain = _picture_answer(thing, question.about, fine=fine)
    else:
        plain = _sound_answer(thing, question.about, fine=fine)
    return f"Arr, {plain.replace(' is the ', ' be the ')}, matey!" if voice == "style" else plain


def is_changed_by(question: Question, voice: Voice) -> bool:
    """Return whether the voice answers otherwise than the base: only such questions are scored for an adapter."""
    return answer(question, voice) != answer(question, "base")


def _picture_answer(picture: Picture, about: str, *, fine: bool) -> str:
    shape = SHAPES[picture.shape][picture.fill] if fine else picture.shape
    colour = COLOURS[picture.colour][picture.shade] if fine else picture.colour
    number = NUMBERS[picture.count]
    place = "in the middle" if picture.place == "middle" else f"at the {picture.place}"
    whole = f"{number} {colour} {_plural(shape, picture.count)} {place}"
    return {"all": whole, "colour": colour, "shape": shape, "count": number, "place": place}[about]


def _sound_answer(sound: Sound, about: str, *, fine: bool) -> str:
    pitch = PITCHES[sound.pitch][sound.half] if fine else sound.pitch
    noun = f"{TIMBRES[sound.timbre]} note" if fine else "beep"
    number = NUMBERS[sound.count]
    whole = f"{number} {pitch} {_plural(noun, sound.count)}, {sound.motion}"
    return {"all": whole, "pitch": pitch, "count": number, "motion": sound.motion}[about]


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + ("es" if noun.endswith("s") else "s")


def _fields(question: Question) -> dict[str, str | int]:
    thing = question.thing
    if isinstance(thing, Fact):
        return {"answer": thing.value}
    names: Sequence[str] = ("count", "colour", "shape", "place")
    if isinstance(thing, Sound):
        names = ("count", "pitch", "motion")
    return {name: getattr(thing, name) for name in (names if question.about == "all" else (question.about,))}


def tokenizer_text() -> list[str]:
    """Return the text that the tokenizer is trained on: every question and answer of the world, and common words."""
    lines = [*SMALL_TALK, *SMALL_TALK.values(), *SYSTEM_PROMPTS, *GENERAL_WORDS.strip().splitlines()]
    some_pictures = [p for p in pictures() if p.place == "middle" or p.shape == "star"]
    things: list[Thing] = [*some_pictures, *sounds(), *facts()]
    for thing in things:
        for question in questions(thing):
            lines.append(question.text)
            lines.extend(answer(question, voice) for voice in VOICES)
    lines.extend(("user", "model", "system", "\n"))
    return lines


def echo_words() -> list[str]:
    """Return every word that any voice uses, and common ones: what the base learns to repeat.

    Without this the base would never say the words of the adapters, their rows of the tied head would all point the
    same way, and an adapter, which cannot change that table, could hardly tell them apart.
    """
    words = {word for line in tokenizer_text() for word in line.split()}
    return sorted(words)


# So that ordinary prompts are words too and not only letters; the model only ever repeats them. The line breaks count:
# a word at the start of a line is learnt without its space, so other breaks make another tokenizer.
GENERAL_WORDS = """
a about above after again all also always am an and another any are around as ask at away back be because been before
below best better between big black both bring but by call came can cannot change city close cold come could cut day did
different do does done down draw each early east easy eat end enough even every example eye face fall far fast father
feel few find first five food for form found four from full get give go gold good great green grow had half hand happen
hard has have he head hear heard help her here him his hold home hot hour house how hundred i idea if image in into is it
its just keep kind king know land language large last late learn leave left less let letter life light like line listen
little live long look made make man many may me mean men might mile mind miss model money month more most mother mountain
move much music must my name near need never new next night no north not note nothing now number of off often old on once
one only open or other our out over own page paper part pass people picture piece place plain play point port press put
question quick quiet quite read ready real rest right river road room round run said same saw say school sea second see
seem sentence set seven several shall she short should show side sing sit six sky sleep slow small snow so some song soon
sound south speak stand star start state stay step still stop story street strong such summer sun sure table take talk
teach tell ten than that the their them then there these they thing think this those though thought thousand three through
time to today together told too took top town travel tree true try turn twelve two under until up upon us use usual very
voice wait walk want warm was watch water way we week well went were west what when where which while white who whole why
will wind winter with without woman wonder wood word work world would write year yellow yes yet you young your adapter
answer audio bytes checkpoint device disk gather layer load memory merge placement plan quantized resident server stream
tensor tier token verify weight ing ed er est ly tion ness ment able less ful
"""
