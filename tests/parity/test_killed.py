"""A training that is killed over and over ends bit by bit as one that nobody killed."""

import random
from pathlib import Path

import pytest

from tests.helpers.killed.deaths import ANY_RANK, PHASES
from tests.helpers.killed.life import Life
from tests.helpers.killed.witness import die_at_random, die_in, live_on, undisturbed

STEPS = 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """`benchmarks/kills.py` does it fifty times, with scripts, and a parent that dies first."""
    witness = undisturbed(tmp_path / "straight", STEPS)
    run, newest, draw = tmp_path / "run", 0, random.Random(2)
    run.mkdir()
    for kill in range(2):
        life = Life(folder=str(run), steps=STEPS, asynchronous=kill == 0)
        newest = die_at_random(witness, life, newest, draw, script=False, progress=4)
    places = [(phase, 0) for phase in PHASES] + [(ANY_RANK, 1)]
    for number, (phase, rank) in enumerate(places):
        life = Life(
            folder=str(run), steps=STEPS, phase=phase, rank=rank, at=0, asynchronous=number % 2 == 0
        )
        newest = die_in(witness, life, newest, script=False)
    live_on(witness, Life(folder=str(run), steps=STEPS), newest, script=False)
    tally = witness.tally
    assert tally.is_clean, f"{tally}\n{(run / 'said').read_text()[-2000:]}"
    assert tally.deaths >= len(PHASES)
    assert tally.steps > STEPS
