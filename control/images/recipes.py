"""What our images are made of. Pure: reads the recipes shipped with the program, builds nothing."""

import hashlib
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

SUITE: Final = "bookworm"
IMAGES: Final = ("forwarder", "helper", "sandbox")
# The uid of the image's user; see control.plan.container.SandboxSettings.uid.
USER_ID: Final = 60610
LABEL_IMAGE: Final = "opificia.image"

# Documentation is for people with a shell on the host. Copyright files stay: the licences ask for it.
_NEVER_UNPACKED: Final = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)


class Download(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A gzipped tarball unpacked into the image without its top folder, taken only with exactly this SHA-512."""

    url: str
    sha512: str
    into: str

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        return self.url.rpartition("/")[2]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One image: Debian packages, files put into it, and how the engine starts it.

    `variant` is mmdebstrap's. `files` maps a file beside the recipe to its path in the image, `links` a path in the
    image to what the link says. `config` holds fields of Docker's image configuration.
    """

    name: str
    variant: str
    packages: tuple[str, ...]
    config: dict[str, str | list[str]]
    exclude: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    user: str = ""

    def source(self, file: str) -> Traversable:
        """Return a file that stands beside the recipe."""
        return resources.files("control.images") / self.name / file

    def digest(self, mirrors: Sequence[str] = ()) -> str:
        """Return a hash over everything the image is made from, 16 hex digits."""
        contents = [self.source(file).read_bytes() for file in sorted(self.files)]
        everything = (SUITE, _NEVER_UNPACKED, USER_ID, tuple(mirrors), msgspec.to_builtins(self), contents)
        return hashlib.sha256(msgspec.json.encode(everything, order="sorted")).hexdigest()[:16]

    def label(self, mirrors: Sequence[str] = ()) -> str:
        """Return what says, on an image, that it was made from exactly this."""
        return f"{self.name}-{self.digest(mirrors)}"

    def changes(self, mirrors: Sequence[str] = ()) -> list[str]:
        """Return the image's configuration as Dockerfile instructions, as `docker import --change` takes them."""
        instructions = {"Cmd": "CMD", "User": "USER", "WorkingDir": "WORKDIR"}
        lines = [f"LABEL {LABEL_IMAGE}={self.label(mirrors)}"]
        for field, value in self.config.items():
            if field == "Env":
                lines += [f"ENV {entry}" for entry in value]
            elif isinstance(value, str):
                lines.append(f"{instructions[field]} {value}")
            else:
                lines.append(f"{instructions[field]} {msgspec.json.encode(value).decode()}")
        return lines

    def dpkg_options(self) -> tuple[str, ...]:
        """Return the dpkg options that keep files from being unpacked."""
        return (*_NEVER_UNPACKED, *(f"path-exclude={pattern}" for pattern in self.exclude))


def recipe(name: str) -> Recipe:
    """Return the recipe of one of IMAGES. Raises KeyError for another name."""
    if name not in IMAGES:
        raise KeyError(name)
    text = (resources.files("control.images") / name / "recipe.toml").read_text(encoding="utf-8")
    return msgspec.convert({"name": name, **tomllib.loads(text)}, Recipe)
