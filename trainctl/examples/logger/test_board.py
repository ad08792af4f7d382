"""Test of the logger: what it writes after a rewind, and in a second process."""

from pathlib import Path

from trainctl.config.registry import function_of, load_spec, trust_folder
from trainctl.config.schema import RunConfig
from trainctl.options.logger import FollowedRun, Point

trust_folder(Path(__file__).parents[1] / "options")


def point(step: int, loss: float) -> Point:
    return Point(number=step, kind="step", step=step, time=0.0, values={"train/loss": loss})


def test_the_board(tmp_path: Path) -> None:
    keys = load_spec("logger", "board").keys(digits=1)
    run = FollowedRun(folder=tmp_path, id="1", name="run", keys=keys, config=RunConfig())
    first = function_of("logger", "board")(run, None)
    first.write([point(1, 4.0), point(2, 3.0)])
    state = first.commit()
    first.close()
    second = function_of("logger", "board")(run, state)
    second.go_back(2)
    second.write([point(2, 2.5)])
    second.commit()
    assert (tmp_path / "board.txt").read_text() == "1 4.0\n2 2.5\n"
