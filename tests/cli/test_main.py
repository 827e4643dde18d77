"""How commands end: exit codes, one line, and no traceback unless asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from h3compile import __version__
from h3compile.cli.command import Command
from h3compile.errors import EngineError, H3CompileError, Interrupted

COMMANDS = ("build", "run", "calibrate", "inspect", "finalize", "passes", "targets", "tiny", "doctor")


def shell(*arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from h3compile.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def planted(error: BaseException, *options: str) -> Result:
    """What a command does that raises ``error``."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.callback()
    def top(debug: bool = False) -> None:
        pass

    @app.command("work", cls=Command)
    def work() -> None:
        raise error

    return CliRunner().invoke(app, [*options, "work"])


def test_an_error_is_one_line_with_its_mend() -> None:
    done = planted(EngineError("the engine\nis damaged", "build it again"))
    assert (done.exit_code, done.stderr) == (1, "error: the engine is damaged: build it again\n")
    assert done.stdout == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped after step 3")])
def test_an_interrupt_says_so(error: BaseException) -> None:
    done = planted(error)
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_a_bug_is_one_line_that_says_how_to_see_more() -> None:
    done = planted(ZeroDivisionError("division\nby zero"))
    assert done.exit_code == 2
    assert done.stderr == (
        "bug: ZeroDivisionError: division by zero "
        "(h3compile --debug work ... shows the traceback; please report it)\n"
    )


@pytest.mark.parametrize("error", [H3CompileError("cause"), KeyError("x"), KeyboardInterrupt()])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(error: BaseException) -> None:
    done = planted(error, "--debug")
    assert done.exit_code == planted(error).exit_code
    assert done.stderr.startswith("Traceback")


def test_the_exit_code_a_command_chooses_is_kept() -> None:
    assert planted(typer.Exit(7)).exit_code == 7


def test_the_real_command_fails_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.h3e"
    done = shell("inspect", str(missing), code=1)
    assert done.stderr == f"error: there is no engine at {missing}: build one with h3compile build\n"
    assert done.stdout == ""
    assert "Traceback" in shell("--debug", "inspect", str(missing), code=1).stderr


def test_what_cannot_be_parsed_is_said_by_the_parser() -> None:
    assert "No such command 'biuld'" in shell("biuld", code=2).stderr
    assert "No such option: --taget" in shell("build", "--taget", "h200", code=2).stderr


def test_version_and_help_do_not_import_torch() -> None:
    assert shell("--version", code=0).stdout == f"h3compile {__version__}\n"
    code = (
        "import sys; from h3compile.cli.main import application\n"
        "try: application()(['build', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_every_command_explains_itself_and_shows_examples(h3compile) -> None:  # type: ignore[no-untyped-def]
    listed = h3compile("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        text = h3compile(name, "--help").stdout
        assert f"\n    h3compile {name}" in text, name
    assert "..." not in listed.split("Commands:")[1], "a summary is too long to be shown whole"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_and_cleans_up(
    tmp_path: Path, number: signal.Signals, hears_interrupts: Callable[[], None]
) -> None:
    # A real command, with its slow part replaced: it holds a partial file while it sleeps.
    code = f"""
import pathlib, time
from h3compile.cli import doctor, main
def slow():
    partial = pathlib.Path({str(tmp_path / "partial")!r})
    try:
        partial.touch()
        time.sleep(60)
    finally:
        partial.unlink()
doctor.all_checks = slow
main.main()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, "doctor"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "partial").exists():
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.02)
        os.kill(child.pid, number)
        _, stderr = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, stderr) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []
