"""How the command line speaks: errors in one sentence with the remedy, tables for people, JSON for programs."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from control.cli.text import escape, escape_json, escape_line

if TYPE_CHECKING:
    from rich.table import Table

    from control.client import ControlClient

T = TypeVar("T")

# docker-run(1): the daemon itself failed, as opposed to the command.
EXIT_HOST: Final = 125
EXIT_FAILED: Final = 1


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print one sentence and exit."""
    print(f"opificia: {escape(message)}", file=sys.stderr)
    raise SystemExit(code)


def as_json(value: object) -> None:
    """Print a value as one line of JSON, in which nothing steers the terminal that it may be shown on."""
    import msgspec

    sys.stdout.buffer.write(escape_json(msgspec.json.encode(value)) + b"\n")
    sys.stdout.buffer.flush()


def with_client(work: Callable[["ControlClient"], Coroutine[Any, Any, T]], code: int = EXIT_FAILED) -> T:
    """Run `work` with a client of the daemon, and say in one sentence what went wrong."""
    from control.client import DEFAULT_ADDRESS, ControlClient, ControlError, ControlUnavailableError

    async def run() -> T:
        address = os.environ.get("OPIFICIA_CONTROL", DEFAULT_ADDRESS)
        async with ControlClient(address, os.environ.get("OPIFICIA_CONTROL_TOKEN", "")) as client:
            return await work(client)

    try:
        return asyncio.run(run())
    except ExceptionGroup as group:
        # Of tasks that failed together, the first says why.
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
    except (ControlError, ControlUnavailableError, BrokenPipeError) as single:
        error = single
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    match error:
        case ControlError():
            remedy = f" ({error.problem.remedy})" if error.problem.remedy else ""
            lines = "".join(f"\n  {line}" for line in error.problem.problems)
            fail(f"{error.problem.detail}{remedy}{lines}", code)
        case ControlUnavailableError():
            fail(
                f"{error}; is opificia-control running, are you in its socket's group, is OPIFICIA_CONTROL right?",
                code,
            )
        case BrokenPipeError():
            # `opificia logs | head` is no error. Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(0)
        case _:
            raise error


def table(*columns: str) -> "Table":
    """Return an empty table in the house style."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        # The first tells the rows apart and is what people copy.
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    return made


def cell(text: str) -> str:
    """Return text for a cell of a table: one line, and not markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(escape_line(text))


def show(made: "Table") -> None:
    """Print a table."""
    from rich.console import Console

    # Where no person looks, a line stays a line.
    Console(highlight=False, width=None if sys.stdout.isatty() else 1_000).print(made)
