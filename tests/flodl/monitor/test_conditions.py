"""Conditions on trends: their results, their text form, and invalid ones."""

import math
import pickle

import pytest

from flodl.errors import ConfigError
from flodl.monitor import (
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
from flodl.monitor.conditions import RuleContext, parse_condition
from flodl.monitor.trend import Trend


def context(epochs=0, steps=0, **series):
    return RuleContext({name: Trend(values, name) for name, values in series.items()}, epochs, steps)


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
    now = context(**known)
    assert condition(now) is answer
    assert not answer or condition.why(now)
    assert parse_condition(str(condition)) == condition
    assert pickle.loads(pickle.dumps(condition)) == condition


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
    "(above(a, 1) or above(b, 1)) and above(c, 1)": (above("a", 1) | above("b", 1)) & above("c", 1),
    "above(a, 1) or above(b, 1) and above(c, 1)": above("a", 1) | (above("b", 1) & above("c", 1)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    found = parse_condition(text)
    assert found == TEXTS[text]
    assert parse_condition(str(found)) == found


def test_the_text_omits_defaults_and_the_reason_has_the_values():
    assert str(stalled("loss", 3)) == "stalled(loss, 3)"
    assert (
        str(no_better("dev/f1", 2, "max") | ~above("a b", 0.5)) == "no_better(dev/f1, 2, max) or not above('a b', 0.5)"
    )
    assert str((above("a", 1) | above("b", 1)) & above("c", 1)) == "(above(a, 1) or above(b, 1)) and above(c, 1)"
    assert str(~(above("a", 1) | above("b", 1))) == "not (above(a, 1) or above(b, 1))"
    now = context(epochs=1, loss=[1.0, 0.5, 0.25])
    both = below("loss", 0.3) & after_epochs(1)
    assert both.why(now) == "loss is 0.25 and 1 epochs are done"
    assert (above("loss", 1) | below("loss", 0.3)).why(now) == "loss is 0.25"
    assert (above("other", 1) | after_epochs(1)).why(now) == "1 epochs are done"
    assert both.renamed({"loss": "dev/loss"}) == below("dev/loss", 0.3) & after_epochs(1)
    assert both.names == ["loss"]


TEXTS_WITH_FAULTS = [
    "",
    "stall(loss, 3)",
    "stalled(loss, 3",
    "stalled(loss, 3) 4",
    "stalled(loss, 3) and",
    "and stalled(loss, 3)",
    "stalled(loss, 3) above(loss, 1)",
    "stalled(loss)",
    "stalled(loss, 1)",
    "stalled(loss, 2.5)",
    "stalled(loss, 3, 0)",
    "stalled(loss, 3, 1, 2)",
    "stalled(loss, 3, windw=2)",
    "stalled(loss, 3, window=2)",
    "improving(f1, 3, maximum)",
    "above(loss, high)",
    "above('loss, 1)",
    "above(3, 1)",
    "import os",
    "__import__('os').system('true')",
    "above(a, 1) if above(b, 1) else above(c, 1)",
    "above(*a)",
]


@pytest.mark.parametrize("text", TEXTS_WITH_FAULTS)
def test_texts_that_are_no_condition_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_condition(text)
    assert caught.value.problems


def test_invalid_arguments_are_refused_in_python_too():
    for wrong in (
        lambda: stalled("", 3),
        lambda: stalled("loss", 3, -1),
        lambda: after_epochs(0),
        lambda: above("a", math.nan),
    ):
        with pytest.raises(ConfigError):
            wrong()
