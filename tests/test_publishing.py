"""Nothing that is read, and nothing that growkit did not make, is replaced; outputs are whole."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit import InputError
from growkit.base import limits
from growkit.engine import device
from growkit.model.checkpoint import publishing
from growkit.report import saving
from tests.commands import cli
from tests.faults import ANYWHERE, PUBLISHING, World, in_child, without_exchange
from tests.files import flip_bit, folder_bytes
from tests.models import save_model, seeded

QUICK = growkit.Settings(prompts=1, length=8)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


@pytest.fixture
def source(place: Path) -> Path:
    return save_model(place / "source", "llama")


@pytest.fixture
def out(source: Path) -> Path:
    grow(source, source.parent / "out")
    return source.parent / "out"


def grow(source: Path, out: Path, **options: Any) -> Any:
    return growkit.grow(source, out, hidden="x2", **{"verify": False, **options})


def refused(work: Callable[[], Any], place: Path) -> str:
    """The sentence with which something is refused that leaves every byte as it was."""
    before = folder_bytes(place)
    with pytest.raises(InputError) as error:
        work()
    assert folder_bytes(place) == before
    return str(error.value)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def break_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRICT_MARGIN", 0.0)


class TestWhatIsRead:
    def test_a_rejected_output_as_the_source(
        self, source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        break_promises(monkeypatch)
        grow(source, place / "new", verify=QUICK)
        rejected = place / "new.rejected"
        assert "overlap" in refused(lambda: grow(rejected, place / "new", verify=QUICK), place)
        grow(source, place / "new", verify=QUICK, seed=1)  # an earlier one that nobody reads
        assert names(place) == ["new.rejected", "source"]

    @pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
    def test_a_source_whose_files_are_those_of_the_output(
        self, link: Callable[[Path, Path], None], source: Path, out: Path
    ) -> None:
        other = out.parent / "other"
        other.mkdir()
        for file in out.iterdir():
            link(file, other / file.name)
        refused(lambda: grow(other, out, overwrite=True), out.parent)

    @pytest.mark.parametrize(
        ("name", "replaced"),
        [("config.json", True), ("generation_config.json", False), ("model.safetensors", True)],
    )
    def test_a_source_that_changes_meanwhile(
        self, name: str, replaced: bool, source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the file has its size and its date again."""
        file, other = source / name, place.parent / name

        def edit() -> None:
            """Right before the first tensor is read, perhaps after the file was hashed."""
            status = file.stat()
            content = bytearray(file.read_bytes())
            content[-2:] = content[:1:-1][-2:]
            other.write_bytes(content)
            os.replace(other, file) if replaced else file.write_bytes(content)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

        monkeypatch.setattr(device, "check_subnormal_numbers", edit)
        with pytest.raises(InputError, match=rf"{name} (was|has) changed while"):
            grow(source, place / "out")
        assert names(place) == ["source"]


class TestWhatGrowkitDidNotMake:
    @pytest.mark.parametrize("name", ["model.safetensors", "growkit.json", "README.md"])
    def test_one_byte_of_the_same_date(self, name: str, source: Path, out: Path) -> None:
        file = out / name
        status = file.stat()
        content = file.read_bytes()
        at = content.index(b"hypercloning") if name != "model.safetensors" else len(content) - 1
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert "changed" in refused(lambda: grow(source, out, overwrite=True), out.parent)

    def test_a_sound_output_called_rejected(
        self, source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grow(source, place / "new.rejected")
        break_promises(monkeypatch)
        sentence = refused(lambda: grow(source, place / "new", verify=QUICK), place)
        assert "new.rejected" in sentence

    def test_hard_links_keep_their_bytes(self, source: Path, out: Path) -> None:
        first = folder_bytes(out)
        other = out.with_name("other")
        shutil.copytree(out, other, copy_function=os.link)
        grow(source, out, overwrite=True, seed=1)
        assert folder_bytes(other) == first != folder_bytes(out)

    @pytest.mark.parametrize("exchanging", [True, False])
    def test_what_is_added_while_the_work_is_done(
        self, exchanging: bool, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also at the very last moment, when names are exchanged."""
        if not exchanging:
            monkeypatch.setattr(publishing, "_renameat2", lambda *arguments: False)
        first = folder_bytes(out)
        real, looks = publishing.contents, iter(range(10))

        def contents(folder: Path) -> Any:
            found = real(folder)
            if next(looks) == 1:  # the one before names are exchanged
                (out / "mine.txt").write_text("the only copy")
            return found

        monkeypatch.setattr(publishing, "contents", contents)
        with pytest.raises(InputError, match="in the meantime"):
            grow(source, out, overwrite=True, seed=1)
        assert folder_bytes(out) == {**first, "mine.txt": b"the only copy"}
        assert names(out.parent) == ["out", "source"]


def test_earlier_reports_are_replaced(source: Path, place: Path) -> None:
    copy = shutil.copytree(source, place / "copy")
    pair = ("verify", source, copy, "--prompts", 1, "--length", 8)
    for file in ("report.html", "report.json", "report.md"):
        for _ in range(2):
            result = cli(*pair, "--report", place / file)
            assert result.exit_code == 0, result.output
        os.link(place / file, place / f"kept-{file}")
        (place / file).write_text("mine")  # another file by now: also the other name's
        before = folder_bytes(place)
        assert cli(*pair, "--report", place / file).exit_code == 2
        assert folder_bytes(place) == before


@pytest.mark.parametrize("name", ["out.partial-00000000", "out.earlier-00000000"])
def test_what_another_run_left_is_named_and_stays(
    name: str, source: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = ["out.partial-mine", "out2.partial-00000000", "out.backup-00000000"]
    for folder in (name, *others):
        (place / folder).mkdir()
        (place / folder / "notes.txt").write_text("mine")
    grow(source, place / "out")
    assert names(place) == sorted(["out", "source", name, *others])
    assert (place / name / "notes.txt").read_text() == "mine"
    (warning,) = (each.getMessage() for each in caplog.records)
    assert warning.startswith(f"{place / name} was left by a run that was killed")


class TestOrder:
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_data_is_on_the_disk_before_names(
        self, overwrite: bool, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not overwrite:
            shutil.rmtree(out)
        flushed: list[int] = []
        named: list[tuple[set[int], int]] = []
        real, rename = os.fsync, publishing._renameat2

        def fsync(descriptor: int) -> None:
            flushed.append(os.fstat(descriptor).st_ino)
            real(descriptor)

        def renamed(source: Path, target: Path, flags: int) -> bool:
            inodes = {path.stat().st_ino for path in (source, *source.rglob("*"))}
            named.append((inodes, len(flushed)))
            return rename(source, target, flags)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(publishing, "_renameat2", renamed)
        grow(source, out, overwrite=overwrite, seed=1)
        ((written, before),) = named
        assert len(written) > 4
        assert written <= set(flushed[:before])
        assert flushed[before:] == [out.parent.stat().st_ino]


CLOSED = {
    "pipe": "set -o pipefail; {command} | head -c 0",
    "stdout": "{command} >&-",
    "all": "{command} <&- >&- 2>&-",
    "full": "{command} >/dev/full 2>/dev/full",
}


def test_a_closed_output_changes_no_verdict(out: Path) -> None:
    flip_bit(out / "model.safetensors")
    assert ended("stdout", f"check {out}") == 1


@pytest.mark.sampled(0)
@pytest.mark.parametrize("how", CLOSED)
@pytest.mark.parametrize("arguments", ["inspect {}", "recipes list", "--help", "inspect {}/no"])
def test_a_result_that_can_only_be_read_is_printed_or_missed(
    how: str, arguments: str, source: Path
) -> None:
    """That a reader leaves is the reader's choice, as with ``head``."""
    expected = 2 if "/no" in arguments or how != "pipe" else 0
    assert ended(how, arguments.format(source)) == expected


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("flag", "code", "kind"), [("", 0, "warning"), ("--json", 2, "error")])
def test_a_growth_that_cannot_be_shown_has_done_its_work(
    flag: str, code: int, kind: str, source: Path, place: Path
) -> None:
    """A program that reads JSON must learn that it got none."""
    grow_it = f"{sys.executable} -m growkit grow {source} {place / 'out'} --hidden x2 --no-verify"
    done = subprocess.run(["bash", "-c", f"{grow_it} {flag} >/dev/full"], stderr=-1, text=True)
    said = done.stderr.partition(" (")[0]
    assert (done.returncode, said) == (code, f"{kind}: the result cannot be printed")
    assert (place / "out" / "growkit.json").exists()


def ended(how: str, arguments: str) -> int:
    command = CLOSED[how].format(command=f"{sys.executable} -m growkit {arguments}")
    done = subprocess.run(["bash", "-c", command], stderr=-1, text=True)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("kills"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(300))
def test_kills(seed: int, world: World) -> None:
    chance, where = seeded(seed), (PUBLISHING, ANYWHERE)[seed % 2]
    overwrite = where == PUBLISHING or chance.random() < 0.6
    world.kill(where, overwrite, chance.random() < 0.7, chance.random())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(300))
def test_errors(seed: int, world: World) -> None:
    world.fail(seeded(seed))


def test_the_harness_sees_what_is_half_written(tmp_path: Path) -> None:
    """Controls: a changed source, a torn output, a lost one."""
    world = World(tmp_path)
    world.reset(overwrite=True)
    assert world.state() == "old"
    weights = world.out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(AssertionError):
        world.state()
    world.reset(overwrite=False)
    assert world.state() == "none"
    (world.source / "config.json").write_text("{}")
    with pytest.raises(AssertionError, match="source"):
        world.state()


def test_a_kill_between_two_renames(tmp_path: Path) -> None:
    """Without an exchange of names, an output has another name for a moment."""
    world = World(tmp_path)
    world.reset(overwrite=True)

    def hook(name: str, after: bool, about: object) -> None:
        if name == "rename" and after:
            os.kill(os.getpid(), signal.SIGKILL)

    in_child(without_exchange(lambda: world.grow(1)), hook, PUBLISHING)
    assert world.state() == "none"
    world.check_earlier()
    world.check_next_run()


def test_a_full_disk_leaves_the_earlier_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    saving.write_whole(report, "earlier")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "flush", full)
    with pytest.raises(InputError, match="since the disk filled up"):
        saving.write_whole(report, "later")
    assert folder_bytes(tmp_path) == {"report.json": b"earlier"}
