"""Questions about trends: what they answer, as values and as text."""

import math
import pickle
import random

import pytest

from flodl.errors import ConfigError
from flodl.monitor import (
    Outlook,
    Trend,
    above,
    after_epochs,
    after_steps,
    below,
    converged,
    improving,
    no_better,
    stalled,
    worsening,
)
from flodl.monitor.conditions import QUESTIONS, Condition, parse_condition


def outlook(epochs=0, steps=0, **series):
    return Outlook({name: Trend(values, name) for name, values in series.items()}, epochs, steps)


FALLING, FLAT, RISING = [3.0, 2.0, 1.0], [1.0, 1.0005, 1.0], [1.0, 2.0, 3.0]
ANSWERS = [
    (stalled("x", 3), {"x": FALLING}, False),
    (stalled("x", 3), {"x": FLAT}, True),
    (stalled("x", 3), {"x": FLAT[:2]}, False),  # too few to tell
    (stalled("x", 3), {}, False),
    (stalled("x", 2), {"x": [9.0, *FLAT]}, True),
    (stalled("x", 3, 1.1), {"x": FALLING}, True),
    (stalled("x", 3), {"x": [math.nan] * 3}, False),
    (improving("x", 3), {"x": FALLING}, True),
    (improving("x", 3, "max"), {"x": FALLING}, False),
    (improving("x", 3, "max"), {"x": RISING}, True),
    (worsening("x", 3), {"x": RISING}, True),
    (worsening("x", 3, "max"), {"x": FALLING}, True),
    (worsening("x", 3), {"x": RISING[:1]}, False),
    (no_better("x", 2), {"x": [1.0, 0.5, 0.5, 0.6]}, True),
    (no_better("x", 2), {"x": [1.0, 0.5, 0.4, 0.6]}, False),
    (no_better("x", 2), {"x": [0.5, 0.6]}, False),
    (no_better("x", 1, "max"), {"x": [0.5, 0.5]}, True),
    (no_better("x", 1, "max"), {"x": [0.5, 0.6]}, False),
    (no_better("x", 1), {"x": [0.5, math.nan]}, True),
    (converged("x", 3, 1e-3), {"x": FLAT}, True),
    (converged("x", 3, 1e-3), {"x": FALLING}, False),
    (above("x", 0.9), {"x": [0.95, 0.8, 0.91]}, True),
    (above("x", 0.9), {"x": [0.95, 0.8]}, False),
    (below("x", 0.9), {"x": [0.95, 0.8]}, True),
    (below("x", 0.9), {}, False),
    (after_epochs(2), {"epochs": 2}, True),
    (after_epochs(2), {"epochs": 1}, False),
    (after_steps(100), {"steps": 99}, False),
    (after_steps(100), {"steps": 100}, True),
    (stalled("x", 3) & below("y", 1), {"x": FLAT, "y": [0.5]}, True),
    (stalled("x", 3) & below("y", 1), {"x": FLAT, "y": [1.5]}, False),
    (stalled("x", 3) | below("y", 1), {"x": FALLING, "y": [0.5]}, True),
    (~stalled("x", 3), {"x": FALLING}, True),
]


@pytest.mark.parametrize(("condition", "known", "answer"), ANSWERS, ids=lambda value: str(value)[:40])
def test_answers(condition, known, answer):
    now = outlook(**known)
    assert condition(now) is answer
    assert condition.why(now)
    assert parse_condition(str(condition)) == condition
    assert pickle.loads(pickle.dumps(condition)) == condition


def test_every_question_is_asked_here():
    asked = {part.word for condition, _, _ in ANSWERS for part in (condition, *condition.args) if hasattr(part, "word")}
    assert asked == {*QUESTIONS, "and", "or", "not"}


TEXTS = {
    "stalled(loss, 3)": stalled("loss", 3),
    " stalled( loss ,3,0.01 ) ": stalled("loss", 3, 0.01),
    "stalled(encoder.layers.0-3:norm, 2)": stalled("encoder.layers.0-3:norm", 2),
    "stalled(loss, 3, tolerance=1e-2)": stalled("loss", 3, 0.01),
    "no_better(dev/f1, 2, max)": no_better("dev/f1", 2, "max"),
    "no_better(name='a b', window=2)": no_better("a b", 2),
    'above("it\'s", -0.5)': above("it's", -0.5),
    "above('3', .5)": above("3", 0.5),
    "not after_epochs(2)": ~after_epochs(2),
    "above(a, 1) or above(b, 1) and above(c, 1)": above("a", 1) | (above("b", 1) & above("c", 1)),
    "(above(a, 1) or above(b, 1)) and above(c, 1)": (above("a", 1) | above("b", 1)) & above("c", 1),
    "not (above(a, 1) or above(b, 1))": ~(above("a", 1) | above("b", 1)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    found = parse_condition(text)
    assert found == TEXTS[text]
    assert parse_condition(str(found)) == found


def test_what_is_said_is_short_and_leaves_defaults_out():
    assert str(stalled("loss", 3)) == "stalled(loss, 3)"
    assert (
        str(no_better("dev/f1", 2, "max") | ~above("a b", 0.5)) == "no_better(dev/f1, 2, max) or not above('a b', 0.5)"
    )
    now = outlook(loss=[1.0, 0.5, 0.25])
    assert stalled("loss", 3).why(now) == "the slope of loss over 3 values is -0.375"
    both = below("loss", 0.3) & after_epochs(1)
    assert both.why(now) == "loss is 0.25 and 0 epochs are done"
    assert (above("loss", 1) | below("loss", 0.3)).why(now) == "loss is 0.25"
    assert both.names == ["loss"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found the end; expected one of stalled"),
        ("stall(loss, 3)", "did you mean 'stalled'"),
        ("stalled(loss, 3", "found the end; expected ',' or ')'"),
        ("stalled(loss, 3) 4", "found '4' at 18; expected the end, or 'and' or 'or'"),
        ("stalled(loss, 3) and", "found the end; expected one of"),
        ("stalled(loss)", "window is missing"),
        ("stalled(loss, 1)", "found 1 for window; expected an integer from 2"),
        ("stalled(loss, 2.5)", "expected an integer"),
        ("stalled(loss, 3, 0)", "expected more than 0"),
        ("stalled(loss, 3, 1, 2)", "takes 3 arguments"),
        ("stalled(loss, 3, windw=2)", "no argument 'windw'"),
        ("stalled(loss, 3, window=2)", "window is given twice"),
        ("stalled(window=3, loss)", "after an argument by name"),
        ("improving(f1, 3, maximum)", "expected min or max"),
        ("above(loss, high)", "found 'high' for value; expected a number"),
        ("above('loss, 1)", "a quote that does not end"),
        ("above(3, 1)", "expected the name of a figure"),
        ("import os", "found 'import' at 1"),
        ("__import__('os').system('true')", "expected one of stalled"),
        ("(" * 60 + "above(a, 1)" + ")" * 60, "fewer brackets"),
    ],
)
def test_texts_that_say_nothing_are_refused_with_the_place(text, part):
    with pytest.raises(ConfigError) as caught:
        parse_condition(text)
    assert part in str(caught.value)
    assert caught.value.problems


def test_conditions_that_cannot_be_are_refused_in_python_too():
    for wrong in (
        lambda: stalled("", 3),
        lambda: stalled("loss", 3, -1),
        lambda: after_epochs(0),
        lambda: above("a", math.nan),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_any_condition_is_read_back_from_what_it_says():
    draw = random.Random(5)
    leaves = [condition for condition, _, _ in ANSWERS if condition.word in QUESTIONS]

    def made(depth):
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(leaves)
        word = draw.choice(["and", "or", "not"])
        return Condition(word, tuple(made(depth - 1) for _ in range(1 if word == "not" else draw.randint(2, 3))))

    def flat(condition):
        """Answers do not depend on how brackets of one word are set."""
        return [condition(outlook(x=values, y=[0.5], epochs=1, steps=100)) for values in (FALLING, FLAT, RISING, [])]

    for _ in range(200):
        condition = made(4)
        assert flat(parse_condition(str(condition))) == flat(condition)
