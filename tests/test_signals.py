"""Signals end the command as the reference says, from its first import on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

DURING = """
import os, runpy, sys
from importlib import abc

class Sent(abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {signum})

sys.meta_path.insert(0, Sent())
sys.argv = ["growkit", "recipes", "list"]
runpy.run_module("growkit", run_name="__main__")
"""
"""growkit, to which a signal is sent while it imports a module."""

HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""As Python begins, unless it runs in the background."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "module", ["growkit.cli.commands", "typer", "growkit.model.families.family_yaml"]
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_imports_are_ended_without_a_traceback(module: str, signum: signal.Signals) -> None:
    done = ended(HEEDING + DURING.format(module=module, signum=int(signum)))
    assert done.returncode == 128 + signum
    said = "interrupted: nothing half-written is left\n"
    assert (done.stdout, done.stderr) == ("", said if signum == signal.SIGINT else "")


def test_what_is_ignored_stays_ignored() -> None:
    """As under ``nohup``; the control, since the command runs to its end."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program = DURING.format(module="typer", signum=int(signal.SIGINT))
    done = ended(ignoring + program)
    assert done.returncode == 0, done.stderr
    assert "hypercloning-x2" in done.stdout


def test_the_command_that_is_installed_begins_there() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    assert '\ngrowkit = "growkit.__main__:main"\n' in project
    code = "import sys, growkit.__main__ as entry; print(callable(entry.main), *sys.modules)"
    known, *modules = ended(code).stdout.split()
    assert known == "True"
    assert not {"growkit.cli.commands", "growkit.planning.recipe", "typer", "rich"} & {*modules}


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
