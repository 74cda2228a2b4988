"""What every command does alike: report faults, print JSON, show progress, and name common options."""

from __future__ import annotations

import atexit
import errno
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer

from flodl.errors import DataError, FlodlError, TrainInterrupted, printable, visible
from flodl.progress import worded
from flodl.verbosity import Verbosity, verbosity
from flodl_hf.checkpoints.folders import expect_file, expect_writable
from flodl_hf.checkpoints.hub.download import expect_place
from flodl_hf.cli.command import begun_with_options, in_options, option_names

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def reporting(command: Callable[P, R]) -> Callable[P, R]:
    """Return ``command`` with our errors and file errors as one message on stderr and status 1, and Ctrl-C as 130.

    Messages name options as the command line does.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings(), worded(partial(in_options, options=option_names(command))):
            warnings.showwarning = partial(_warn, command)
            try:
                check_places(command.__module__.rpartition(".")[2], kwargs)
                return command(*args, **kwargs)
            except FlodlError as fault:
                _failed(command, type(fault).__name__, str(fault), bool(kwargs.get("json_output")))
            except KeyboardInterrupt as fault:
                if not isinstance(fault, TrainInterrupted):  # which is reported where it is raised
                    say("interrupted", always=True)
                raise typer.Exit(130) from None
            except BrokenPipeError:
                # The reader of our output has seen enough.
                sys.stderr.close()
                raise typer.Exit(0) from None
            except OSError as fault:
                if fault.filename is None and fault.errno not in NO_ROOM:
                    raise
                reason = fault.strerror or type(fault).__name__
                # The system names no file where a write fails that had been opened.
                named = fault.filename is not None
                file = printable(str(fault.filename), 400) if named else "standard output, or a file that is written"
                text = f"{file}: {reason}"
                _failed(command, "OSError", text, bool(kwargs.get("json_output")))

    return run


def _failed(command: Callable[..., Any], kind: str, text: str, json_output: bool) -> NoReturn:
    options = option_names(command)
    text = in_options(begun_with_options(text, options) if kind == "ConfigError" else text, options)
    if json_output:
        with suppress(OSError):  # where writing it is what failed
            emit_json({"error": kind, "message": text})
    if kind == "OSError":
        lost()
    say(f"{kind}: {text}", always=True, fg="red")
    raise typer.Exit(1) from None


def _warn(command: Callable[..., Any], message: Warning | str, category: type[Warning], *_: Any) -> None:
    say(f"warning: {in_options(str(message), option_names(command))}", always=True, fg="yellow")


def plain(value: Any) -> Any:
    """Return dataclasses and tuples as JSON types."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def emit_json(value: Any) -> None:
    """Print ``value`` as one JSON document on stdout."""
    typer.echo(as_json(value, indent=2))


def emit(value: Any, text: str, json_output: bool) -> None:
    """Print a result on stdout: ``value`` as JSON, or a text."""
    if json_output:
        emit_json(value)
    else:
        tell(text)


def as_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON without a character that moves a terminal or that none can be sent."""
    text = json.dumps(plain(value), ensure_ascii=False, indent=indent)
    text = text if encodable(text) else json.dumps(plain(value), indent=indent)
    return visible(text, "\\u{:04x}")


def tell(text: str, **style: Any) -> None:
    """Print a result on stdout with control characters escaped.

    Args:
        text: one line or several.
        **style: colours as of ``typer.style``, where stdout is a terminal that has them.
    """
    typer.echo(painted(visible(text), sys.stdout, **style))


def say_timing(phases: Mapping[str, float]) -> None:
    """Print the seconds of phases now, and those of the exit at the end of the process; on the first rank only."""
    from flodl.distributed.group import is_first_rank

    if not is_first_rank():
        return
    say("seconds: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()), always=True)
    ended = time.perf_counter()
    atexit.register(lambda: say(f"exit: {time.perf_counter() - ended:.1f} seconds", always=True))


def say(text: str, *, always: bool = False, **style: Any) -> None:
    """Print a line of progress on stderr, unless output is quiet; arguments as for `tell`.

    Args:
        text: one line or several.
        always: print even in quiet mode: faults and warnings.
        **style: colours.
    """
    if not always and verbosity() == Verbosity.QUIET:
        return
    try:
        typer.echo(painted(visible(text), sys.stderr, **style), err=True)
    except OSError as fault:
        if fault.errno not in NO_ROOM:  # a line of progress that has no room ends no work
            raise


def stdin_lines() -> Iterator[str]:
    """Yield the lines of standard input, always decoded as UTF-8, unless it is a terminal.

    Raises:
        DataError: a line is not UTF-8.
    """
    if sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as fault:
            raise DataError(
                f"standard input, line {number}: byte 0x{line[fault.start]:02x} at position {fault.start + 1}; "
                "expected UTF-8 text. Convert it first, for example with iconv -f LATIN1 -t UTF-8."
            ) from None
        yield text.rstrip("\r\n")


def painted(text: str, stream: Any, **style: Any) -> str:
    """Return ``text`` with colours if the terminal supports them and they are not disabled (https://no-color.org)."""
    plain_wanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain_wanted or not style else typer.style(text, **style)


def device_said(name: str) -> str:
    """Return the device that a command runs on, and print it on stderr.

    Under a launcher of several processes "auto" is the device of this one, and only the first one prints.

    Raises:
        DeviceError: the device does not exist.
    """
    from flodl.devices import described, find_device, pick_device

    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    found = pick_device(None, local) if name == "auto" and "LOCAL_RANK" in os.environ else find_device(name)
    if rank == 0:
        say(f"on {described(found)}")
    return str(found)


def training_said(devices: Any) -> None:
    """Print the devices of a training run with the option ``devices``.

    Raises:
        DeviceError: a device does not exist.
    """
    from flodl.devices import cuda_count, described, find_device, pick_device, training_devices

    places, local = training_devices(devices), int(os.environ.get("LOCAL_RANK", 0))
    if places is None:
        found = [pick_device(None, local)]
    elif isinstance(places, int):
        found = [pick_device(None, rank) for rank in range(places)]
    else:
        found = [find_device(place) for place in ([places] if isinstance(places, str) else places)]
    names = [described(device) for device in found]
    counted = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    idle = cuda_count() - len(set(names)) if found[0].type == "cuda" and "LOCAL_RANK" not in os.environ else 0
    say(f"training on {', '.join(counted)}" + (f"; {idle} more idle, --devices auto takes all" if idle > 0 else ""))


def progress() -> Any:
    """Return a rich progress display on stderr, hidden where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Faults of a write that Python reports without a file's name."""


def opened() -> None:
    """Replace closed streams with empty ones, and escape characters that a stream cannot encode.

    A closed stream's descriptor would be reused for the next opened file, and printed text would end up in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, os.O_RDWR)
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        # Streams from notebooks and tests handle their own encoding.
        again = getattr(stream, "reconfigure", None)
        if again is not None and stream.errors == "strict":
            again(errors="backslashreplace")


def encodable(text: str) -> bool:
    """Return whether standard output has every character of ``text``."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def lost() -> None:
    """Discard unwritten standard output after a failed write, so that Python's exit does not fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


MODEL, ROWS, FILE, FOLDER, TEXTS = "model", "rows", "file", "folder", "texts"

_LONGEST_NAME = 4096

PLACES: Mapping[str, Mapping[str, str]] = {
    "prediction": {"model": MODEL, "text": TEXTS, "source": ROWS, "out": FILE},
    "encode": {"model": MODEL, "source": ROWS, "out": FILE},
    "search": {"model": MODEL, "query": TEXTS, "corpus": ROWS, "vectors": ROWS},
    "mine": {"model": MODEL, "source": ROWS, "corpus": ROWS, "out": FILE},
    "training": {"model": MODEL, "train": ROWS, "eval": ROWS, "out": FOLDER},
    "evaluation": {"model": MODEL, "data": ROWS},
    "inspect": {"model": MODEL},
    "export": {"out": FOLDER},
    "convert": {"model": MODEL, "out": FOLDER},
    "merge": {"base": MODEL, "adapter": MODEL, "out": FOLDER},
}
"""Of each command, what its parameters name: a model, a file of rows, a file or a folder that is written, or texts.

"training" is what finetune's command line and recipe contain together, "prediction" and "evaluation" the arguments of
those commands after they were checked against each other. `serve` looks at its models by itself.
"""


def check_places(command: str, arguments: Mapping[str, Any]) -> None:
    """Refuse missing paths and outputs that cannot be written; without reading files or using the network.

    Args:
        command: a name of `PLACES`; other commands are not checked.
        arguments: the command's arguments, by parameter.

    Raises:
        HubError: a model is a path that does not exist.
        DataError: a file of rows is absent, an output cannot be written, or a text is the name of a file.
    """
    for name, kind in PLACES.get(command, {}).items():
        value = arguments.get(name)
        if kind == TEXTS:
            _expect_texts(value or ())
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or os.fspath(value) == "-":
            continue
        if kind == MODEL:
            expect_place(value)
        elif kind == ROWS:
            expect_file(value)
        elif kind == FOLDER or os.path.isdir(os.path.dirname(os.path.abspath(value))):
            expect_writable(value)
        else:
            raise DataError(f"{value}: its folder does not exist; make it first", path=str(value))


def _expect_texts(texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) < _LONGEST_NAME and "\0" not in text and os.path.isfile(text):
            raise DataError(
                f"{printable(text, 400)}: found the name of a file, expected a text. To predict from its rows, use "
                f"--in {shlex.quote(text)} --out FILE; each line of standard input is a text, whatever it contains.",
                path=text,
            )
