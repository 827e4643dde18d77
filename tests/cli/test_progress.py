"""Progress on a terminal and in a log, and the Ctrl-C that lets a step finish."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from h3compile.cli.interrupt import stop_between_steps
from h3compile.cli.progress import Bars, Lines, shown
from h3compile.progress import Progress


def work(progress: Progress) -> None:
    progress.phase("trace", None)
    progress.advance()
    progress.phase("lower", 3)
    progress.advance(2)
    progress.note("the [b]target[/b] is not here")
    progress.advance()


def test_a_log_gets_one_line_a_phase_and_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(Console(file=io.StringIO(), force_terminal=False)) as progress:
        assert isinstance(progress, Lines)
        work(progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("s] ")[1] for line in err.splitlines()] == [
        "trace",
        "lower (3)",
        "the [b]target[/b] is not here",
    ]
    assert "\x1b" not in err


def test_a_terminal_gets_bars_that_end_full() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, legacy_windows=False)
    with shown(console) as progress:
        assert isinstance(progress, Bars)
        work(progress)
    text = screen.getvalue()
    assert "1/1" in text and "3/3" in text
    assert "the [b]target[/b] is not here" in text


def test_bars_are_taken_down_when_the_work_fails() -> None:
    screen = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        shown(Console(file=screen, force_terminal=True, width=100)) as progress,
    ):
        progress.phase("lower", 3)
        raise KeyboardInterrupt
    assert screen.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor must be shown again"


def test_the_first_interrupt_waits_and_the_second_does_not() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_between_steps(said.append) as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        assert said == ["stopping after this step; Ctrl-C again stops at once"]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
