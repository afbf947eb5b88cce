"""Settings from a TOML file, and other plain data, into frozen msgspec structs, with every problem in one report.

It decides what is wrong with the shape; what the settings mean is the daemons' business. A problem names the key, its
line where it comes from a file, and what was expected.
"""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

# sysexits.h: EX_CONFIG, "something was found in an unconfigured or misconfigured state".
EXIT_CONFIG: Final = 78
MAX_FILE_BYTES: Final = 16 * 1024 * 1024

Settings = TypeVar("Settings", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the dotted key, its line (None when the key is absent), and a sentence."""

    key: str
    line: int | None
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


class SettingsError(Exception):
    """The file cannot be used; `problems` holds all that is wrong with it."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of settings that checks itself: one ValueError, a line for each problem."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return every problem as `setting: sentence`."""
        return []


def load(path: Path, kind: type[Settings]) -> Settings:
    """Read the TOML file at `path` as a `kind`. Raises SettingsError with every problem."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(str(path), [Problem("", None, f"cannot be read: {error.strerror}")]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise SettingsError(str(path), [Problem("", None, f"is larger than {MAX_FILE_BYTES} bytes")])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(str(path), [Problem("", None, f"is not UTF-8: byte {error.start}")]) from error
    return parse(text, kind, str(path))


def parse(text: str, kind: type[Settings], source: str = "settings") -> Settings:
    """Read TOML `text` as a `kind`. Raises SettingsError with every problem."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(source, [Problem("", None, f"is not TOML: {error}")]) from error
    reader = _Reader(_key_lines(text))
    value = reader.struct("", data, kind)
    if reader.problems:
        raise SettingsError(source, sorted(reader.problems, key=lambda problem: problem.line or 0))
    assert isinstance(value, kind)
    return value


def convert(data: object, kind: type[Settings], source: str = "body") -> Settings:
    """Take what was decoded from JSON as a `kind`. Raises SettingsError with every problem; none has a line."""
    reader = _Reader({}, "an object")
    value = reader.struct("", data, kind)
    if reader.problems:
        raise SettingsError(source, reader.problems)
    assert isinstance(value, kind)
    return value


_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\"'-]+)\s*\]\]?")
# Of `egress.trusted[1].ports[0]`: `[0]`, then `.ports`, then `[1]`.
_LAST_PART = re.compile(r"(?:\[\d+\]|\.[^.\[]*)$")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def _key_lines(text: str) -> dict[str, int]:
    """Map dotted keys (`egress.trusted[1].ports`) to their lines, from 1; good enough to point a person at the place."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[2].replace('"', "")
            if header[1] == "[[":
                index = counts.get(section, -1) + 1
                counts[section] = index
                section = f"{section}[{index}]"
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            lines.setdefault(f"{section}.{key[1]}" if section else key[1], number)
    return lines


class _Reader:
    """Walks the data beside the struct types and gathers problems instead of stopping at the first."""

    def __init__(self, lines: dict[str, int], structure: str = "a table") -> None:
        self.problems: list[Problem] = []
        self._lines = lines
        # What the format calls something with keys.
        self._structure = structure

    def _problem(self, key: str, message: str) -> None:
        line = self._lines.get(key)
        parent = key
        while line is None and (shorter := _LAST_PART.sub("", parent)) != parent:
            parent = shorter
            line = self._lines.get(parent)
        self.problems.append(Problem(key, line, message))

    def struct(self, path: str, data: object, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        if not isinstance(data, dict):
            self._problem(path, f"must be {self._structure}")
            return None
        before = len(self.problems)
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        bad: set[str] = set()
        for name in sorted(data.keys() - fields.keys(), key=str):
            self._problem(self._join(path, name), f"is not known; known here: {', '.join(sorted(fields))}")
        for name, field in fields.items():
            if name in data:
                count = len(self.problems)
                value = self._value(self._join(path, name), data[name], field.type)
                if len(self.problems) > count:
                    bad.add(name)
                else:
                    values[name] = value
            elif field.required:
                self._problem(self._join(path, name), "is missing")
        # Even beside a bad setting the good ones are checked, with the bad one at its default.
        whole = all(name in values or not field.required for name, field in fields.items())
        made = self._make(path, kind, values, bad, fields.keys()) if whole else None
        return made if len(self.problems) == before else None

    def _make(
        self, path: str, kind: type[msgspec.Struct], values: dict[str, Any], bad: set[str], names: Collection[str]
    ) -> msgspec.Struct | None:
        try:
            return kind(**values)
        except ValueError as error:
            # A struct that checks itself raises one ValueError, a line for each problem: "name: message".
            for line in str(error).splitlines():
                name, separator, message = line.partition(": ")
                # `egress_budget.bytes` is about a field of a field.
                field = name.partition(".")[0]
                if field in bad:
                    continue
                if separator and field in names:
                    self._problem(self._join(path, name), message)
                elif not bad:
                    # About several settings together, so only worth saying when all of them could be read.
                    self._problem(path, line)
            return None

    def _value(self, path: str, value: object, kind: Any) -> object:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(path, value, kind)
        if get_origin(kind) is tuple and isinstance(value, list):
            (item, *_rest) = get_args(kind)
            return tuple(self._value(f"{path}[{index}]", each, item) for index, each in enumerate(value))
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            self._problem(path, str(error)[0].lower() + str(error)[1:])
            return None

    @staticmethod
    def _join(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name
